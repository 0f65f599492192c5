"""The exact product against the formula, over odd shapes and row counts."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_close
from unisono.ops.linear import pack_linear
from unisono.ops.reference.linear import linear


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 50, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 64), (7, 5), (136, 72), (1003, 57)])
def test_against_the_formula(
    out_features: int, in_features: int, rows: int, dtype: torch.dtype, bound: float
) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    want = linear(x.double(), weight.double()) if dtype == torch.float32 else linear(x, weight)
    got = pack_linear(weight, proofs={})(x)
    assert got.dtype == dtype
    assert_close("linear", got, want, bound)


def test_no_rows_give_no_rows() -> None:
    assert pack_linear(torch.randn(7, 5), proofs={})(torch.empty(0, 5)).shape == (0, 7)
