"""The table of operations that models and workers are handed: the contract of every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unisono.ops import linear
from unisono.ops.comm import Group
from unisono.ops.reference.draft_plan import Settled, Table
from unisono.ops.reference.experts import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The arithmetic of one device and dtype. Contracts: the docstring of each function."""

    pack_linear: Callable[[Tensor, Tensor | None], linear.Linear]
    pack_head: Callable[[Tensor], linear.Linear]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    sigmoid_and_mul: Callable[[Tensor, Tensor], Tensor]
    rope_and_write_kv: Callable[..., Tensor]
    embed_shard: Callable[[Tensor, Tensor, int], Tensor]
    reduce_rows: Callable[[Tensor, Tensor | None, Group], Tensor]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[..., Tensor]
    plan_delta: Callable[..., Any]
    short_conv: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    route_experts: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    pack_experts: Callable[[Tensor, Tensor], Experts]
    settle_drafts: Callable[[Tensor, Tensor, Tensor, Table, int], Settled]
    judge_drafts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    chance: Callable[[Tensor, Tensor], Tensor]
    argmax_keys: Callable[[Tensor, int, int], Tensor]
    unpack_keys: Callable[[Tensor], tuple[Tensor, Tensor]]
    add_noise: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    noisy_argmax_keys: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
    filter_logits: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    penalize: Callable[..., Tensor]
    add_bias: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    token_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
    fuses_sums: bool = False
    """Whether `Group.all_reduce_add_rms_norm` may stand for `reduce_rows` and `add_rms_norm`: not
    where somebody watches these or has replaced one of them."""
