"""Ops replaced by their readable references: is a kernel at fault, or what it is given?

Row by row, so that no row can depend on its company. Slow; for diagnosis only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.ops.attention import AttentionShape
from unisono.ops.linear import Linear
from unisono.ops.reference import activation, embedding, norm, reduce, rope_kv
from unisono.ops.reference.attention import attention
from unisono.ops.reference.linear import linear
from unisono.ops.table import Ops


def with_references(ops: Ops, names: Sequence[str]) -> Ops:
    """Return `ops` with the named ones taken from `REFERENCES`; "linear" is every product."""
    for name in names:
        ops = replace(ops, **REFERENCES[name])
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


REFERENCES: dict[str, dict[str, Any]] = {
    "linear": {"pack_linear": _pack_linear, "pack_head": _pack_head},
    "rms_norm": {"rms_norm": norm.rms_norm},
    "add_rms_norm": {"add_rms_norm": norm.add_rms_norm},
    "silu_and_mul": {"silu_and_mul": activation.silu_and_mul},
    "embed_shard": {"embed_shard": embedding.embed_shard},
    "reduce_rows": {"reduce_rows": reduce.reduce_rows},
    "rope_and_write_kv": {"rope_and_write_kv": rope_kv.rope_and_write_kv},
    "paged_attention": {"plan_attention": _plan, "paged_attention": _attend},
}
"""By the name a trace has for an op: the fields of `Ops` that its reference fills."""
