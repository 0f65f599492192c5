"""RMS norm on the GPU: by the formula, and one row's bits whoever shares its program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import norm
from unisono.ops.reference import norm as reference

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
EPS = 1e-6
BOUND = {torch.float32: 3e-7, torch.float16: 7e-4, torch.bfloat16: 6e-3}
WIDTHS = [8, 64, 72, 128, 136, 256, 577, 1003]
REAL_WIDTHS = [1024, 2048, 2560, 4096, 5120, 8192, 16384, 16383, 1002]


def some(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).to(kernel_rig.DEVICE)


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_by_the_formula(width: int, dtype: torch.dtype) -> None:
    check_formula(width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("width", REAL_WIDTHS)
def test_norm_by_the_formula_at_real_widths(width: int) -> None:
    check_formula(width, torch.bfloat16)
    check_company(width, 300, torch.bfloat16)


def check_formula(width: int, dtype: torch.dtype) -> None:
    x, residual = some(7, 3, width, dtype=dtype), some(7, 3, width, dtype=dtype)
    fp32 = some(width, dtype=torch.float32) + 1
    for weight in (some(width, dtype=dtype), some(3, width, dtype=dtype), fp32):
        want = reference.rms_norm(x.cpu(), weight.cpu(), EPS)
        assert_close(f"norm {width}", norm.rms_norm(x, weight, EPS), want, BOUND[dtype])
        normed, total = norm.add_rms_norm(x, residual, weight, EPS)
        assert_same_bits("total", total, x + residual)
        assert_same_bits("fused norm", normed, norm.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 136, 577])
def test_a_row_has_its_bits_in_any_company(width: int, dtype: torch.dtype) -> None:
    check_company(width, 35, dtype)


def check_company(width: int, rows: int, dtype: torch.dtype) -> None:
    x, residual = some(rows, width, dtype=dtype), some(rows, width, dtype=dtype)
    weight = some(width, dtype=dtype)
    whole, total = norm.add_rms_norm(x, residual, weight, EPS)
    order = torch.randperm(rows).to(x.device)
    shuffled = norm.add_rms_norm(x[order], residual[order], weight, EPS)[0]
    assert_same_bits(f"shuffled {width}", shuffled, whole[order])
    for first, stop in [(0, 1), (rows - 1, rows), (1, 4), (3, rows - 5)]:
        cut = slice(first, stop)
        normed, _ = norm.add_rms_norm(x[cut], residual[cut], weight, EPS)
        assert_same_bits(f"rows {first}:{stop} of width {width}", normed, whole[cut])
        normed = norm.rms_norm(total[cut].clone(), weight, EPS)
        assert_same_bits(f"unfused rows {first}:{stop} of width {width}", normed, whole[cut])


@pytest.mark.parametrize("width", [64, 577])
def test_a_nan_stays_in_its_row(width: int) -> None:
    x, weight = some(9, width, dtype=torch.float32), some(width, dtype=torch.float32)
    clean = norm.rms_norm(x, weight, EPS)
    x[4, width // 2] = float("nan")
    spoiled = norm.rms_norm(x, weight, EPS)
    assert bool(spoiled[4].isnan().all())
    others = [row for row in range(9) if row != 4]
    assert_same_bits("other rows", spoiled[others], clean[others])


def test_no_rows_and_rows_of_zeros() -> None:
    weight = some(64, dtype=torch.float32)
    assert norm.rms_norm(weight.new_zeros(0, 64), weight, EPS).shape == (0, 64)
    assert norm.rms_norm(weight.new_zeros(3, 64), weight, EPS).tolist() == [[0.0] * 64] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 4096])
def test_more_rows_than_a_grid_axis_and_elements_than_31_bits(width: int) -> None:
    rows = 2**31 // width + 70_001
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    tail, weight = some(9, width, dtype=torch.bfloat16), some(width, dtype=torch.bfloat16)
    x[-9:] = tail
    normed, total = norm.add_rms_norm(x, x, weight, EPS)
    want = norm.add_rms_norm(tail, tail, weight, EPS)
    assert_same_bits("last rows", normed[-9:], want[0])
    assert_same_bits("their total", total[-9:], want[1])
    assert not bool(normed[:-9].any()), "rows of zeros must give zeros"


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    x, weight = some(5, 4096, dtype=torch.bfloat16), some(4096, dtype=torch.bfloat16)
    got = graph_rig.replayed(lambda: norm.add_rms_norm(x, x, weight, EPS)[0])
    assert_same_bits("graph", got, norm.add_rms_norm(x, x, weight, EPS)[0])
