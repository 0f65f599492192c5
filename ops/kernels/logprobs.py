"""Log-probabilities of tokens on the GPU: what ops/reference/logprobs.py gives, without a top-k of
the row.

Masses are whole numbers, so that their sum has no order. The likeliest ids are found by the keys of
ops/kernels/sampling.py, of which no two are equal: those of the `num_top` pieces whose greatest
keys are greatest are enough.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.filter_bins import UNIT, gap_to, mass_of
from unisono.ops.kernels.launch import launchable, power_of_two
from unisono.ops.kernels.sampling import (
    LEAST_KEY,
    greatest,
    id_of,
    key_of,
    logit_of,
    piece_keys,
)

_PIECE = 1024
_MOST_TOP = 64


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability and rank of one id a row, and the `num_top` likeliest ids.

    The contract is the reference's, to the bit where exp and log of an fp64 number are. logits
    [rows, vocabulary] fp32 with unit stride in a row; token_ids [rows] int64, contiguous; num_top
    at most 64.
    """
    assert token_ids.dtype == torch.int64
    assert token_ids.is_contiguous()
    assert 0 <= num_top <= _MOST_TOP, f"{num_top} likeliest ids"
    (rows, width), device = logits.shape, logits.device
    best_keys = piece_keys(logits, 0, width, _PIECE)
    pieces = best_keys.shape[1]
    best = greatest(best_keys)
    masses, greater = torch.empty((2, rows, pieces), dtype=torch.int64, device=device)
    _weigh_kernel[(rows, pieces)](
        logits,
        logits.stride(0),
        token_ids,
        best,
        masses,
        greater,
        width,
        PIECE=_PIECE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    keys = _likeliest(logits, best_keys, num_top)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    top_ids = torch.empty((rows, num_top), dtype=torch.int64, device=device)
    top = torch.empty((rows, num_top), dtype=torch.float32, device=device)
    _finish_kernel[(rows,)](
        logits,
        logits.stride(0),
        token_ids,
        best,
        masses,
        greater,
        keys,
        logprob,
        rank,
        top_ids,
        top,
        width,
        pieces,
        keys.shape[1],
        num_top,
        MANY=power_of_two(pieces),
        KEYS=power_of_two(max(1, keys.shape[1])),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return logprob, rank, top_ids, top


def _likeliest(logits: Tensor, best_keys: Tensor, num_top: int) -> Tensor:
    """Keys of each row with the `num_top` greatest among them, [rows, n] int64, the least key where
    there are no more."""
    (rows, width), pieces = logits.shape, best_keys.shape[1]
    num_lists = min(num_top, pieces)
    keys = torch.empty((rows, num_lists * num_top), dtype=torch.int64, device=logits.device)
    if num_top:
        _likeliest_kernel[(rows, num_lists)](
            logits,
            logits.stride(0),
            best_keys,
            keys,
            width,
            pieces,
            num_top,
            MANY=power_of_two(pieces),
            PIECE=_PIECE,
            num_warps=4,
        )
    return keys


@triton.jit
def _own_logit(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
) -> tl.tensor:
    token_id = tl.load(token_ids_ptr + row)
    at = logits_ptr + row * row_stride + token_id
    return tl.load(at, mask=token_id < width, other=-float("inf"))


@launchable
@triton.jit
def _weigh_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    greater_ptr: tl.tensor,
    width: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """The mass of a piece, and how many of its logits are greater than that of the token."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    columns = piece * PIECE + tl.arange(0, PIECE)
    inside = columns < width
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=-float("inf"))
    own = _own_logit(logits_ptr, row_stride, token_ids_ptr, row, width)
    mass = mass_of(tl.exp(gap_to(logits, logit_of(tl.load(best_ptr + row)))))
    at = row * tl.num_programs(1) + piece
    tl.store(masses_ptr + at, tl.sum(tl.where(inside, mass, 0), axis=0))
    tl.store(greater_ptr + at, tl.sum((logits > own).to(tl.int64), axis=0))


@launchable
@triton.jit
def _likeliest_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    best_keys_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    num_top: tl.tensor,
    MANY: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """The greatest keys of one piece, descending: of that whose greatest is the list-th."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    piece = tl.arange(0, MANY)
    best_keys = tl.load(best_keys_ptr + row * pieces + piece, mask=piece < pieces, other=LEAST_KEY)
    for _ in range(place):
        best_keys = _without(best_keys, tl.max(best_keys, axis=0))
    first = id_of(tl.max(best_keys, axis=0)) // PIECE * PIECE
    columns = first + tl.arange(0, PIECE)
    inside = columns < width
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0)
    keys = key_of(logits, columns, inside, 0)
    keys_ptr += (row * tl.num_programs(1) + place) * num_top
    for i in range(num_top):
        key = tl.max(keys, axis=0)
        tl.store(keys_ptr + i, key)
        keys = _without(keys, key)


@triton.jit
def _without(keys: tl.tensor, key: tl.tensor) -> tl.tensor:
    return tl.where(keys == key, LEAST_KEY, keys)


@launchable
@triton.jit
def _finish_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    greater_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    logprob_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    top_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    num_keys: tl.tensor,
    num_top: tl.tensor,
    MANY: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, MANY)
    at, held = row * pieces + piece, piece < pieces
    greater = tl.sum(tl.load(greater_ptr + at, mask=held, other=0), axis=0)
    mass = tl.sum(tl.load(masses_ptr + at, mask=held, other=0), axis=0)
    total = tl.log(mass.to(tl.float64) / UNIT)
    best = logit_of(tl.load(best_ptr + row))
    own = _own_logit(logits_ptr, row_stride, token_ids_ptr, row, width)
    tl.store(logprob_ptr + row, (gap_to(own, best) - total).to(tl.float32))
    tl.store(rank_ptr + row, greater + 1)
    place = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * num_keys + place, mask=place < num_keys, other=LEAST_KEY)
    for i in range(num_top):
        key = tl.max(keys, axis=0)
        keys = _without(keys, key)
        is_known = key > LEAST_KEY
        chance = (gap_to(logit_of(key), best) - total).to(tl.float32)
        tl.store(top_ids_ptr + row * num_top + i, tl.where(is_known, id_of(key), -1))
        tl.store(top_ptr + row * num_top + i, tl.where(is_known, chance, -float("inf")))
