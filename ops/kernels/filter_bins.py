"""Where top-k and top-p may cut a row, told by counts: the first half of ops/kernels/filters.py.

The logits of a row are counted in 256 bins, by their distance from the greatest. For top-k the
counts say in which bin the cut lies. For top-p the edges of a bin say how much mass it holds at
least and at most, and so between which bins; mostly that is two or three. Scales decide how many
candidates that leaves, and how long it takes to choose among them, never what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import launchable, power_of_two
from unisono.ops.kernels.sampling import LEAST_KEY, logit_of

NEVER = tl.constexpr((1 << 63) - 1)
"""A cut that no key reaches."""
_BINS = tl.constexpr(256)
_STEP = 32
"""Pieces whose counts are looked at at once."""
_REACH = tl.constexpr(4.0)
"""How deep bins go, in distances from the best logit of all pieces to that of the worst: of 150,000
normal logits 1 in 100 lies deeper."""
_NO_MASS = tl.constexpr(28.5)
"""At this many temperatures below the greatest logit, a mass is rounded to 0: 41 log(2) is 28.4."""
UNIT = tl.constexpr(2.0**40)
"""The mass of the likeliest token, as in the reference."""
_ROUNDER = tl.constexpr(2.0**52)
_ROUNDER_BITS = tl.constexpr(0x4330_0000_0000_0000)
_EDGE = tl.constexpr(1e-6)
"""By how much of its distance the edge of a bin may be off: fp32 rounds three times."""
_SLACK = tl.constexpr(1e-9)
"""By how much sums of masses in fp64 may be off."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Of each row, and where `scale` is above 0, the candidates."""

    best: Tensor  # [rows] fp32, the greatest logit
    scale: Tensor  # [rows] fp32, bins to the unit; 0 where nothing is left to be found
    cut: Tensor  # [rows] int64, which holds where `scale` is 0
    floor: Tensor  # [rows] int64: a piece whose greatest key is below holds no candidate
    bounds: Tensor
    """[rows, 5] int64: first and last bin of the candidates, the number of ids in the bins before,
    the number of candidates, and the mass of all ids, for a row with top-p and without top-k."""
    places: Tensor  # [rows, pieces] int32, how many candidates lie in the pieces before


def find_bins(
    logits: Tensor,
    best_keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    piece: int,
) -> Bins:
    """Return the bins that the cut of each row must lie in.

    logits [rows, vocabulary] and the options as `filter_logits` takes them; best_keys [rows,
    pieces] int64, the greatest key of each `piece` columns.
    """
    (rows, width), pieces, device = logits.shape, best_keys.shape[1], logits.device
    best, scale = torch.empty((2, rows), dtype=torch.float32, device=device)
    cut, floor = torch.empty((2, rows), dtype=torch.int64, device=device)
    bounds = torch.empty((rows, 5), dtype=torch.int64, device=device)
    counts = torch.empty((rows, pieces, _BINS.value), dtype=torch.int32, device=device)
    masses = torch.empty((rows, pieces), dtype=torch.int64, device=device)
    places = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    options, many = (temperature, top_k, top_p), power_of_two(pieces)
    _span_kernel[(rows,)](
        best_keys,
        *options,
        best,
        scale,
        cut,
        floor,
        width,
        pieces,
        MANY=many,
        num_warps=4 if many > 256 else 1,
    )
    _count_kernel[(rows, pieces)](
        logits,
        logits.stride(0),
        best_keys,
        *options,
        best,
        scale,
        floor,
        counts,
        masses,
        width,
        pieces,
        PIECE=piece,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _bound_kernel[(rows,)](
        counts,
        masses,
        *options,
        scale,
        bounds,
        places,
        width,
        pieces,
        MANY=many,
        STEP=_STEP,
        num_warps=8,
    )
    return Bins(best, scale, cut, floor, bounds, places)


@triton.jit
def bin_of(logits: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """0 for the greatest logits, ascending as they fall; whatever is far away is in the last bin.

    Bin b begins at the distance b / scale, but for what fp32 rounds.
    """
    distance = tl.where(logits == best, 0.0, best - logits)
    return tl.minimum(distance * scale, _BINS - 1.0).to(tl.int32)


@triton.jit
def mass_of(likelihood: tl.tensor) -> tl.tensor:
    """round(2^40 likelihood), halves to even, int64. likelihood fp64 in [0, 1]."""
    # A number from 2^52 on has no bits for fractions, so that the sum is rounded.
    bits = (likelihood * UNIT + _ROUNDER).to(tl.int64, bitcast=True)
    return bits - _ROUNDER_BITS


@triton.jit
def gap_to(logits: tl.tensor, best: tl.tensor) -> tl.tensor:
    """logits - best, fp64."""
    # Equal infinities have no difference.
    return tl.where(logits == best, 0.0, logits.to(tl.float64) - best.to(tl.float64))


@triton.jit
def limits(top_k: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Whether top-k takes anything away."""
    return (top_k > 0) & (top_k < width)


@launchable
@triton.jit
def _span_kernel(
    best_keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    best_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    MANY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, MANY)
    inside = piece < pieces
    keys = tl.load(best_keys_ptr + row * pieces + piece, mask=inside, other=LEAST_KEY)
    best = logit_of(tl.max(keys, axis=0))
    is_number = (best > -float("inf")) & (best == best)
    has_number = inside & (logit_of(keys) > -float("inf"))
    least = logit_of(tl.min(tl.where(has_number, keys, NEVER), axis=0))
    top_k = tl.load(top_k_ptr + row)
    has_top_k = limits(top_k, width)
    # More than there are pieces may lie deeper than the best of every piece; how deep is a guess.
    span, floor = (best - least) * _REACH, tl.full((), LEAST_KEY, tl.int64)
    if is_number & has_top_k & (top_k <= pieces):
        # So many pieces, so many ids at least: what is below the best of all these is not needed.
        floor = _floor(keys, inside, top_k)
        lowest = logit_of(floor)
        span = tl.where(lowest > -float("inf"), best - lowest, span)
    if has_top_k == 0:
        no_mass = (tl.load(temperature_ptr + row) * _NO_MASS).to(tl.float32)
        span = tl.minimum(span, no_mass)
    span = tl.where(span < 1e30, tl.maximum(span, 1e-30), 1.0)
    searched = is_number & (has_top_k | (tl.load(top_p_ptr + row) < 1.0))
    tl.store(best_ptr + row, best)
    # What lies at the end of the span is not in the last bin, where all the rest is.
    tl.store(scale_ptr + row, tl.where(searched, (_BINS - 2.0) / span, 0.0))
    tl.store(floor_ptr + row, floor)
    # Where there is a NaN, the reference keeps nothing else.
    tl.store(cut_ptr + row, tl.where(best == best, LEAST_KEY, NEVER))


@triton.jit
def _floor(keys: tl.tensor, inside: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """A key that `wanted` of the keys `inside` reach, and no more if they are all different."""
    low, high = tl.min(tl.where(inside, keys, NEVER), axis=0), tl.full((), NEVER, tl.int64)
    count = tl.sum(inside.to(tl.int64), axis=0)
    while (count > wanted) & (low + 1 < high):
        middle = mean(low, high)
        reach = tl.sum((inside & (keys >= middle)).to(tl.int64), axis=0)
        is_enough = reach >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        count = tl.where(is_enough, reach, count)
    return low


@triton.jit
def mean(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """(low + high) / 2 of whole numbers, rounded down, without their sum, which might not fit."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@launchable
@triton.jit
def _count_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    best_keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    best_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    scale = tl.load(scale_ptr + row)
    if scale > 0.0:
        counts, mass = tl.zeros((_BINS,), tl.int32), tl.zeros((), tl.int64)
        if tl.load(best_keys_ptr + row * pieces + piece) >= tl.load(floor_ptr + row):
            columns = piece * PIECE + tl.arange(0, PIECE)
            inside = columns < width
            at = logits_ptr + row * row_stride + columns
            logits = tl.load(at, mask=inside, other=-float("inf"))
            best, top_p = tl.load(best_ptr + row), tl.load(top_p_ptr + row)
            counts = tl.histogram(bin_of(logits, best, scale), _BINS, mask=inside)
            if (top_p < 1.0) & (limits(tl.load(top_k_ptr + row), width) == 0):
                gap = gap_to(logits, best)
                masses = mass_of(tl.exp(gap / tl.load(temperature_ptr + row)))
                mass = tl.sum(tl.where(inside, masses, 0), axis=0)
        tl.store(counts_ptr + (row * pieces + piece) * _BINS + tl.arange(0, _BINS), counts)
        tl.store(masses_ptr + row * pieces + piece, mass)


@launchable
@triton.jit
def _bound_kernel(
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    places_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    if scale > 0.0:
        bins, step = tl.arange(0, _BINS), tl.arange(0, STEP)
        counts_ptr += row * pieces * _BINS
        counts = tl.zeros((_BINS,), tl.int32)
        for start in range(0, pieces, STEP):
            at = (start + step)[:, None]
            part = tl.load(counts_ptr + at * _BINS + bins[None, :], mask=at < pieces, other=0)
            counts += tl.sum(part, axis=0)
        top_k = tl.load(top_k_ptr + row)
        has_top_k = limits(top_k, width)
        wanted = tl.where(has_top_k, top_k, width)
        up_to = tl.cumsum(counts, axis=0)
        last = tl.sum((up_to < wanted).to(tl.int32), axis=0)
        first = last
        piece = tl.arange(0, MANY)
        masses = tl.load(masses_ptr + row * pieces + piece, mask=piece < pieces, other=0)
        mass = tl.sum(masses, axis=0)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            taken = tl.minimum(counts.to(tl.int64), wanted - (up_to - counts))
            taken = tl.maximum(taken, 0).to(tl.float64)
            depth = 1.0 / (scale.to(tl.float64) * tl.load(temperature_ptr + row))
            depth, edge = tl.minimum(depth, 1e300), bins.to(tl.float64)
            # Of each bin; a mass may be rounded by half a unit.
            most = tl.exp(-edge * depth * (1.0 - _EDGE)) + 1.0 / UNIT
            least = tl.exp(-(edge + 1.0) * depth * (1.0 + _EDGE)) - 1.0 / UNIT
            least = tl.where(bins < _BINS - 1, tl.maximum(least, 0.0), 0.0)
            # Of each bin and all before, and of all.
            most, least = tl.cumsum(taken * most, axis=0), tl.cumsum(taken * least, axis=0)
            most_all, least_all = tl.max(most, axis=0), tl.max(least, axis=0)
            mass_most = tl.where(has_top_k, most_all, mass.to(tl.float64) / UNIT)
            mass_least = tl.where(has_top_k, least_all, mass.to(tl.float64) / UNIT)
            # Neither is more than what the bins behind leave of the whole, or less.
            left_least, left_most = least_all - least, most_all - most
            most = tl.minimum(most, mass_most - left_least)
            least = tl.maximum(least, mass_least - left_most)
            share = mass_least * top_p * (1.0 - _SLACK)
            first = tl.minimum(tl.sum((most < share).to(tl.int32), axis=0), last)
            share = mass_most * top_p * (1.0 + _SLACK)
            enough = tl.sum((least < share).to(tl.int32), axis=0)
            # Whose share it is, is known only once top-k has been found too.
            last = tl.where(has_top_k, last, tl.minimum(enough, last))
        chosen = (bins >= first) & (bins <= last)
        bounds_ptr += 5 * row
        tl.store(bounds_ptr, first.to(tl.int64))
        tl.store(bounds_ptr + 1, last.to(tl.int64))
        tl.store(bounds_ptr + 2, tl.sum(tl.where(bins < first, counts, 0), axis=0).to(tl.int64))
        tl.store(bounds_ptr + 3, tl.sum(tl.where(chosen, counts, 0), axis=0).to(tl.int64))
        tl.store(bounds_ptr + 4, mass)
        place = first - first
        for start in range(0, pieces, STEP):
            at = (start + step)[:, None]
            mask = (at < pieces) & chosen[None, :]
            part = tl.load(counts_ptr + at * _BINS + bins[None, :], mask=mask, other=0)
            held = tl.sum(part, axis=1)
            before = place + tl.cumsum(held, axis=0) - held
            tl.store(places_ptr + row * pieces + start + step, before, mask=start + step < pieces)
            place += tl.sum(held, axis=0)
