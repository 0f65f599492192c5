"""Gates on the GPU: by the formulas, and one row's bits whoever shares its program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import gates
from unisono.ops.reference import activation, norm

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
EPS = 1e-6
BOUND = {torch.float32: 4e-7, torch.float16: 7e-4, torch.bfloat16: 6e-3}


def some(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).to(kernel_rig.DEVICE)


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 12, 136, 1030])
def test_sigmoid_by_the_formula(width: int, dtype: torch.dtype) -> None:
    x, wide = some(7, width, dtype=dtype), 4 * some(7, 2 * width + 3, dtype=dtype)
    for gate in (wide[:, :width], wide[:, -width:], wide[:, 1:2], wide[:, :1].contiguous()):
        want = activation.sigmoid_and_mul(x.cpu(), gate.cpu())
        assert_close(f"gate of {width}", gates.sigmoid_and_mul(x, gate), want, BOUND[dtype])
        part = gates.sigmoid_and_mul(wide[:, 1 : width + 1], gate)
        want = gates.sigmoid_and_mul(wide[:, 1 : width + 1].contiguous(), gate.contiguous())
        assert_same_bits("rows that lie apart", part, want)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_extreme_gates_are_their_limits() -> None:
    gate = torch.tensor([[-3e38, -200.0, 0.0, 200.0, 3e38]], device=kernel_rig.DEVICE)
    got = gates.sigmoid_and_mul(torch.ones_like(gate), gate)
    assert got.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]]
    x, ones = torch.ones(5, 1, device=kernel_rig.DEVICE), torch.ones(1, device=kernel_rig.DEVICE)
    got = gates.gated_rms_norm(x, gate.T.clamp(-1e4, 1e4), ones, 1e-30)
    assert got.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 200.0, 1e4], abs=1e-30)


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 12, 64, 128, 577])
def test_gated_norm_by_the_formula(width: int, dtype: torch.dtype) -> None:
    check_norm(width, 7, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_gated_norm_at_real_widths(width: int) -> None:
    check_norm(width, 4 * 8192 + 3, torch.bfloat16)


def check_norm(width: int, rows: int, dtype: torch.dtype) -> None:
    x, wide = some(rows, width, dtype=dtype), 3 * some(rows, 2 * width + 8, dtype=dtype)
    for weight in (some(width, dtype=dtype), some(width, dtype=torch.float32)):
        for gate in (wide[:, :width], wide[:, -width:], wide[:, 3 : width + 3]):
            got = gates.gated_rms_norm(x, gate, weight, EPS)
            want = norm.gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), EPS)
            assert_close(f"gated norm of {width}", got, want, BOUND[dtype])
            for cut in (slice(0, 1), slice(rows - 1, rows), slice(1, 4), slice(2, rows)):
                part = gates.gated_rms_norm(x[cut], gate[cut].clone(), weight, EPS)
                assert_same_bits(f"rows {cut} of width {width}", part, got[cut])


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
def test_heads_of_a_token_are_rows(dtype: torch.dtype) -> None:
    wide, weight = some(5, 3 * 64 + 16, dtype=dtype), some(64, dtype=torch.float32)
    x, gate = some(5, 3, 64, dtype=dtype), wide[:, 8 : 8 + 3 * 64].unflatten(1, (3, 64))
    got = gates.gated_rms_norm(x, gate, weight, EPS)
    want = gates.gated_rms_norm(x.view(15, 64), gate.reshape(15, 64), weight, EPS)
    assert_same_bits("heads", got, want.view(5, 3, 64))
    by_formula = norm.gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), EPS)
    assert_close("formula", got, by_formula, BOUND[dtype])


def test_no_rows() -> None:
    x = torch.empty(0, 64, device=kernel_rig.DEVICE)
    assert gates.sigmoid_and_mul(x, x).shape == (0, 64)
    assert gates.gated_rms_norm(x, x, torch.ones_like(x[:0].sum(0)), EPS).shape == (0, 64)


@pytest.mark.gpu
def test_more_rows_than_a_grid_axis_and_elements_than_31_bits() -> None:
    rows, width = 2**31 // 4096 + 70_001, 4096
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    tail, weight = some(5, width, dtype=torch.bfloat16), some(width, dtype=torch.bfloat16)
    x[-5:] = tail
    for name, op in (
        ("norm", lambda x: gates.gated_rms_norm(x, x, weight, EPS)),
        ("sigmoid", lambda x: gates.sigmoid_and_mul(x, x)),
    ):
        got = op(x)
        assert_same_bits(name, got[-5:], op(tail))
        assert not bool(got[:-5].any()), f"{name}: rows of zeros must give zeros"


@pytest.mark.gpu
def test_a_graph_replays_them() -> None:
    x, weight = some(5, 4096, dtype=torch.bfloat16), some(4096, dtype=torch.bfloat16)
    got = graph_rig.replayed(lambda: gates.gated_rms_norm(x, x, weight, EPS))
    assert_same_bits("norm", got, gates.gated_rms_norm(x, x, weight, EPS))
    got = graph_rig.replayed(lambda: gates.sigmoid_and_mul(x, x[:, :1]))
    assert_same_bits("sigmoid", got, gates.sigmoid_and_mul(x, x[:, :1]))
