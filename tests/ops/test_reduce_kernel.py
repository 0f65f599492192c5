"""The ordered sum over ranks: the bits of its definition, alone and fused with what follows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels.norm import add_rms_norm, ordered_sum_add_rms_norm
from unisono.ops.kernels.reduce import ordered_sum

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
EPS = 1e-6


def parts_of(ranks: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Parts of very different size, so that another order of the sum shows."""
    scale = 10.0 ** torch.randint(-2, 3, (ranks, *shape))
    return (torch.randn(ranks, *shape) * scale).to(dtype).to(kernel_rig.DEVICE)


def by_definition(parts: Tensor) -> Tensor:
    """As `Group.all_reduce` sums."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_sum_is_the_definition_bit_by_bit(ranks: int, dtype: torch.dtype) -> None:
    parts = parts_of(ranks, 11, 137, dtype=dtype)
    assert_same_bits(f"{ranks} ranks", ordered_sum(parts).cpu(), by_definition(parts.cpu()))


def test_the_order_of_the_ranks_is_seen() -> None:
    parts = parts_of(8, 11, 137, dtype=torch.float32)
    assert not torch.equal(ordered_sum(parts), ordered_sum(parts.flip(0)))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_specials_and_signed_zeros() -> None:
    inf, nan = float("inf"), float("nan")
    parts = torch.tensor([[-0.0, inf, inf, nan, 1.0], [-0.0, -inf, 1.0, 1.0, 2.0]])
    got = ordered_sum(parts.to(kernel_rig.DEVICE)).cpu()
    assert_same_bits("first", got[:1], torch.tensor([-0.0]))
    assert got[1:].isnan().tolist() == [True, False, True, False]
    assert got[[2, 4]].tolist() == [inf, 3.0]


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 136, 577])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_fused_has_the_bits_of_the_separate_ops(ranks: int, width: int, dtype: torch.dtype) -> None:
    check_fused(ranks, width, 5, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("width", [1024, 4096, 16384])
def test_fused_has_the_bits_of_the_separate_ops_at_real_widths(width: int, ranks: int) -> None:
    check_fused(ranks, width, 33, torch.bfloat16)


def check_fused(ranks: int, width: int, tokens: int, dtype: torch.dtype) -> None:
    parts = parts_of(ranks, tokens, width, dtype=dtype)
    residual, rest = parts_of(1, tokens, width, dtype=dtype)[0], parts_of(2, width, dtype=dtype)
    weight, some_bias = rest[0].clone(), rest[1].clone()
    for bias in (None, some_bias):
        x = ordered_sum(parts) if bias is None else ordered_sum(parts) + bias
        want = add_rms_norm(x, residual, weight, EPS)
        got = ordered_sum_add_rms_norm(parts, bias, residual, weight, EPS)
        name = f"{ranks} ranks, width {width}, bias {bias is not None}"
        assert_same_bits(f"total of {name}", got[1], want[1])
        assert_same_bits(f"norm of {name}", got[0], want[0])
    alone = ordered_sum_add_rms_norm(
        parts[:, 2:3].contiguous(), some_bias, residual[2:3], weight, EPS
    )
    assert_same_bits(f"lone token of {name}", alone[0], got[0][2:3])


@pytest.mark.gpu
def test_more_elements_than_31_bits() -> None:
    tokens, width = 140_000, 4096
    parts = torch.zeros(4, tokens, width, dtype=torch.bfloat16, device="cuda")
    parts[:, -3:] = parts_of(4, 3, width, dtype=torch.bfloat16)
    got = ordered_sum(parts)
    assert_same_bits("last tokens", got[-3:], ordered_sum(parts[:, -3:].contiguous()))
    assert not bool(got[:-3].any()), "sums of zeros must be zeros"
    weight, residual = parts_of(1, width, dtype=torch.bfloat16)[0], torch.zeros_like(parts[0])
    fused = ordered_sum_add_rms_norm(parts, None, residual, weight, EPS)
    assert_same_bits("fused total", fused[1], got)


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    parts = parts_of(8, 5, 4096, dtype=torch.bfloat16)
    weight = parts[0, 0].clone()

    def call() -> Tensor:
        return ordered_sum_add_rms_norm(parts, None, ordered_sum(parts), weight, EPS)[0]

    assert_same_bits("graph", graph_rig.replayed(call), call())
