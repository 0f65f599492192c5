"""Vocabulary-parallel arg-max on the GPU: the packed keys of ops/reference/sampling.py, bit by bit.

Many programs take a piece of a row each and leave the greatest key of it; a second kernel takes the
greatest of those. Keys are whole numbers, so that no cut can change the answer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable, power_of_two
from unisono.ops.kernels.overlap import begin, overlap_options

LEAST_KEY = tl.constexpr(-(1 << 63))
_ID_BITS = tl.constexpr(31)
_ID_MASK = tl.constexpr((1 << 31) - 1)
_NAN_ORDER = tl.constexpr(0x7FFF_FFFF)
_NOTHING = tl.constexpr(-(1 << 31))
"""Below the order of every logit, -inf too."""
_STEP = 2048
"""Ids that a program compares at a time, each with the one that its lane had a step before."""
_PIECE = 8192
"""Ids of a program where many rows keep the card busy; where they are few, those of one step."""
_MANY_ROWS = 16


def argmax_keys(logits: Tensor, first_id: int, num_ids: int) -> Tensor:
    """One int64 key a row: greater for a greater logit, on ties for a lower id.

    logits [rows, shard] fp32 with unit stride in a row, whose column j is vocabulary id
    first_id + j; ids >= num_ids are never chosen. The key is (order-preserving bits of the fp32
    value) << 31 | ~id, so the maximum of the keys of all shards is the answer. A shard with no
    eligible id gives the least key. NaN orders above +inf and is found by `unpack_keys`.
    """
    piece = _PIECE if len(logits) >= _MANY_ROWS else _STEP
    return greatest(piece_keys(logits, first_id, num_ids, piece))


def piece_keys(logits: Tensor, first_id: int, num_ids: int, piece: int) -> Tensor:
    """The greatest key of each piece of a row, [rows, pieces] int64; arguments as above."""
    rows, eligible, pieces = pieces_of(logits, first_id, num_ids, piece)
    keys = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    _piece_kernel[(rows, pieces)](
        logits,
        logits.stride(0),
        keys,
        first_id,
        eligible,
        PIECE=piece,
        STEP=min(piece, _STEP),
        num_warps=4,
        **overlap_options(logits.device),
    )
    return keys


def pieces_of(logits: Tensor, first_id: int, num_ids: int, piece: int) -> tuple[int, int, int]:
    """Rows, eligible columns, and the pieces of a row (one even where nothing is eligible)."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    rows, shard = logits.shape
    eligible = min(shard, max(num_ids - first_id, 0))
    return rows, eligible, max(1, blocks_of(eligible, piece))


def greatest(keys: Tensor) -> Tensor:
    """The greatest key of each row of `keys` [rows, pieces], contiguous -> [rows]."""
    rows, pieces = keys.shape
    if pieces == 1:
        return keys[:, 0]
    best = torch.empty((rows,), dtype=torch.int64, device=keys.device)
    block = power_of_two(pieces)
    _greatest_kernel[(rows,)](
        keys,
        best,
        pieces,
        BLOCK=block,
        num_warps=4 if block > 128 else 1,
        **overlap_options(keys.device),
    )
    return best


@launchable
@triton.jit
def _piece_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    keys_ptr: tl.tensor,
    first_id: tl.tensor,
    eligible: tl.tensor,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Value and id apart, for a number of 64 bits costs several times as much to compare."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    logits_ptr += row * row_stride
    best = tl.full((STEP,), _NOTHING, tl.int32)
    at = tl.full((STEP,), _ID_MASK, tl.int32)
    for start in tl.static_range(0, PIECE, STEP):
        columns = piece * PIECE + start + tl.arange(0, STEP)
        inside = columns < eligible
        order = _order_of(tl.load(logits_ptr + columns, mask=inside, other=0.0))
        # Not where they are equal: the ids before are lower.
        is_better = inside & (order > best)
        best = tl.where(is_better, order, best)
        at = tl.where(is_better, columns, at)
    top = tl.max(best, axis=0)
    column = tl.min(tl.where(best == top, at, _ID_MASK), axis=0)
    key = (top.to(tl.int64) << _ID_BITS) | (_ID_MASK - (column.to(tl.int64) + first_id))
    key = tl.where(top == _NOTHING, LEAST_KEY, key)
    tl.store(keys_ptr + row * tl.num_programs(1) + piece, key)


@triton.jit
def _order_of(logits: tl.tensor) -> tl.tensor:
    """An int32 for each fp32 logit, greater for a greater one."""
    # -0.0 and 0.0 are equal as logits and must be equal as keys.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    return tl.where(logits != logits, _NAN_ORDER, ordered)


@triton.jit
def key_of(
    logits: tl.tensor, columns: tl.tensor, inside: tl.tensor, first_id: tl.tensor
) -> tl.tensor:
    """The key of each fp32 logit, and the least one where not `inside`."""
    lowest = _ID_MASK - (columns.to(tl.int64) + first_id)
    ordered = _order_of(logits).to(tl.int64) << _ID_BITS
    return tl.where(inside, ordered | lowest, LEAST_KEY)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """The fp32 logit of a key, +0.0 for both zeros."""
    ordered = (key >> _ID_BITS).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFF_FFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key: tl.tensor) -> tl.tensor:
    """The vocabulary id of a key, int64."""
    return _ID_MASK - (key & _ID_MASK)


@launchable
@triton.jit
def _greatest_kernel(
    keys_ptr: tl.tensor,
    best_ptr: tl.tensor,
    pieces: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * pieces + places, mask=places < pieces, other=LEAST_KEY)
    tl.store(best_ptr + row, tl.max(keys, axis=0))
