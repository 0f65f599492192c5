"""Rejection sampling of drafts on the GPU: what ops/reference/speculation.py gives, in two passes.

The first kernel leaves of each piece of a row its greatest logit and the sum of its exponentials,
for the model and for the drafter. The second adds those of a row up, decides, and writes the
logarithm of what is in excess: nothing of a row whose draft is kept, and such a row is not read
again. The third gives the draft the rows of which nothing is left, kept ones among them.

Pieces are cut at the same ids whatever the number of rows, and every program of a row adds them up
alike. So a row has no company, and all ranks judge alike.

Whether a draft is kept is decided in fp64, but for the two sums. Exponentials of all ids are fp32:
in fp64 they would take longer than the memory does. With u = 2^-24 and an id's gap g = (greatest
logit - logit) / temperature, that exponential is off by less than 3 u g + 2^-21 of itself. The mean
of g over a softmax is at most log(vocabulary), so the odds p of a row, taken together, are off by
d < 6 u log(vocabulary) + 2^-19, which is 7e-6 at 262,208 ids at worst. Sums add little to that: of
four neighbours they are fp32, all others fp64. Cancellation in p - q does no harm: the less is in
excess, the more seldom it is drawn from. The odds of what comes out, taken together, are off by
less than 4 (d of p + d of q), however near p and q are; by 2e-7 as a rule, which the reference
loses too where it rounds the logarithm to fp32. The logarithm here is off by 2^-22 of itself, or
of 1.

What would be wrong by however little is exact:
- Rows that are the same have the same odds: no product is fused with the difference.
- A rejected draft is not left. Its p is less than its q; fp32 may have missed that.
- The draft is kept where nothing is left, which is asked of what was written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.filter_bins import gap_to
from unisono.ops.kernels.gumbel import rough_log2
from unisono.ops.kernels.launch import blocks_of, bound, launchable, power_of_two
from unisono.ops.kernels.overlap import begin, overlap_options

_PIECE = 2048
"""Ids whose exponentials are added up by one program: fixed, for it orders the sum."""
_MANY_ROWS = 16
_MANY_PIECES = 4
"""Pieces of a program of the second kernel, which adds nothing up, where rows are many."""
_TOGETHER = tl.constexpr(4)
"""Neighbours that are added up in fp32."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LEAST = tl.constexpr(2.0**-126)
"""Below it lies what the logarithm takes for 0."""


def judge_drafts(
    logits: Tensor, draft_logits: Tensor, drafted: Tensor, temperature: Tensor, chance: Tensor
) -> Tensor:
    """Return logits [n, vocabulary] fp32 from which the token of each place is drawn at
    temperature 1, contiguous.

    The contract is the reference's, but for the rounding said above and for odds below 2^-126,
    which are none. logits and draft_logits [n, vocabulary] fp32 with unit stride in a row; drafted
    [n] int64, ids of the vocabulary; temperature [n] fp64 in (0, 1e37); chance [n] fp64. A NaN
    makes all of its row NaN. Waits for nothing.
    """
    rows, width = logits.shape
    assert draft_logits.shape == logits.shape
    for each in (logits, draft_logits):
        assert each.dtype == torch.float32
        assert each.stride(1) == 1
    assert drafted.dtype == torch.int64
    for each in (temperature, chance):
        assert each.dtype == torch.float64
    for each in (drafted, temperature, chance):
        assert each.shape == (rows,)
    # Those that lie apart are copied: columns of what a step is told.
    drafted, temperature, chance = (each.contiguous() for each in (drafted, temperature, chance))
    device, pieces = logits.device, blocks_of(width, _PIECE)
    num_pieces = _MANY_PIECES if rows >= _MANY_ROWS else 1
    programs = blocks_of(pieces, num_pieces)
    weigh, judge, settle = _kernels_on(device, _PIECE, num_pieces, pieces, programs)
    best = torch.empty((2, rows, pieces), dtype=torch.float32, device=device)
    mass = torch.empty((2, rows, pieces), dtype=torch.float64, device=device)
    has_left = torch.empty((rows, programs), dtype=torch.int32, device=device)
    left = torch.empty((rows, width), dtype=torch.float32, device=device)
    given = (logits, logits.stride(0), draft_logits, draft_logits.stride(0), temperature)
    weigh.launch((rows, pieces), *given, best, mass, width)
    judge.launch(
        (rows, programs), *given, drafted, chance, best, mass, left, has_left, width, pieces
    )
    settle.launch((rows,), drafted, has_left, left, width, programs)
    return left


@functools.cache
def _kernels_on(
    device: torch.device, piece: int, num_pieces: int, pieces: int, programs: int
) -> tuple[Any, Any, Any]:
    options = {"enable_fp_fusion": False, **overlap_options(device)}
    for_row = {"PIECE": piece, "num_warps": 4, **options}
    judging = {"IS_CUDA": device.type == "cuda", "NUM_PIECES": num_pieces}
    return (
        bound(_weigh_kernel, **for_row),
        bound(_judge_kernel, MANY=power_of_two(pieces), **judging, **for_row),
        bound(_settle_kernel, MANY=power_of_two(programs), num_warps=1, **options),
    )


@launchable
@triton.jit
def _weigh_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_row_stride: tl.tensor,
    temperature_ptr: tl.tensor,
    best_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    width: tl.tensor,
    PIECE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The greatest logit of a piece of both rows, and the sum of its exponentials beside it."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.num_programs(1)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = columns < width
    at = logits_ptr + row * row_stride + columns
    draft_at = draft_logits_ptr + row * draft_row_stride + columns
    logits = tl.load(at, mask=inside, other=-float("inf"))
    draft_logits = tl.load(draft_at, mask=inside, other=-float("inf"))
    rate = _rate(tl.load(temperature_ptr + row))
    best, mass = _weight(logits, inside, rate, PIECE)
    draft_best, draft_mass = _weight(draft_logits, inside, rate, PIECE)
    place = row * pieces + tl.program_id(1)
    draft_place = place + tl.num_programs(0).to(tl.int64) * pieces
    tl.store(best_ptr + place, best)
    tl.store(mass_ptr + place, mass)
    tl.store(best_ptr + draft_place, draft_best)
    tl.store(mass_ptr + draft_place, draft_mass)


@triton.jit
def _weight(
    logits: tl.tensor,
    inside: tl.tensor,
    rate: tl.tensor,
    PIECE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    best = tl.max(logits, axis=0)
    odds = tl.where(inside, _odds(logits, best, rate), 0.0)
    fours = tl.sum(tl.reshape(odds, (PIECE // _TOGETHER, _TOGETHER)), axis=1)
    return best, tl.sum(fours.to(tl.float64), axis=0)


@triton.jit
def _rate(temperature: tl.tensor) -> tl.tensor:
    """What makes a gap one of powers of two, fp32."""
    return (1.0 / temperature * _LOG2_E).to(tl.float32)


@triton.jit
def _odds(logits: tl.tensor, best: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """exp((logits - best) / temperature) in fp32; NaN for NaN."""
    # Equal infinities have no difference.
    return tl.exp2(tl.where(logits == best, 0.0, (logits - best) * rate))


@triton.jit
def _log(x: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    # The interpreter would warn of each 0.
    return tl.where(
        x == 0.0, -float("inf"), rough_log2(tl.where(x == 0.0, 1.0, x), IS_CUDA) * _LN_2
    )


@launchable
@triton.jit
def _judge_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_row_stride: tl.tensor,
    temperature_ptr: tl.tensor,
    drafted_ptr: tl.tensor,
    chance_ptr: tl.tensor,
    best_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    left_ptr: tl.tensor,
    has_left_ptr: tl.tensor,
    width: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
    IS_CUDA: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    MANY: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """What is left of some pieces: log(max(p - q, 0)), or nothing where the draft is kept."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    draft_logits_ptr += row * draft_row_stride
    drafted = tl.load(drafted_ptr + row)
    own, draft_own = tl.load(logits_ptr + drafted), tl.load(draft_logits_ptr + drafted)
    temperature = tl.load(temperature_ptr + row)
    rate = _rate(temperature)
    at = row * pieces + tl.arange(0, MANY)
    draft_at = at + tl.num_programs(0).to(tl.int64) * pieces
    held = tl.arange(0, MANY) < pieces
    best, total = _total(best_ptr + at, mass_ptr + at, held, rate)
    draft_best, draft_total = _total(best_ptr + draft_at, mass_ptr + draft_at, held, rate)
    share, draft_share = 1.0 / total, 1.0 / draft_total
    p = tl.exp(gap_to(own, best) / temperature) * share
    q = tl.exp(gap_to(draft_own, draft_best) / temperature) * draft_share
    is_kept = tl.load(chance_ptr + row) * q < p
    share, draft_share = share.to(tl.float32), draft_share.to(tl.float32)
    # Backwards: what was read last may still be in the cache.
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    has_left = tl.zeros((PIECE,), tl.int32)
    for number in range(NUM_PIECES):
        columns = (program * NUM_PIECES + number) * PIECE + tl.arange(0, PIECE)
        inside = columns < width
        excess = tl.zeros((PIECE,), tl.float32)
        if is_kept == 0:
            logits = tl.load(logits_ptr + columns, mask=inside, other=-float("inf"))
            drafts = tl.load(draft_logits_ptr + columns, mask=inside, other=-float("inf"))
            excess = _odds(logits, best, rate) * share
            excess -= _odds(drafts, draft_best, rate) * draft_share
            # NaN is not less, and is left.
            is_draft = columns == drafted.to(tl.int32)
            is_none = (excess < _LEAST) | (is_draft & (excess == excess))
            excess = tl.where(is_none, 0.0, excess)
            has_left |= (inside & (excess != 0.0)).to(tl.int32)
        tl.store(left_ptr + row * width + columns, _log(excess, IS_CUDA), mask=inside)
    place = row * tl.num_programs(1) + program
    tl.store(has_left_ptr + place, tl.max(has_left, axis=0))


@triton.jit
def _total(
    best_at: tl.tensor,
    mass_at: tl.tensor,
    held: tl.tensor,
    rate: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The greatest logit of a row, and the sum of all exponentials beside it, fp64."""
    bests = tl.load(best_at, mask=held, other=-float("inf"))
    masses = tl.load(mass_at, mask=held, other=0.0)
    best = tl.max(bests, axis=0)
    return best, tl.sum(masses * _odds(bests, best, rate).to(tl.float64), axis=0)


@launchable
@triton.jit
def _settle_kernel(
    drafted_ptr: tl.tensor,
    has_left_ptr: tl.tensor,
    left_ptr: tl.tensor,
    width: tl.tensor,
    programs: tl.tensor,
    MANY: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The draft alone, where nothing is left."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    program = tl.arange(0, MANY)
    has_left = tl.load(has_left_ptr + row * programs + program, mask=program < programs, other=0)
    drafted = tl.load(drafted_ptr + row)
    tl.store(left_ptr + row * width + drafted, 0.0, mask=tl.max(has_left, axis=0) == 0)
