"""Log-probabilities on the GPU are the reference's on the same device, and a row's in any company.

In the interpreter exp and log are NumPy's, whose last bit may differ: at most the last bit of an
fp32 log-probability shows it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import logprobs
from unisono.ops.kernels.logprobs import token_logprobs
from unisono.ops.reference import logprobs as reference

pytestmark = [
    *kernel_rig.MARKS,
    pytest.mark.usefixtures("nan_filled_empty"),
    # NumPy says so where an infinity or a NaN is computed with.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered"),
]


@pytest.fixture(params=[None, 128], ids=["tiles", "small-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that serve, and small ones, of which even a short row has several."""
    if request.param is not None:
        monkeypatch.setattr(logprobs, "_PIECE", request.param)


def check(logits: Tensor, token_ids: Tensor, num_top: int) -> None:
    """On a copy between columns of NaN, which is what lies behind a padded vocabulary."""
    rows, width = logits.shape
    walled = kernel_rig.poisoned(rows, width + 5, dtype=torch.float32)[:, 2 : 2 + width]
    walled.copy_(logits)
    logprob, rank, top_ids, top = token_logprobs(walled, token_ids, num_top)
    want = reference.token_logprobs(logits, token_ids, num_top)
    assert torch.equal(rank, want[1])
    assert torch.equal(top_ids, want[2])
    for name, x, y in (("own", logprob, want[0]), ("likeliest", top, want[3])):
        assert x.dtype == torch.float32
        assert torch.equal(x.isnan(), y.isnan()), name
        x, y = x.nan_to_num(7.0, 8.0, 9.0), y.nan_to_num(7.0, 8.0, 9.0)
        if kernel_rig.IS_GPU:
            assert_same_bits(name, x, y)
        else:
            assert bool(((x - y).abs() <= y.abs() * 2.0**-23).all()), name


def ids_of(logits: Tensor) -> Tensor:
    """Of the vocabulary, and a few beyond."""
    rows, width = logits.shape
    return torch.randint(0, width + 2, (rows,)).to(logits.device)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("vocabulary", [1, 17, 500])
def test_the_reference_finds_the_same(vocabulary: int, num_top: int) -> None:
    logits = torch.randn(4, vocabulary) * 3
    logits[1::2] = logits[1::2].bfloat16().float()
    logits[3] = logits[3].round()
    moved = logits.to(kernel_rig.DEVICE)
    check(moved, ids_of(moved), num_top)


def test_more_likeliest_ids_than_pieces_and_less() -> None:
    logits = torch.randn(3, 3 * logprobs._PIECE - 5).to(kernel_rig.DEVICE)
    check(logits, ids_of(logits), 2)
    check(logits, ids_of(logits), 7)


@pytest.mark.usefixtures("tiles")
def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.randn(7, 300)
    logits[0] = -inf
    logits[1, :290] = -inf
    logits[2, [5, 100, 299]] = inf
    logits[3, 299] = nan
    logits[4], logits[4, ::2] = 0.0, -0.0
    logits[5], logits[5, 80] = -3.4e38, 3.4e38
    moved = logits.to(kernel_rig.DEVICE)
    for token in (5, 299, 300):
        check(moved, torch.full((7,), token, device=moved.device), 12)


def test_no_rows() -> None:
    logits = torch.randn(0, 40, device=kernel_rig.DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=kernel_rig.DEVICE)
    shapes = [tuple(part.shape) for part in token_logprobs(logits, none, 3)]
    assert shapes == [(0,), (0,), (0, 3), (0, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 128])
def test_real_vocabularies(rows: int) -> None:
    for vocabulary, num_top in [(151_669, 20), (151_936, 0), (262_208, 5)]:
        logits = torch.randn(rows, vocabulary, device="cuda") * 3
        check(logits, ids_of(logits), num_top)
        logits = logits.bfloat16().float()
        check(logits, ids_of(logits), num_top)


@pytest.mark.gpu
def test_a_row_has_its_bits_in_any_company() -> None:
    logits = torch.randn(160, 151_936, device="cuda") * 3
    ids = ids_of(logits)
    whole = token_logprobs(logits, ids, 20)
    order = torch.randperm(160).cuda()
    for got, want in zip(token_logprobs(logits[order], ids[order], 20), whole, strict=True):
        assert_same_bits("shuffled", got, want[order])
    for row in range(0, 160, 13):
        cut = slice(row, row + 1)
        for got, want in zip(token_logprobs(logits[cut], ids[cut], 20), whole, strict=True):
            assert_same_bits(f"row {row} alone", got, want[cut])


@pytest.mark.gpu
def test_more_logits_than_31_bits() -> None:
    rows, vocabulary = 15_000, 151_936
    logits = torch.randn(64, vocabulary, device="cuda").repeat(235, 1)[:rows]
    ids = ids_of(logits)
    tail = token_logprobs(logits[-64:], ids[-64:], 5)
    for got, want in zip(token_logprobs(logits, ids, 5), tail, strict=True):
        assert_same_bits("last rows", got[-64:], want)


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    logits = torch.randn(8, 151_936, device="cuda")
    ids = ids_of(logits)
    for place in range(4):
        got = graph_rig.replayed(lambda place=place: token_logprobs(logits, ids, 5)[place])
        assert_same_bits("graph", got, token_logprobs(logits, ids, 5)[place])
