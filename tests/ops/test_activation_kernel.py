"""The gated activation on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels.activation import silu_and_mul
from unisono.ops.reference import activation as reference

pytestmark = [
    *kernel_rig.MARKS,
    pytest.mark.usefixtures("nan_filled_empty"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
BOUND = {torch.float32: 3e-7, torch.float16: 7e-4, torch.bfloat16: 6e-3}


def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (6 * torch.randn(shape)).to(dtype).to(kernel_rig.DEVICE)


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 37, 136, 1024, 1025])
def test_by_the_formula_and_alone_as_in_company(width: int, dtype: torch.dtype) -> None:
    check(9, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [3072, 1536, 12288, 6144])
def test_real_widths(width: int, dtype: torch.dtype) -> None:
    check(130, width, dtype)


def check(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = some(tokens, 2 * width, dtype=dtype)
    whole = silu_and_mul(x)
    assert_close(f"silu {width}", whole, reference.silu_and_mul(x.cpu()), BOUND[dtype])
    order = torch.randperm(tokens).to(x.device)
    assert_same_bits(f"shuffled {width}", silu_and_mul(x[order]), whole[order])
    for cut in (slice(0, 1), slice(tokens - 1, tokens), slice(1, 5)):
        assert_same_bits(f"{cut} of {width}", silu_and_mul(x[cut]), whole[cut])


def test_extreme_values_are_finite_or_their_limit() -> None:
    gate = torch.tensor([-3e38, -200.0, -88.0, 0.0, 88.0, 200.0], device=kernel_rig.DEVICE)
    got = silu_and_mul(torch.stack((gate, torch.ones_like(gate)), dim=1))
    assert got.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 88.0, 200.0], abs=1e-30)


@pytest.mark.gpu
def test_more_tokens_than_a_grid_axis_and_elements_than_31_bits() -> None:
    x = torch.zeros(70_001, 2 * 17408, dtype=torch.bfloat16, device="cuda")
    x[-3:] = some(3, 2 * 17408, dtype=torch.bfloat16)
    got = silu_and_mul(x)
    assert_same_bits("last tokens", got[-3:], silu_and_mul(x[-3:]))
    assert not bool(got[:-3].any()), "silu(0) * 0 must be 0"


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    x = some(5, 6144, dtype=torch.bfloat16)
    assert_same_bits("graph", graph_rig.replayed(lambda: silu_and_mul(x)), silu_and_mul(x))
