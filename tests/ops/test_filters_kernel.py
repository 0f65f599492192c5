"""Filters on the GPU keep what the reference keeps on the same device, in any company.

An fp64 exp of the CPU may have another last bit than that of NumPy, which the interpreter has, or
of a GPU. Masses are rounded to 2^-40, so that it shows only where a border falls into that bit.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import filters
from unisono.ops.kernels.filters import filter_logits
from unisono.ops.reference import filters as reference

pytestmark = [
    *kernel_rig.MARKS,
    pytest.mark.usefixtures("nan_filled_empty"),
    # NumPy says so where an infinity or a NaN is computed with.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered"),
]

Options = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=[None, (128, 32)], ids=["tiles", "small-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that serve, and small ones, of which even a short row has several."""
    if request.param is not None:
        monkeypatch.setattr(filters, "_PIECE", request.param[0])
        monkeypatch.setattr(filters, "_BLOCK", request.param[1])


def options_of(*rows: tuple[float, int, float, float]) -> Options:
    """temperature, top_k, top_p, min_p of each row."""
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, dtype=dtype, device=kernel_rig.DEVICE)
        for column, dtype in zip(
            zip(*rows, strict=True),
            (torch.float64, torch.int64, torch.float64, torch.float64),
            strict=True,
        )
    )
    return temperature, top_k, top_p, min_p


def settings(rows: int, most: int = 60) -> Options:
    """Rows that mix all of them, some of none."""
    place = torch.arange(rows)
    temperature = 0.3 + torch.rand(rows, dtype=torch.float64)
    top_k = torch.where(place % 3 == 0, 0, torch.randint(1, most, (rows,)))
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


def check(logits: Tensor, options: Options) -> Tensor:
    """On a copy between columns of NaN, which is what lies behind a padded vocabulary."""
    rows, width = logits.shape
    walled = kernel_rig.poisoned(rows, width + 5, dtype=torch.float32)[:, 2 : 2 + width]
    walled.copy_(logits)
    got = filter_logits(walled, *options)
    kernel_rig.assert_same_rows("filtered", got, reference.filter_logits(logits, *options))
    return got


def kept(left: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in left]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("vocabulary", [1, 2, 17, 200, 777])
def test_the_reference_keeps_the_same(vocabulary: int) -> None:
    check(some_logits(9, vocabulary), settings(9))


def test_rows_of_several_pieces() -> None:
    vocabulary = 4 * filters._PIECE - 3
    check(some_logits(9, vocabulary), settings(9, most=vocabulary + 5))


@pytest.mark.usefixtures("tiles")
def test_ties_keep_the_lowest_ids() -> None:
    logits = torch.zeros(5, 300, device=kernel_rig.DEVICE)
    logits[1, ::2] = -0.0
    logits[3:] = -7.5
    logits[4, 100::3] = 2.0
    left = check(
        logits,
        options_of(
            (1, 2, 1, 0), (1, 70, 1, 0), (1, 299, 1, 0), (0.5, 0, 0.5, 0), (0.1, 20, 0.26, 0.5)
        ),
    )
    counts = (2, 70, 299, 150)
    assert kept(left) == [*(list(range(n)) for n in counts), [100, 103, 106, 109, 112, 115]]


@pytest.mark.usefixtures("tiles")
def test_borders() -> None:
    """All of a mass, none, a share that ends between two tokens, and what is rounded to nothing."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=torch.float64).log().float()
    wide = torch.full((210,), -200.0)
    wide[torch.arange(5) * 40] = logits
    cases = [
        *((1.0, k, p, 0.0) for k in (0, 4, 209, 1000) for p in (1.0, 0.75, 0.750001)),
        (1.0, 0, 1e-300, 0.0),
        (1.0, 0, 1.0 - 2**-53, 0.0),
        (1.0, 3, 1.0 - 2**-53, 0.0),
        (1e-300, 0, 0.9, 0.0),
        (1e-300, 7, 0.9, 0.0),
        (1e300, 0, 0.5, 0.0),
        (1.0, 0, 1.0, 0.25),
        (1.0, 0, 1.0, 1.0),
        (0.5, 0, 0.99, 0.01),
    ]
    left = check(wide.repeat(len(cases), 1).to(kernel_rig.DEVICE), options_of(*cases))
    assert kept(left)[-2] == [0]


@pytest.mark.usefixtures("tiles")
def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.randn(9, 150)
    logits[0] = -inf
    logits[1, :140] = -inf
    logits[2] = inf
    logits[3, [5, 100]] = inf
    logits[4, 149] = nan
    logits[5], logits[5, 80] = -inf, 3.4e38
    logits[6], logits[6, 3] = -3.4e38, 3.4e38
    logits[7] = torch.linspace(-1e-40, 1e-40, 150)
    logits[8, ::2] = -1e-45
    moved = logits.to(kernel_rig.DEVICE)
    for case in [(1.0, 12, 0.9, 0.1), (0.7, 0, 0.8, 0.0), (1.3, 140, 1.0, 0.0), (2.0, 0, 1.0, 0.3)]:
        check(moved, options_of(*[case] * 9))


def test_no_rows() -> None:
    logits, options = some_logits(3, 50), settings(3)
    left = filter_logits(logits[:0], *(option[:0] for option in options))
    assert left.shape == (0, 50)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_real_vocabularies(rows: int) -> None:
    check(some_logits(rows, 151_936), settings(rows))
    check(some_logits(rows, 262_208).bfloat16().float(), settings(rows, most=1000))


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 12.0])
def test_flat_and_peaked_rows_of_a_real_vocabulary(spread: float) -> None:
    logits = torch.randn(16, 151_936, device="cuda") * spread
    for case in [(1.0, 0, 0.9, 0.0), (1.0, 50_000, 0.5, 0.0), (0.6, 20, 0.95, 0.0)]:
        check(logits, options_of(*[case] * 16))
        check(logits.bfloat16().float(), options_of(*[case] * 16))


@pytest.mark.parametrize("vocabulary", [17, pytest.param(4096, marks=pytest.mark.gpu)])
def test_a_row_has_its_bits_in_any_company(vocabulary: int) -> None:
    check_company(24 if kernel_rig.IS_GPU else 8, vocabulary)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 160])
def test_a_row_has_its_bits_at_a_real_vocabulary(rows: int) -> None:
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
    want = reference.filter_logits(logits.cpu(), *(option.cpu() for option in options))
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
        left = check(logits, options_of((1, 2, 1, 0), (1, 3, 1, 0), (1, 400, 1, 0)))
        assert kept(left) == [list(range(count)) for count in (2, 3, 400)], vocabulary


@pytest.mark.gpu
def test_more_logits_than_31_bits() -> None:
    rows, vocabulary = 15_000, 151_936
    logits = torch.randn(64, vocabulary, device="cuda").repeat(235, 1)[:rows]
    options = options_of(*[(0.8, 50, 0.9, 0.01), (0.8, 0, 0.9, 0.0)] * (rows // 2))
    left = filter_logits(logits, *options)
    tail = filter_logits(logits[-64:], *(option[-64:] for option in options))
    assert_same_bits("last rows", left[-64:], tail)


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    """Also where other options and logits lie in its inputs than when it was captured."""
    logits, options = some_logits(8, 151_936), settings(8)

    def call() -> Tensor:
        return filter_logits(logits, *options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        kernel_rig.assert_same_rows("graph", got, reference.filter_logits(logits, *options))
        logits.copy_(logits.roll(1, 0) * 0.7)
        for option in options:
            option.copy_(option.roll(3))
    assert_same_bits("a new graph", graph_rig.replayed(call), call())
