"""Which drafts were right."""

import torch
from torch import Tensor


def accept_drafts(token_ids: Tensor, drafted: Tensor, first: Tensor, sizes: Tensor) -> Tensor:
    """Return how many tokens each row answers, [rows] int64: 1, and 1 for each right draft.

    Row r has places [first[r], first[r] + sizes[r]) of token_ids [places] int64, the tokens that
    the model chooses, and of `drafted`, what the drafts say that they are; the last place of a row
    has no draft. A draft is right if it is the chosen token and all before it are right.
    """
    place = torch.arange(int(sizes.max()), device=token_ids.device)
    at = (first[:, None] + place).clamp(max=len(token_ids) - 1)
    is_right = (token_ids[at] == drafted[at]) & (place < sizes[:, None] - 1)
    return 1 + is_right.long().cumprod(1).sum(1)
