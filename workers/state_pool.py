"""The recurrent states of a rank: their one owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.models.config import ModelConfig
from unisono.models.interface import Caches, StateCache
from unisono.models.partition import ModelPartition
from unisono.ops.delta import PendingTokens
from unisono.workers.kv_cache import KVCache


class StatePool:
    """States 1 .. num_states of every gated delta net, and state 0 for scratch.

    `layers` has those of each net, in the order of the model: views of a few tensors, which are
    [layers, states, ...]; `num_drafts`: with room for the tokens of a step that has so many.
    `generation` counts allocations, as that of a `KVCache`.
    """

    def __init__(
        self,
        partition: ModelPartition,
        rank: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        num_drafts: int = 0,
    ) -> None:
        config, values = partition.config.delta, partition.value_heads.size(rank)
        assert config is not None, "the model has no recurrent state"
        pending = partition.pending_shapes(rank, num_drafts)
        # Shape and dtype of the parts of a state, as `StateCache` has them.
        self._kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((config.conv_width - 1, partition.conv_channels(rank)), dtype),
            ((values, config.value_head_dim, config.key_head_dim), state_dtype),
            *zip(pending, (dtype, *[torch.float32] * 3), strict=False),
        ]
        self._num_layers = sum(partition.config.delta_layers)
        self._device = device
        self._tensors: list[Tensor] = []
        self.generation = 0
        self.layers: list[StateCache] = []

    def allocate(self, num_states: int) -> None:
        """Take memory for `num_states` states beside state 0, replacing what was there.

        It is not cleared: a request's first token starts from nothing, whatever lies there.
        """
        self.release()
        for shape, dtype in self._kinds:
            size = (self._num_layers, num_states + 1, *shape)
            self._tensors.append(torch.empty(size, dtype=dtype, device=self._device))
        self.layers = [
            StateCache(conv, state, PendingTokens(*pending) if pending else None)
            for conv, state, *pending in zip(*self._tensors, strict=True)
        ]
        self.generation += 1
        self.clear([0])

    def release(self) -> None:
        """Give the memory back."""
        self._tensors, self.layers = [], []

    def clear(self, states: Sequence[int]) -> None:
        """Zero these states of every layer."""
        for tensor in self._tensors:
            tensor[:, states] = 0

    def copy(self, source: int, target: int) -> None:
        """Make state `target` of every layer what state `source` is.

        A snapshot is of a prompt's tokens, which nothing takes back.
        """
        for tensor in self._tensors[:2]:
            tensor[:, target] = tensor[:, source]


def caches_of(config: ModelConfig, cache: KVCache, states: StatePool | None) -> Caches:
    """What each of a model's own layers keeps of its requests. `states` None: all are attention."""
    if states is None:
        return cache.layers[: config.num_layers]
    of_attention, of_delta = iter(cache.layers), iter(states.layers)
    return [next(of_delta) if is_delta else next(of_attention) for is_delta in config.delta_layers]
