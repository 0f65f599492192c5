"""The reference filters serve the GPU as they are: a row's bits there do not depend on company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.reference.filters import filter_logits

pytestmark = kernel_rig.MARKS


def settings(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """temperature, top_k, top_p, min_p of rows that mix all of them."""
    place = torch.arange(rows)
    temperature = 0.3 + torch.rand(rows, dtype=torch.float64)
    top_k = torch.where(place % 3 == 0, 0, torch.randint(1, 60, (rows,)))
    top_p = torch.where(place % 2 == 0, 1.0, torch.rand(rows, dtype=torch.float64))
    min_p = torch.where(place % 5 < 3, 0.0, torch.rand(rows, dtype=torch.float64) / 4)
    moved = [x.to(kernel_rig.DEVICE) for x in (temperature, top_k, top_p, min_p)]
    return moved[0], moved[1], moved[2], moved[3]


def some_logits(rows: int, vocabulary: int) -> Tensor:
    """Rows of ties (bf16 values), of infinities, of NaN, and plain ones."""
    logits = torch.randn(rows, vocabulary) * 3
    logits[1::4] = logits[1::4].bfloat16().float()
    logits[2::8, ::3] = -math.inf
    logits[3::8, vocabulary // 2] = math.nan
    logits[7::8, vocabulary // 3] = math.inf
    return logits.to(kernel_rig.DEVICE)


@pytest.mark.parametrize("vocabulary", [17, 1003, 4096])
def test_a_row_has_its_bits_in_any_company(vocabulary: int) -> None:
    check_company(24, vocabulary)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 160])
def test_a_row_has_its_bits_at_a_real_vocabulary(rows: int) -> None:
    """torch sorts few and many rows by different methods."""
    check_company(rows, 151_936)


def check_company(rows: int, vocabulary: int) -> None:
    logits, options = some_logits(rows, vocabulary), settings(rows)
    whole = filter_logits(logits, *options)
    order = torch.randperm(rows).to(logits.device)
    shuffled = filter_logits(logits[order], *(option[order] for option in options))
    assert_same_bits("shuffled", shuffled, whole[order])
    for row in range(min(rows, 16)):
        cut = slice(row, row + 1)
        alone = filter_logits(logits[cut], *(option[cut] for option in options))
        assert_same_bits(f"row {row} alone", alone, whole[cut])


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [17, 1003, 50_257])
def test_the_gpu_keeps_what_the_cpu_keeps_up_to_a_border(vocabulary: int) -> None:
    """An fp64 exp may differ in its last bit, which can move a border by a token at most."""
    rows = 64
    logits, options = some_logits(rows, vocabulary), settings(rows)
    got = filter_logits(logits, *options).cpu()
    want = filter_logits(logits.cpu(), *(option.cpu() for option in options))
    moved = ((got == -math.inf) != (want == -math.inf)).sum(1)
    assert int(moved.max()) <= 1, f"ids kept by one device only, by row: {moved.tolist()}"
    assert int((moved > 0).sum()) <= 1, f"rows with another border: {moved.tolist()}"
    both = (got != -math.inf) & (want != -math.inf)
    assert torch.equal(got[both].nan_to_num(7), want[both].nan_to_num(7))


@pytest.mark.gpu
def test_ties_on_the_gpu_keep_the_lowest_ids() -> None:
    for vocabulary in (500, 5000, 151_936):
        logits = torch.zeros(3, vocabulary, device="cuda")
        logits[1, ::2] = -0.0
        ones = torch.ones(3, dtype=torch.float64, device="cuda")
        top_k = torch.tensor([2, 3, 400], device="cuda")
        left = filter_logits(logits, ones, top_k, ones, ones * 0)
        kept = [row.isfinite().nonzero().flatten().tolist() for row in left]
        assert kept == [list(range(count)) for count in (2, 3, 400)], vocabulary


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    logits, options = some_logits(8, 151_936), settings(8)
    got = graph_rig.replayed(lambda: filter_logits(logits, *options))
    assert_same_bits("graph", got, filter_logits(logits, *options))
