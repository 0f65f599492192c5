"""What a model is given and what it asks for: the contract between workers and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unisono.models.config import ModelConfig
from unisono.ops.comm import Group
from unisono.ops.delta import PendingTokens
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

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised weights, of the model's dtype unless one is given.

        The ledger proves that they are filled.
        """
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)


class PartialSum(NamedTuple):
    """What this rank has of a sum over ranks, [T, width]: left to whoever needs the sum."""

    part: Tensor
    bias: Tensor | None
    """[width]; added once, behind the sum."""
    reduce_rows: Callable[[Tensor, Tensor | None, Group], Tensor]
    """The op of the layer that it comes from."""
    group: Group

    def total(self) -> Tensor:
        """The sum and its bias, the same on every rank."""
        return self.reduce_rows(self.part, self.bias, self.group)


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
    delta: Any = None
    """What `Ops.plan_delta` made; None where the model has no recurrent state."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The paged KV of one layer: [blocks, kv_heads, BLOCK_SIZE, head_dim] each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """The recurrent states of one gated delta net, those of all requests. State 0 is scratch.

    conv [states, conv_width - 1, channels] in the model's dtype: the last inputs of the
    convolution, the newest last. state [states, value_heads, value_head_dim, key_head_dim] fp32
    (or bf16, rounded after every token): the transpose of the S of the formula, so that keys lie
    side by side. pending: the tokens that may yet be rejected; None where nothing drafts.
    """

    conv: Tensor
    state: Tensor
    pending: PendingTokens | None = None


Caches = Sequence[LayerCache | StateCache]
"""By layer."""


class Model(Protocol):
    """One rank's part of a model, as workers see it."""

    config: ModelConfig

    def forward(self, batch: ForwardBatch, caches: Caches) -> Tensor:
        """Run the step's tokens; return the hidden state after the final norm, [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> fp32 logits [R, this rank's vocabulary rows]."""
        ...

    def draft(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """Run pairs of a token and the state before it through the MTP layer, [T, hidden]."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] from `draft` -> fp32 logits [R, this rank's vocabulary rows]."""
        ...


class LoadableModel(Model, Protocol):
    """One whose weights are still to come."""

    def targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the memory that its part of this rank is written to."""
        ...

    def pack(self) -> None:
        """After loading, once: bring the weights into the form of the device."""
        ...
