"""Embedding over a shard of the vocabulary."""

import torch
from torch import Tensor


def embed_shard(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of `table` [shard, hidden] for ids in [first_id, first_id + shard), else zeros.

    token_ids [tokens] int64 -> [tokens, hidden]; the sum over ranks is the embedding.
    """
    local = token_ids - first_id
    inside = (local >= 0) & (local < table.shape[0])
    rows = table.index_select(0, torch.where(inside, local, 0))
    return rows * inside.unsqueeze(1).to(table.dtype)
