"""Where top-k and top-p may cut a row, told by counts: the first half of ops/kernels/filters.py.

The logits of a row are counted in 256 bins, by their distance from the greatest. For top-k the
counts say in which bin the cut lies. For top-p the edges of a bin say how much mass it holds at
least and at most, and so between which bins. Scales decide how many candidates that leaves, and how
long it takes to choose among them, never what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.sampling import LEAST_KEY, logit_of

NEVER = tl.constexpr((1 << 63) - 1)
"""A cut that no key reaches."""
_BINS = tl.constexpr(256)
_STEP = 32
"""Pieces whose counts are looked at at once."""
_REACH = tl.constexpr(3.0)
_NO_MASS = tl.constexpr(28.5)
"""At this many temperatures below the greatest logit, a mass is rounded to 0: 41 log(2) is 28.4."""
_UNIT = tl.constexpr(2.0**40)
_SLACK = tl.constexpr(1e-4)


@dataclass(frozen=True, slots=True)
class Bins:
    """Of each row, and where `scale` is above 0, the candidates."""

    best: Tensor  # [rows] fp32, the greatest logit
    scale: Tensor  # [rows] fp32, bins to the unit; 0 where nothing is left to be found
    cut: Tensor  # [rows] int64, which holds where `scale` is 0
    floor: Tensor  # [rows] int64: a piece whose greatest key is below holds no candidate
    bounds: Tensor
    """[rows, 4] int64: first and last bin of the candidates, the number of ids in the bins before,
    the number of candidates."""
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
    bounds = torch.empty((rows, 4), dtype=torch.int64, device=device)
    counts = torch.empty((rows, pieces, _BINS.value), dtype=torch.int32, device=device)
    places = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    options, many = (temperature, top_k, top_p), triton.next_power_of_2(pieces)
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
        best,
        scale,
        floor,
        counts,
        width,
        pieces,
        PIECE=piece,
        num_warps=4,
    )
    _bound_kernel[(rows,)](
        counts, *options, scale, bounds, places, width, pieces, STEP=_STEP, num_warps=8
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
def limits(top_k: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Whether top-k takes anything away."""
    return (top_k > 0) & (top_k < width)


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
    tl.store(scale_ptr + row, tl.where(searched, (_BINS - 1.0) / span, 0.0))
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


@triton.jit
def _count_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    best_keys_ptr: tl.tensor,
    best_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    scale = tl.load(scale_ptr + row)
    if scale > 0.0:
        counts = tl.zeros((_BINS,), tl.int32)
        if tl.load(best_keys_ptr + row * pieces + piece) >= tl.load(floor_ptr + row):
            columns = piece * PIECE + tl.arange(0, PIECE)
            inside = columns < width
            at = logits_ptr + row * row_stride + columns
            logits = tl.load(at, mask=inside, other=-float("inf"))
            bins = bin_of(logits, tl.load(best_ptr + row), scale)
            counts = tl.histogram(bins, _BINS, mask=inside)
        tl.store(counts_ptr + (row * pieces + piece) * _BINS + tl.arange(0, _BINS), counts)


@triton.jit
def _bound_kernel(
    counts_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    places_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
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
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            taken = tl.minimum(counts.to(tl.int64), wanted - (up_to - counts))
            taken = tl.maximum(taken, 0).to(tl.float64)
            depth = 1.0 / (scale.to(tl.float64) * tl.load(temperature_ptr + row))
            depth, edge = tl.minimum(depth, 1e300), bins.to(tl.float64)
            # A mass may be rounded by half a unit, and the edges of a bin by what fp32 rounds.
            most = tl.exp(-edge * depth * (1.0 - _SLACK)) + 1.0 / _UNIT
            least = tl.exp(-(edge + 1.0) * depth * (1.0 + _SLACK)) - 1.0 / _UNIT
            least = tl.where(bins < _BINS - 1, tl.maximum(least, 0.0), 0.0)
            most, least = tl.cumsum(taken * most, axis=0), tl.cumsum(taken * least, axis=0)
            share = top_p * (1.0 - _SLACK) * tl.max(least, axis=0)
            first = tl.minimum(tl.sum((most < share).to(tl.int32), axis=0), last)
            share = top_p * (1.0 + _SLACK) * tl.max(most, axis=0)
            enough = tl.sum((least < share).to(tl.int32), axis=0)
            # Whose share it is, is known only once top-k has been found too.
            last = tl.where(has_top_k, last, tl.minimum(enough, last))
        chosen = (bins >= first) & (bins <= last)
        bounds_ptr += 4 * row
        tl.store(bounds_ptr, first.to(tl.int64))
        tl.store(bounds_ptr + 1, last.to(tl.int64))
        tl.store(bounds_ptr + 2, tl.sum(tl.where(bins < first, counts, 0), axis=0).to(tl.int64))
        tl.store(bounds_ptr + 3, tl.sum(tl.where(chosen, counts, 0), axis=0).to(tl.int64))
        place = first - first
        for start in range(0, pieces, STEP):
            at = (start + step)[:, None]
            mask = (at < pieces) & chosen[None, :]
            part = tl.load(counts_ptr + at * _BINS + bins[None, :], mask=mask, other=0)
            held = tl.sum(part, axis=1)
            before = place + tl.cumsum(held, axis=0) - held
            tl.store(places_ptr + row * pieces + start + step, before, mask=start + step < pieces)
            place += tl.sum(held, axis=0)
