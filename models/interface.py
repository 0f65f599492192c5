"""What a model is given and what it asks for: the contract between workers and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.ops.comm import Group
from unisono.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer is built with: where it lives, how it computes, whom it meets."""

    bare_ops: Ops
    group: Group
    dtype: torch.dtype
    device: torch.device
    scope: str = ""
    """Where in the model it is used: "layers.3.attention"."""
    tap: Callable[[Ops, str], Ops] | None = None
    """Wraps the ops of a scope, to watch what they return; None: nobody watches."""

    @property
    def ops(self) -> Ops:
        """The ops, watched where somebody watches."""
        return self.bare_ops if self.tap is None else self.tap(self.bare_ops, self.scope)

    def within(self, name: str) -> Build:
        """The same for a part of the model, whose ops are watched under its name."""
        return replace(self, scope=f"{self.scope}.{name}" if self.scope else name)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised weights; the ledger proves that they are filled."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step. T tokens; the model sees positions and metadata, never phases."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, of each token in its request."""
    slot_mapping: Tensor
    """[T] int64, block * BLOCK_SIZE + offset: where each token's KV goes."""
    attention: Mapping[int, Any]
    """What `Ops.plan_attention` made, by sliding window (0: none), for each the model uses."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The paged KV of one layer: [blocks, kv_heads, BLOCK_SIZE, head_dim] each."""

    k: Tensor
    v: Tensor
