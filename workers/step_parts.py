"""The parts of one rank that steps are run with, whoever runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.models.interface import ForwardBatch, Model
from unisono.ops.attention import AttentionShape
from unisono.ops.table import Ops
from unisono.workers.graph_pool import GraphPool
from unisono.workers.kv_cache import KVCache
from unisono.workers.sampler import Sampler
from unisono.workers.slot_table import SlotTable
from unisono.workers.state_pool import StatePool, caches_of


@dataclass(frozen=True, slots=True)
class StepParts:
    """Who runs steps owns none of them."""

    ops: Ops
    model: Model
    cache: KVCache
    states: StatePool | None
    slots: SlotTable
    sampler: Sampler
    graphs: GraphPool
    buckets: Sequence[int]
    """Rows that graphs of decode steps have, padding included."""
    shape: AttentionShape
    """The heads of this rank."""
    windows: Sequence[int]
    """Those of the model's layers, each once, in order."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the model; return the hidden states [T, width]."""
        return self.model.forward(batch, caches_of(self.model.config, self.cache, self.states))

    def draft(self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the layer that drafts, over its own keys and values: the last ones of the cache."""
        return self.model.draft(token_ids, hidden, batch, self.cache.layers[-1])
