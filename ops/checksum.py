"""Checksums of rows of numbers: equal bits give equal sums, and one other bit gives another.

Integer arithmetic alone, on any device: the sum wraps and has no order, so that shards of a row may
be summed apart and added.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The multipliers of splitmix64, as int64."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_ITEMS = 1 << 22
"""Numbers at a time: 32 MB of int64, and a few times that in between."""


def row_checksums(x: Tensor, first_id: int = 0) -> Tensor:
    """x [rows, ...] of any dtype -> [rows] int64.

    Number i of a row is mixed with `first_id` + i, so that a permutation of a row has another sum.
    """
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    step = max(1, _PIECE_ITEMS // max(1, flat.shape[1]))
    sums = [_sums(piece, first_id) for piece in flat.split(step)]
    return torch.cat(sums) if sums else flat.new_empty(0, dtype=torch.int64)


def _sums(x: Tensor, first_id: int) -> Tensor:
    bits = x.contiguous().view(_BITS[x.element_size()]).to(torch.int64)
    place = torch.arange(first_id, first_id + x.shape[1], dtype=torch.int64, device=x.device)
    mixed = bits + (place + 1) * _ODD[0]
    mixed = (mixed ^ (mixed >> 30)) * _ODD[1]
    mixed = (mixed ^ (mixed >> 27)) * _ODD[2]
    return (mixed ^ (mixed >> 31)).sum(1)
