"""Drafts are judged on the GPU as the reference does it, but for what fp32 rounds of the odds.

In the interpreter exponentials and logarithms are NumPy's and more exact than a GPU's: the bounds
are of a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import judge_drafts as kernels
from unisono.ops.kernels.judge_drafts import judge_drafts
from unisono.ops.reference import speculation as reference

pytestmark = [
    *kernel_rig.MARKS,
    pytest.mark.usefixtures("nan_filled_empty"),
    # NumPy says so where an infinity or a NaN is computed with.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN slice) enc"),
]

TIE = 1e-5
"""Of p / q: nearer to it a chance may fall to either side."""
ALMOST_ONE = 1 - 2.0**-53
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What `judge_drafts` takes."""


@pytest.fixture(params=[None, 128], ids=["tiles", "small-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that serve, and small ones, of which even a short row has several."""
    if request.param is not None:
        monkeypatch.setattr(kernels, "_PIECE", request.param)
        monkeypatch.setattr(kernels, "_MANY_ROWS", 4)


def given(logits: Tensor, drafts: Tensor, temperature: float = 1.0) -> Given:
    """Drafts that the drafter draws, and chances."""
    odds = (drafts.double() / temperature).softmax(1)
    drafted = odds.multinomial(1)[:, 0]
    heat = torch.full((len(logits),), temperature, dtype=torch.float64, device=logits.device)
    return logits, drafts, drafted, heat, torch.rand_like(heat)


def some(rows: int, vocabulary: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits of a model and of a drafter that is not far from it."""
    logits = torch.randn(rows, vocabulary, device=kernel_rig.DEVICE) * scale
    return logits, logits + torch.randn_like(logits)


def walled(logits: Tensor, margin: int) -> Tensor:
    """A copy between columns of NaN."""
    rows, width = logits.shape
    copy = kernel_rig.poisoned(rows, width + 2 * margin, dtype=torch.float32)
    return copy[:, margin : margin + width].copy_(logits)


def odds_of(logits: Tensor, drafts: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    p, q = (reference._odds(each, temperature) for each in (logits, drafts))
    return p, q


def check(logits: Tensor, drafts: Tensor, *rest: Tensor) -> Tensor:
    """Compare with the reference; return which rows kept their draft."""
    left = judge_drafts(walled(logits, 3), walled(drafts, 8), *rest)
    want = reference.judge_drafts(logits, drafts, *rest)
    assert left.dtype == torch.float32
    assert left.is_contiguous()
    drafted, temperature, chance = rest
    (p, q), at = odds_of(logits, drafts, temperature), drafted[:, None]
    kept, want_kept = (each.gather(1, at)[:, 0] == 0.0 for each in (left, want))
    own_p, own_q = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    is_tie = (chance * own_q - own_p).abs() <= TIE * own_p
    is_tie &= want_kept | (own_p != own_q)
    assert torch.equal(kept | is_tie, want_kept | is_tie)
    assert_same_bits("kept", left[kept & want_kept], want[kept & want_kept])
    assert torch.equal(left.isnan(), want.isnan())
    rest_of_them = ~kept & ~want_kept & ~want.isnan().any(1)
    assert bool((left[rest_of_them].amax(1) > -math.inf).all()), "something is left"
    assert bool((left.gather(1, at)[rest_of_them] == -math.inf).all()), "not the draft"
    p, q, got = p[rest_of_them], q[rest_of_them], left[rest_of_them].double().exp()
    both = (p + q).clamp(min=1e-300)
    allowed = both * (2.0**-20 + 2.0**-21 * both.log().abs()) + 2.0**-124
    off = (got - (p - q).clamp(min=0.0)).abs()
    assert bool((off <= allowed).all()), float((off / allowed).max())
    return kept


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [0.2, 1.0, 7.0])
@pytest.mark.parametrize("vocabulary", [1, 17, 500])
def test_the_reference_judges_the_same(vocabulary: int, temperature: float) -> None:
    logits, drafts = some(30, vocabulary)
    logits[1::2], drafts[1::2] = (each[1::2].bfloat16().float() for each in (logits, drafts))
    # What filters bar, in one and in both.
    logits[:, ::3] = -math.inf
    drafts[:, ::6] = -math.inf
    logits[:, -1], drafts[:, -1] = 0.0, 0.5
    kept = check(*given(logits, drafts, temperature))
    assert kept.any()
    assert vocabulary == 1 or not kept.all()


def test_several_pieces_with_a_short_end() -> None:
    for rows, width in [(2, 3 * kernels._PIECE - 5), (17, 5 * kernels._PIECE + 1)]:
        check(*given(*some(rows, width)))


@pytest.mark.usefixtures("tiles")
def test_a_chance_on_either_side_of_the_share() -> None:
    logits, drafts = some(12, 300)
    _, _, _, heat, _ = given(logits, drafts, 0.8)
    p, q = odds_of(logits, drafts, heat)
    drafted = torch.where(q > p, q, 0.0).argmax(1)
    share = (p / q).gather(1, drafted[:, None])[:, 0]
    assert check(logits, drafts, drafted, heat, share * (1 - 2 * TIE)).all()
    assert not check(logits, drafts, drafted, heat, share * (1 + 2 * TIE)).any()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("apart", [3.0, 1e-2, 1e-4, 1e-6])
def test_what_comes_out_has_the_odds_of_the_model(apart: float) -> None:
    """However much of them cancels: together they are off by far less than an answer could show."""
    width = 400 if not kernel_rig.IS_GPU else 151_936
    logits = torch.randn(5, width, device=kernel_rig.DEVICE) * 5
    drafts = logits + torch.randn_like(logits) * apart
    heat = torch.full((5,), 1.3, dtype=torch.float64, device=logits.device)
    p, q = odds_of(logits, drafts, heat)
    drafted = (p / q).argmin(1)
    left = judge_drafts(logits, drafts, drafted, heat, torch.full_like(heat, ALMOST_ONE))
    kept = torch.minimum(p, q)
    # No other draft changes what is left, but for its own place, where nothing is.
    out = kept + (1 - kept.sum(1, keepdim=True)) * left.double().softmax(1)
    assert float((out - p).abs().sum(1).max()) < 6e-6


@pytest.mark.usefixtures("tiles")
def test_nothing_in_excess_keeps_the_draft() -> None:
    logits = torch.randn(3, 300, device=kernel_rig.DEVICE) * 3
    logits[:, 5] = -math.inf
    _, _, drafted, heat, _ = given(logits, logits)
    drafted[:2] = 5  # which has no share to be kept by
    left = judge_drafts(logits, logits, drafted, heat, ALMOST_ONE * heat)
    alone = torch.full_like(logits, -math.inf).scatter_(1, drafted[:, None], 0.0)
    assert_same_bits("the same", left, alone)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("apart", [0.0, 1e-6])
def test_where_only_rounding_tells_the_two_apart(apart: float) -> None:
    """One logit's last bit, or a few bits of each: a draft that is rejected is not left, however
    p and q are rounded, and something else is."""
    logits = torch.randn(40, 300, device=kernel_rig.DEVICE) * 3
    drafts = logits + torch.randn_like(logits) * apart
    drafts[:, 70] = drafts[:, 70].nextafter(torch.full_like(drafts[:, 70], math.inf))
    _, _, _, heat, _ = given(logits, drafts)
    p, q = odds_of(logits, drafts, heat)
    drafted = torch.where(q > p, q / p, math.inf).argmin(1)
    left = judge_drafts(logits, drafts, drafted, heat, ALMOST_ONE * heat)
    own = left.gather(1, drafted[:, None])[:, 0]
    is_only = (left > -math.inf).sum(1) == 1
    assert torch.equal(own == 0.0, is_only & (left.argmax(1) == drafted))
    assert (own[own != 0.0] == -math.inf).all()
    assert (left.amax(1) > -math.inf).all()


@pytest.mark.usefixtures("tiles")
def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    logits, drafts = some(10, 300)
    logits[0, 299], drafts[1, 5], logits[2], drafts[2, 0] = nan, nan, nan, nan
    logits[3, [5, 100, 299]] = inf
    drafts[4, [5, 100, 299]] = inf
    logits[5], drafts[6] = -inf, -inf
    logits[7, :290], drafts[7, 10:] = -inf, -inf
    logits[8], logits[8, ::2] = 0.0, -0.0
    logits[9], logits[9, 80] = -3.4e38, 3.4e38
    heat = torch.ones(10, dtype=torch.float64, device=logits.device)
    for token in (0, 5, 100, 299):
        drafted = torch.full((10,), token, device=logits.device)
        for chance in (2.0**-53, 0.3, ALMOST_ONE):
            check(logits, drafts, drafted, heat, chance * heat)
    left = judge_drafts(logits, drafts, drafted, heat, heat / 2)
    assert left[:3].isnan().all()
    assert not left[3:].isnan().any()


@pytest.mark.usefixtures("tiles")
def test_temperatures_that_leave_one_id_and_all() -> None:
    logits, drafts = some(4, 200)
    logits[:, 7] = -math.inf
    _, _, drafted, heat, chance = given(logits, drafts)
    heat[0], heat[1], heat[2] = 1e-300, 1e-6, 1e30
    check(logits, drafts, drafted, heat, chance)


@pytest.mark.usefixtures("tiles")
def test_a_row_has_its_bits_in_any_company() -> None:
    rows, width = (33, 700) if not kernel_rig.IS_GPU else (160, 151_936)
    told = given(*some(rows, width), 0.9)
    whole = judge_drafts(*told)
    apart = (torch.stack((each, each), dim=1)[:, 0] for each in told[2:])
    assert_same_bits("columns", judge_drafts(*told[:2], *apart), whole)
    order = torch.randperm(rows).to(whole.device)
    shuffled = judge_drafts(*(each[order] for each in told))
    assert_same_bits("shuffled", shuffled, whole[order])
    for row in range(0, rows, 8):
        for stop in (row + 1, row + 3):
            cut = judge_drafts(*(each[row:stop] for each in told))
            assert_same_bits(f"rows {row}:{stop}", cut, whole[row:stop])


def test_no_rows() -> None:
    assert judge_drafts(*(each[:0] for each in given(*some(1, 40)))).shape == (0, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 15, 16, 64])
def test_real_vocabularies(rows: int) -> None:
    for vocabulary in (151_669, 151_936, 262_208):
        logits, drafts = some(rows, vocabulary)
        check(*given(logits, drafts, 0.7))
        check(*given(logits.bfloat16().float(), drafts.bfloat16().float()))


@pytest.mark.gpu
def test_more_logits_than_31_bits() -> None:
    rows, vocabulary = 15_000, 151_936
    told = [
        each.repeat(235, *[1] * (each.dim() - 1))[:rows] for each in given(*some(64, vocabulary))
    ]
    tail = judge_drafts(*(each[-64:] for each in told))
    assert_same_bits("last rows", judge_drafts(*told)[-64:], tail)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_a_graph_replays_it(rows: int) -> None:
    told = given(*some(rows, 151_936))
    got = graph_rig.replayed(lambda: judge_drafts(*told))
    assert_same_bits("graph", got, judge_drafts(*told))
