"""Ops replaced by their readable references: is a kernel at fault, or what it is given?

Row by row, so that no row can depend on its company. Slow; for diagnosis only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.ops.attention import AttentionShape
from unisono.ops.delta import CHUNK, DeltaPlan, PendingTokens
from unisono.ops.linear import Linear
from unisono.ops.reference import (
    activation,
    draft_plan,
    embedding,
    experts,
    filters,
    gumbel,
    norm,
    penalties,
    reduce,
    rope_kv,
    sampling,
)
from unisono.ops.reference.attention import attention
from unisono.ops.reference.delta_rule import gates, replay, step, unit_heads
from unisono.ops.reference.linear import linear
from unisono.ops.reference.short_conv import short_conv
from unisono.ops.table import Ops


def with_references(ops: Ops, names: Sequence[str]) -> Ops:
    """Return `ops` with the named ones taken from `REFERENCES`; "linear" is every product."""
    for name in names:
        ops = replace(ops, fuses_sums=False, **REFERENCES[name])
    return ops


@dataclass(frozen=True, slots=True)
class _Layout:
    """What `plan_attention` was asked for."""

    starts: Sequence[int]
    counts: Sequence[int]
    block_table: Tensor
    window: int


def _plan(
    shape: AttentionShape,
    starts: Sequence[int],
    counts: Sequence[int],
    block_table: Tensor,
    window: int = 0,
) -> _Layout:
    return _Layout(list(starts), list(counts), block_table, window)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: _Layout, scale: float) -> Tensor:
    """One query at a time, over the keys of its own request."""
    outputs, token = [], 0
    for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        for position in range(start, start + count):
            at = torch.arange(position + 1, device=q.device)
            block = plan.block_table[row, at // k_cache.shape[2]]
            k = k_cache[block, :, at % k_cache.shape[2]]
            v = v_cache[block, :, at % k_cache.shape[2]]
            one = q[token : token + 1]
            outputs.append(attention(one, k, v, at[-1:], scale, plan.window))
            token += 1
    return torch.cat(outputs)


def _pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    weight = weight.clone()

    def product(x: Tensor) -> Tensor:
        rows = [linear(row[None], weight) for row in x]
        y = torch.cat(rows) if rows else x.new_empty(0, weight.shape[0])
        return y if bias is None else y + bias

    return product


def _pack_head(weight: Tensor) -> Linear:
    product = _pack_linear(weight.float())
    return lambda x: product(x.float())


def _convolve(
    x: Tensor,
    weight: Tensor,
    conv: Tensor,
    plan: DeltaPlan,
    pending: PendingTokens | None = None,
) -> Tensor:
    """A row at a time."""
    outputs = [x[:0]]
    for row, number in zip(plan.rows, plan.states.tolist(), strict=True):
        past = torch.zeros_like(conv[number]) if row.start == 0 else conv[number]
        if row.num_pending:
            assert pending is not None
            known = torch.cat((past, pending.inputs[number, : row.num_pending]))
            past = known[row.num_pending :]
        own = x[row.first : row.first + row.count]
        inputs = torch.cat((past, own))
        outputs.append(short_conv(inputs, weight))
        if row.holds_back:
            assert pending is not None
            pending.inputs[number, : row.count] = own
        for at, target in (*row.saves, (0 if row.holds_back else row.count, number)):
            conv[target] = inputs[at : at + len(past)]
    return torch.cat(outputs)


def _recur(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    plan: DeltaPlan,
    num_key_heads: int,
    pending: PendingTokens | None = None,
) -> Tensor:
    """A token at a time, those of prompts too; what is stored is rounded where it always is."""
    outputs = [mixed.new_empty(0, *state.shape[1:3])]
    group = state.shape[1] // num_key_heads
    for row, number in zip(plan.rows, plan.states.tolist(), strict=True):
        saves, now = dict(row.saves), state[number].float().clone()
        if row.start == 0:
            now.zero_()
        for at in range(row.num_pending):
            assert pending is not None
            k = pending.keys[number, at].repeat_interleave(group, dim=0)
            replay(now, k, pending.updates[number, at], pending.decays[number, at])
            now = now.to(state.dtype).float()
        if row.holds_back:
            state[number] = now
        for at in range(row.count):
            token = slice(row.first + at, row.first + at + 1)
            q, key, v = unit_heads(mixed[token], num_key_heads, state.shape[3], state.shape[2])
            q, k = (x.repeat_interleave(group, dim=1) for x in (q, key))
            g, beta = gates(b[token], a[token], decay, dt_bias)
            o, update = step(now[None], q, k, v, g.exp(), beta)
            outputs.append(o.to(mixed.dtype))
            if row.holds_back:
                assert pending is not None
                pending.keys[number, at], pending.updates[number, at] = key[0], update[0]
                pending.decays[number, at] = g[0].exp()
            if at + 1 >= row.num_chunked or (at + 1) % CHUNK == 0:
                now = now.to(state.dtype).float()
            if at + 1 in saves:
                state[saves[at + 1]] = now
        if not row.holds_back:
            state[number] = now
    return torch.cat(outputs)


DEFINITIONS: dict[str, Any] = {
    "rms_norm": norm.rms_norm,
    "add_rms_norm": norm.add_rms_norm,
    "gated_rms_norm": norm.gated_rms_norm,
    "silu_and_mul": activation.silu_and_mul,
    "sigmoid_and_mul": activation.sigmoid_and_mul,
    "embed_shard": embedding.embed_shard,
    "reduce_rows": reduce.reduce_rows,
    "rope_and_write_kv": rope_kv.rope_and_write_kv,
    "route_experts": experts.route_experts,
    "penalize": penalties.penalize,
    "add_bias": penalties.add_bias,
    "filter_logits": filters.filter_logits,
    "add_noise": gumbel.add_noise,
    "noisy_argmax_keys": gumbel.noisy_argmax_keys,
    "argmax_keys": sampling.argmax_keys,
    "unpack_keys": sampling.unpack_keys,
    "settle_drafts": draft_plan.settle_drafts,
}
"""Ops whose definition is all that a CPU has for them, too, by their field of `Ops`."""
REFERENCES: dict[str, dict[str, Any]] = {
    **{name: {name: definition} for name, definition in DEFINITIONS.items()},
    "linear": {"pack_linear": _pack_linear, "pack_head": _pack_head},
    "paged_attention": {"plan_attention": _plan, "paged_attention": _attend},
    "short_conv": {"short_conv": _convolve},
    "delta_rule": {"delta_rule": _recur},
    "experts": {"pack_experts": partial(experts.pack_experts, pack_linear=_pack_linear)},
}
"""By the name a trace has for an op: the fields of `Ops` that its reference fills."""
NEED_THE_HOST = frozenset({"paged_attention", "short_conv", "delta_rule", "experts"})
"""Those that the host lays out row by row: no graph can hold them."""
