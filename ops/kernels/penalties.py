"""Biases of single tokens on the GPU; the reference's `penalize` serves it as it is."""

from __future__ import annotations

import torch
from torch import Tensor


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor, first_id: int) -> Tensor:
    """Return `logits` [rows, shard] fp32 with bias[i] added to id ids[i] of row rows[i].

    rows, ids [n] int64; bias [n] fp64, -inf for an id that may not come. Ids of other shards are
    left out. An id may stand twice in a row, once of them with 0 or -inf, so that the order of
    the two cannot matter. Unlike index_put_, scatter_add_ never waits for the device, so the
    call can be captured in a graph.
    """
    count, width = logits.shape
    column = ids - first_id
    is_here = (column >= 0) & (column < width)
    # A spare column takes what belongs to other shards, so that no shape depends on the ids.
    place = rows * (width + 1) + torch.where(is_here, column, width)
    total = torch.zeros(count * (width + 1), dtype=torch.float64, device=logits.device)
    total = total.scatter_add_(0, place, bias).view(count, width + 1)
    return (logits.double() + total[:, :width]).float()
