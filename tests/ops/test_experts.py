"""Routing and experts: against transformers' own, and by their definitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.closeness import assert_close, assert_same_bits
from unisono.ops import dispatch
from unisono.ops.by_reference import with_references

OPS = dispatch.resolve(torch.device("cpu"), 64)
BOUND = 1e-5

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def block_of(family: str, renormalise: bool) -> Any:
    """A block of transformers' with random weights: 7 experts of 12 channels, 3 a token."""
    config: Any = SimpleNamespace(
        num_experts=7,
        num_experts_per_tok=3,
        hidden_size=20,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=9,
        norm_topk_prob=renormalise,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    if family == "qwen3_next":
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        block = qwen.Qwen3NextSparseMoeBlock(config)
    else:
        from transformers.models.qwen3_moe import modeling_qwen3_moe

        block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return block


@torch.no_grad()
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("names", [[], ["route_experts", "experts"]], ids=["ops", "references"])
def test_they_are_those_of_transformers(family: str, renormalise: bool, names: list[str]) -> None:
    ops, block, x = with_references(OPS, names), block_of(family, renormalise), torch.randn(33, 20)
    logits, their_weights, their_ids = block.gate(x)
    weights, ids = ops.route_experts(logits, 3, renormalise)
    order = their_ids.argsort(1)
    assert ids.tolist() == their_ids.gather(1, order).tolist()
    assert_close("weights", weights, their_weights.gather(1, order), 1e-6)
    extra = None
    if family == "qwen3_next":
        shared = block.shared_expert
        product = ops.pack_linear(torch.cat((shared.gate_proj.weight, shared.up_proj.weight)), None)
        said = ops.pack_linear(shared.down_proj.weight, None)(ops.silu_and_mul(product(x)))
        extra = ops.sigmoid_and_mul(said, ops.pack_linear(block.shared_expert_gate.weight, None)(x))
    experts = ops.pack_experts(block.experts.gate_up_proj, block.experts.down_proj)
    assert_close("block", experts(x, weights, ids, extra), block(x[None])[0], BOUND)


def test_ties_go_to_the_lower_id_and_columns_ascend() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0] * 5, [5.0, 4.0, 3.0, 2.0, 1.0]])
    weights, ids = OPS.route_experts(logits, 3, True)
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2], [0, 1, 2]]
    assert ids.dtype == torch.int64
    assert weights[1].tolist() == pytest.approx([1 / 3] * 3)
    assert float(weights.sum(1).max()) == pytest.approx(1)


def test_weights_are_rounded_to_the_dtype_of_the_logits() -> None:
    logits = torch.randn(40, 9).to(torch.bfloat16)
    weights, _ = OPS.route_experts(logits, 4, True)
    assert weights.dtype == torch.float32
    assert_same_bits("weights", weights, weights.to(torch.bfloat16).float())


def test_the_sum_is_in_fp32_and_rounded_once() -> None:
    """With experts that say 1, 2^-8 and 2^-8, bf16 sums of two would lose both small ones."""
    hidden, dtype = 16, torch.bfloat16
    gate_up = torch.zeros(3, 2 * hidden, hidden, dtype=dtype)
    down = torch.zeros(3, hidden, hidden, dtype=dtype)
    gate_up[:, 0, 0], gate_up[:, hidden, 1] = 30.0, 1 / 32  # silu(30) * 1 / 32
    down[:, 0, 0] = 32 / 30
    experts = OPS.pack_experts(gate_up, down)
    x = torch.zeros(1, hidden, dtype=dtype)
    x[0, 0], x[0, 1] = 1.0, 1.0
    alone = experts(x, torch.ones(1, 1), torch.tensor([[0]]), None)[0, 0].item()
    weights = torch.tensor([[1.0, 2.0**-8, 2.0**-8]])
    got = experts(x, weights, torch.tensor([[0, 1, 2]]), None)[0, 0].item()
    assert got == torch.tensor(alone * (1 + 2.0**-7)).to(dtype).item() > alone
    extra = torch.full_like(x, -alone)
    got = experts(x, weights, torch.tensor([[0, 1, 2]]), extra)[0, 0].item()
    assert got == torch.tensor(alone * 2.0**-7).to(dtype).item()


def test_no_tokens() -> None:
    experts = OPS.pack_experts(torch.randn(3, 8, 6), torch.randn(3, 6, 4))
    weights, ids = OPS.route_experts(torch.randn(0, 3), 2, True)
    assert experts(torch.randn(0, 6), weights, ids, None).shape == (0, 6)
