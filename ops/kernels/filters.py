"""Which tokens may be drawn, on the GPU: what ops/reference/filters.py keeps, found without a sort.

Every id has a key of its own (`key_of`): greater for a greater logit, on ties for a lower id. What
top-k and top-p keep of a row is therefore all keys from one key on, the row's cut. To find it,
counts say between which logits it must lie (ops/kernels/filter_bins.py); the candidates there are
brought together and the masses of the others added up; and bisection does the rest, a program for
each row, as often as not among some hundred candidates.

No program waits for another, and nothing is added but whole numbers, whose sums have no order: a
row has no company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.filter_bins import (
    NEVER,
    Bins,
    bin_of,
    find_bins,
    gap_to,
    limits,
    mass_of,
    mean,
)
from unisono.ops.kernels.launch import launchable, power_of_two
from unisono.ops.kernels.sampling import LEAST_KEY, key_of, logit_of, piece_keys

_PIECE = 1024
_BLOCK = 2048
"""Candidates that the bisection looks at at once."""


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return `logits` [rows, vocabulary] fp32 with -inf for every id that may not be drawn.

    The contract is the reference's, to the bit where the exponential of an fp64 number is. logits
    with unit stride in a row; temperature, top_p and min_p [rows] fp64 and top_k [rows] int64,
    contiguous. Takes 16 bytes a logit of memory while it runs.
    """
    for option in (temperature, top_p, min_p):
        assert option.dtype == torch.float64
        assert option.is_contiguous()
    assert top_k.dtype == torch.int64
    assert top_k.is_contiguous()
    best_keys = piece_keys(logits, 0, logits.shape[1], _PIECE)
    bins = find_bins(logits, best_keys, temperature, top_k, top_p, _PIECE)
    _find_cut(logits, best_keys, temperature, top_k, top_p, bins)
    left = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _keep_kernel[best_keys.shape](
        logits,
        logits.stride(0),
        best_keys,
        temperature,
        min_p,
        bins.best,
        bins.cut,
        left,
        *_sizes(logits, best_keys),
        PIECE=_PIECE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return left


def _find_cut(
    logits: Tensor,
    best_keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    bins: Bins,
) -> None:
    """Fill in `bins.cut` where it is not known yet."""
    keys, masses = torch.empty((2, *logits.shape), dtype=torch.int64, device=logits.device)
    others = torch.empty(best_keys.shape, dtype=torch.int64, device=logits.device)
    _collect_kernel[best_keys.shape](
        logits,
        logits.stride(0),
        best_keys,
        temperature,
        top_p,
        bins.best,
        bins.scale,
        bins.floor,
        bins.bounds,
        bins.places,
        keys,
        masses,
        others,
        *_sizes(logits, best_keys),
        PIECE=_PIECE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _cut_kernel[(len(logits),)](
        keys,
        masses,
        others,
        top_k,
        top_p,
        bins.scale,
        bins.bounds,
        bins.cut,
        *_sizes(logits, best_keys),
        MANY=power_of_two(best_keys.shape[1]),
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _sizes(logits: Tensor, best_keys: Tensor) -> tuple[int, int]:
    return logits.shape[1], best_keys.shape[1]


@launchable
@triton.jit
def _collect_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    best_keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    best_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    places_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    others_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """The keys of a piece's candidates and their masses, and the mass of what lies before them."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    scale = tl.load(scale_ptr + row)
    if scale > 0.0:
        first, last = tl.load(bounds_ptr + 5 * row), tl.load(bounds_ptr + 5 * row + 1)
        best, before = tl.load(best_ptr + row), tl.zeros((), tl.int64)
        best_key = tl.load(best_keys_ptr + row * pieces + piece)
        is_near = bin_of(logit_of(best_key), best, scale) <= last
        if is_near & (best_key >= tl.load(floor_ptr + row)):
            columns = piece * PIECE + tl.arange(0, PIECE)
            inside = columns < width
            at = logits_ptr + row * row_stride + columns
            logits = tl.load(at, mask=inside, other=-float("inf"))
            bins = bin_of(logits, best, scale)
            chosen = inside & (bins >= first) & (bins <= last)
            place = tl.load(places_ptr + row * pieces + piece) - 1
            place = row * width + place + tl.cumsum(chosen.to(tl.int32), axis=0)
            tl.store(keys_ptr + place, key_of(logits, columns, inside, 0), mask=chosen)
            if tl.load(top_p_ptr + row) < 1.0:
                gap = gap_to(logits, best)
                mass = mass_of(tl.exp(gap / tl.load(temperature_ptr + row)))
                tl.store(masses_ptr + place, mass, mask=chosen)
                before = tl.sum(tl.where(inside & (bins < first), mass, 0), axis=0)
        tl.store(others_ptr + row * pieces + piece, before)


@launchable
@triton.jit
def _cut_kernel(
    keys_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    others_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(scale_ptr + row) > 0.0:
        keys_ptr += row * width
        masses_ptr += row * width
        num = tl.load(bounds_ptr + 5 * row + 3).to(tl.int32)
        cut, end = tl.full((), NEVER, tl.int64), tl.full((), LEAST_KEY, tl.int64)
        for start in range(0, num, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = tl.load(keys_ptr + at, mask=at < num, other=LEAST_KEY)
            end = tl.maximum(end, tl.max(keys, axis=0) + 1)
            cut = tl.minimum(cut, tl.min(tl.where(at < num, keys, NEVER), axis=0))
        top_k = tl.load(top_k_ptr + row)
        if limits(top_k, width):
            ahead, wanted = tl.load(bounds_ptr + 5 * row + 2), top_k.to(tl.float64)
            cut = _crossing(keys_ptr, masses_ptr, num, cut, end, ahead, wanted, False, BLOCK)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            piece = tl.arange(0, MANY)
            others = tl.load(others_ptr + row * pieces + piece, mask=piece < pieces, other=0)
            before, mass = tl.sum(others, axis=0), tl.load(bounds_ptr + 5 * row + 4)
            if limits(top_k, width):
                _, mass = _from(keys_ptr, masses_ptr, num, cut, True, BLOCK)
                mass += before
            wanted = top_p * mass.to(tl.float64)
            cut = _crossing(keys_ptr, masses_ptr, num, cut, end, before, wanted, True, BLOCK)
        tl.store(cut_ptr + row, cut)


@triton.jit
def _crossing(
    keys_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    num: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    ahead: tl.tensor,
    wanted: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The key with which `ahead` and the candidates from `high` down to `low` reach `wanted`, fp64;
    `low` where they never do, and NEVER where nothing is wanted.

    Bisects until no more than one candidate is left in [low, high), with too little from `high` on.
    """
    from_low, _ = _from(keys_ptr, masses_ptr, num, low, BY_MASS, BLOCK)
    from_high = from_low - from_low
    while from_low - from_high > 1:
        middle = mean(low, high)
        count, weight = _from(keys_ptr, masses_ptr, num, middle, BY_MASS, BLOCK)
        is_short = (ahead + weight).to(tl.float64) < wanted
        low = tl.where(is_short, low, middle)
        high = tl.where(is_short, middle, high)
        from_low = tl.where(is_short, from_low, count)
        from_high = tl.where(is_short, count, from_high)
    return tl.where(ahead.to(tl.float64) < wanted, low, NEVER)


@triton.jit
def _from(
    keys_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    num: tl.tensor,
    key: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many candidates have at least this key, and their mass if BY_MASS, else again how many;
    both int64."""
    count, weight = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, num, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < num, other=LEAST_KEY)
        count += tl.sum((keys >= key).to(tl.int32), axis=0)
        if BY_MASS:
            weight += tl.sum(tl.load(masses_ptr + at, mask=keys >= key, other=0), axis=0)
    return count, weight if BY_MASS else count


@launchable
@triton.jit
def _keep_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    best_keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    best_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    left_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """The logits from the cut on that are as likely as min-p asks, and NaN."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    columns = piece * PIECE + tl.arange(0, PIECE)
    inside = columns < width
    left = tl.full((PIECE,), -float("inf"), tl.float32)
    best, cut = tl.load(best_ptr + row), tl.load(cut_ptr + row)
    if (tl.load(best_keys_ptr + row * pieces + piece) >= cut) | (best != best):
        logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0)
        logits += 0.0  # -0.0 and 0.0 are equal as logits
        keep = key_of(logits, columns, inside, 0) >= cut
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            likelihood = tl.exp(gap_to(logits, best) / tl.load(temperature_ptr + row))
            keep = keep & (likelihood >= min_p)
        left = tl.where(keep | (logits != logits), logits, left)
    tl.store(left_ptr + row * width + columns, left, mask=inside)
