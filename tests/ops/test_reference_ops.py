"""The small ops against their formulas in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.closeness import assert_close, assert_same_bits
from unisono.ops.reference.activation import sigmoid_and_mul, silu_and_mul
from unisono.ops.reference.embedding import embed_shard
from unisono.ops.reference.norm import add_rms_norm, gated_rms_norm, rms_norm
from unisono.ops.reference.rotary import apply_rope
from unisono.ops.reference.sampling import argmax_keys, unpack_keys

FLOAT32 = 2e-7
BFLOAT16 = 4e-3


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
@pytest.mark.parametrize("shape", [(1, 72), (5, 3, 10), (2, 40000)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    want = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close("norm", rms_norm(x, weight, 1e-5), want, bound)


def test_a_norm_with_fp32_weights_rounds_once() -> None:
    """A zero-centred norm keeps 1 + w, whose bits bf16 has not."""
    x, weight = torch.randn(9, 72).to(torch.bfloat16), 1 + 1e-3 * torch.randn(72)
    wide = x.float()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert_same_bits("norm", rms_norm(x, weight, 1e-5), want.to(torch.bfloat16))
    assert_same_bits("sum", add_rms_norm(x, x, weight, 1e-5)[0], rms_norm(x + x, weight, 1e-5))


@pytest.mark.parametrize("width", [1, 12, 128, 40000])
def test_gated_rms_norm_is_that_of_transformers(width: int) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    theirs = Qwen3NextRMSNormGated(width, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    for rows in (1, 31):
        x, gate = torch.randn(rows, width), 3 * torch.randn(rows, width)
        want = theirs(x, gate)
        assert_close("norm", gated_rms_norm(x, gate, theirs.weight, 1e-5), want, 1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_sigmoid_and_mul(dtype: torch.dtype, bound: float) -> None:
    x, gate = torch.randn(31, 37).to(dtype), (6 * torch.randn(31, 75)).to(dtype)
    for part in (gate[:, :37], gate[:, 38:], gate[:, :1], gate[:, -1:]):
        got, want = sigmoid_and_mul(x, part), x.double() * part.double().sigmoid()
        assert_close("gate", got, want, bound)
    far = torch.tensor([[-200.0, -3e38, 200.0, 3e38]])
    assert sigmoid_and_mul(torch.ones(1, 4), far).tolist() == [[0.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_silu_and_mul(dtype: torch.dtype, bound: float) -> None:
    x = (6 * torch.randn(31, 2 * 37)).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    assert_close("silu", silu_and_mul(x), gate * gate.sigmoid() * up, bound)


def test_silu_of_extreme_values_is_finite_or_its_limit() -> None:
    gate = torch.tensor([-200.0, -88.0, 0.0, 88.0, 200.0])
    got = silu_and_mul(torch.stack((gate, torch.ones(5)), dim=1))
    assert got.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 88.0, 200.0], abs=1e-30)


@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_rope_is_a_rotation_of_pairs(rotary_dim: int) -> None:
    x, angle = torch.randn(7, 2, 16), torch.randn(7, 1, rotary_dim // 2)
    got = apply_rope(x, angle.cos(), angle.sin())
    half = rotary_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    turned = pairs * torch.exp(1j * angle.double())
    want = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), dim=-1)
    assert_close("rope", got, want, FLOAT32)


def test_embedding_shards_sum_to_the_whole() -> None:
    table = torch.randn(199, 8)
    ids = torch.tensor([0, 63, 64, 65, 198, 100])
    parts = [embed_shard(ids, table[a:b], a) for a, b in ((0, 64), (64, 70), (70, 199))]
    assert_same_bits("embedding", parts[0] + parts[1] + parts[2], table[ids])


def shards_of(logits: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The winning id of each row, with the vocabulary cut at `cuts`."""
    bounds = [0, *cuts, logits.shape[1]]
    keys = [
        argmax_keys(logits[:, a:b].contiguous(), a, logits.shape[1]) for a, b in pairwise(bounds)
    ]
    return unpack_keys(torch.stack(keys).amax(0))[0]


@pytest.mark.parametrize("cuts", [[], [500], [1, 2, 1002], [250, 501, 777]], ids=str)
def test_argmax_over_shards(cuts: list[int]) -> None:
    logits = torch.randn(50, 1003) * 1e4
    assert shards_of(logits, cuts).tolist() == logits.argmax(-1).tolist()


def test_argmax_of_bf16_ties_takes_the_lowest_id() -> None:
    """B22, with the three behind it: ties over shards, near 1e4, rows of -inf, ids past 2^24."""
    logits = torch.randn(200, 1003).mul(4).add(1e4).to(torch.bfloat16).float()
    want = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert len({int((row == row.max()).sum()) for row in logits}) > 1, "there must be ties"
    for cuts in ([], [500], [1, 2, 3], [250, 501, 777]):
        assert shards_of(logits, cuts).tolist() == want


def test_argmax_knows_signed_zeros_infinities_and_empty_rows() -> None:
    inf = float("inf")
    rows = torch.tensor(
        [
            [-0.0, 0.0, -1.0, -2.0],
            [0.0, -0.0, -1.0, -2.0],
            [-inf, -inf, -inf, -inf],
            [-3.0, -2.0, -2.0, -inf],
            [1.0, inf, inf, 2.0],
        ]
    )
    for cuts in ([], [1], [2], [1, 3]):
        assert shards_of(rows, cuts).tolist() == [0, 0, 0, 1, 1]


def test_argmax_keeps_ids_beyond_the_precision_of_floats() -> None:
    key = argmax_keys(torch.tensor([[1.0, 2.0]]), 2**24, 2**25)
    assert unpack_keys(key)[0].tolist() == [2**24 + 1]
    key = argmax_keys(torch.tensor([[1.0, 2.0]]), 2**31 - 3, 2**31)
    assert unpack_keys(key)[0].tolist() == [2**31 - 2]


def test_argmax_never_takes_ids_past_the_tokenizer() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    assert unpack_keys(argmax_keys(logits, 0, 3))[0].tolist() == [2]
    nothing = argmax_keys(logits, 8, 3)
    some = argmax_keys(torch.full((1, 2), -float("inf")), 0, 3)
    assert bool(some > nothing), "a shard with no eligible id loses to -inf"


def test_argmax_finds_nan_in_any_shard() -> None:
    logits = torch.randn(3, 64)
    logits[1, 40] = float("nan")
    keys = torch.maximum(argmax_keys(logits[:, :32], 0, 64), argmax_keys(logits[:, 32:], 32, 64))
    assert unpack_keys(keys)[1].tolist() == [False, True, False]
