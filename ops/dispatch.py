"""Which implementation serves each op on a device: resolved once, at load.

Models and workers are handed one `Ops` and call its fields; a call costs an attribute lookup.
`use(name=function)` replaces ops for whatever is resolved inside it: tests plant faults and
bisect with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from unisono.ops import attention, delta, exactness, flash, linear
from unisono.ops.by_reference import DEFINITIONS, with_references
from unisono.ops.reference import experts, gumbel, logprobs, speculation
from unisono.ops.table import Ops

_overrides: ContextVar[dict[str, Any]] = ContextVar("op overrides", default={})  # noqa: B039


def resolve(device: torch.device, head_dim: int, attn: str = "auto") -> Ops:
    """Return the ops of `device`, with the start-up proofs of `ops/exactness.py` made.

    `attn` names the attention: auto for the device's own, which is "triton" on cuda and "tiled" on
    cpu; reference (the formula, any device); torch-flash. Raises ValueError for a device type that
    has no ops, and for an attention that the device has not.
    """
    match device.type:
        case "cpu":
            ops = _cpu_ops(head_dim)
        case "cuda":
            from unisono.ops.gpu import gpu_ops  # Triton is loaded where there is a GPU only

            ops = gpu_ops(device)
        case other:
            raise ValueError(f"device {other!r} has no ops; this version computes on: cpu, cuda")
    overrides = _overrides.get()
    fuses = ops.fuses_sums and not overrides
    return replace(_with_attention(ops, device.type, attn), fuses_sums=fuses, **overrides)


def _with_attention(ops: Ops, device: str, attn: str) -> Ops:
    match device, attn:
        case (_, "auto") | ("cuda", "triton") | ("cpu", "tiled"):
            return ops
        case _, "reference":
            return with_references(ops, ["paged_attention"])
        case "cuda", "torch-flash":
            return replace(
                ops, plan_attention=flash.plan_attention, paged_attention=flash.paged_attention
            )
    raise ValueError(f"there is no attention {attn!r} on {device}")


def _cpu_ops(head_dim: int) -> Ops:
    proofs: linear.Proofs = {}
    pack_linear = partial(linear.pack_linear, proofs=proofs)
    return Ops(
        **DEFINITIONS,
        pack_linear=pack_linear,
        pack_head=partial(linear.pack_head, proofs=proofs),
        plan_attention=attention.plan_attention,
        paged_attention=partial(
            attention.paged_attention, threads=exactness.attention_threads(head_dim)
        ),
        plan_delta=partial(delta.plan_delta, device=torch.device("cpu")),
        short_conv=delta.short_conv,
        delta_rule=delta.delta_rule,
        pack_experts=partial(experts.pack_experts, pack_linear=pack_linear),
        judge_drafts=speculation.judge_drafts,
        chance=gumbel.chance,
        token_logprobs=logprobs.token_logprobs,
    )


@contextmanager
def use(**functions: Callable[..., Any]) -> Iterator[None]:
    """Have `resolve` return these ops instead of its own while the block runs."""
    known = {field.name for field in fields(Ops)} - {"fuses_sums"}
    if unknown := sorted(set(functions) - known):
        raise ValueError(f"no op named {', '.join(unknown)}; ops: {', '.join(sorted(known))}")
    token = _overrides.set({**_overrides.get(), **functions})
    try:
        yield
    finally:
        _overrides.reset(token)
