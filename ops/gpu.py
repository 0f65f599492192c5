"""The ops of a GPU: which kernel, or which reference that is exact on a GPU too, serves each."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from unisono.ops.kernels import (
    activation,
    attention,
    delta_plan,
    delta_rule,
    draft_plan,
    embedding,
    experts,
    filters,
    gates,
    gumbel,
    judge_drafts,
    linear,
    logprobs,
    norm,
    penalties,
    rope_kv,
    routing,
    sampling,
    short_conv,
)
from unisono.ops.linear import Linear
from unisono.ops.reference import reduce
from unisono.ops.reference.gumbel import chance
from unisono.ops.reference.sampling import unpack_keys
from unisono.ops.table import Ops


def gpu_ops(device: torch.device) -> Ops:
    """Return the kernels for `device`; every weight's product is proven when it is packed."""
    verdicts: linear.Verdicts = {}
    return Ops(
        pack_linear=partial(_pack_linear, verdicts=verdicts),
        pack_head=partial(linear.pack_head, verdicts=verdicts),
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        gated_rms_norm=gates.gated_rms_norm,
        silu_and_mul=activation.silu_and_mul,
        sigmoid_and_mul=gates.sigmoid_and_mul,
        rope_and_write_kv=rope_kv.rope_and_write_kv,
        embed_shard=embedding.embed_shard,
        reduce_rows=reduce.reduce_rows,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        plan_delta=partial(delta_plan.plan_delta, device=device),
        short_conv=short_conv.short_conv,
        delta_rule=delta_rule.delta_rule,
        route_experts=routing.route_experts,
        pack_experts=partial(experts.pack_experts, proofs={}),
        settle_drafts=draft_plan.settle_drafts,
        judge_drafts=judge_drafts.judge_drafts,
        chance=chance,
        argmax_keys=sampling.argmax_keys,
        unpack_keys=unpack_keys,
        add_noise=gumbel.add_noise,
        noisy_argmax_keys=gumbel.noisy_argmax_keys,
        filter_logits=filters.filter_logits,
        penalize=penalties.penalize,
        add_bias=penalties.add_bias,
        token_logprobs=logprobs.token_logprobs,
        fuses_sums=True,
    )


def _pack_linear(
    weight: Tensor, bias: Tensor | None = None, *, verdicts: linear.Verdicts
) -> Linear:
    product = linear.pack_linear(weight, verdicts)
    return product if bias is None else lambda x: product(x) + bias
