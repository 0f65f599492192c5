"""The paged KV tensors of a rank: their one owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.models.interface import LayerCache
from unisono.models.partition import ModelPartition
from unisono.workers.config import BLOCK_SIZE


class KVCache:
    """Blocks 1 .. num_blocks of every attention layer, and block 0 for scratch.

    The layer that drafts, if there is one, comes last.

    `generation` counts allocations: whatever remembers addresses compares it first.
    """

    def __init__(
        self, partition: ModelPartition, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = partition.config
        self._tail = (partition.kv_heads.size(rank), BLOCK_SIZE, config.head_dim)
        self._num_layers = partition.num_kv_layers
        self._dtype, self._device = dtype, device
        self.generation = 0
        self.layers: list[LayerCache] = []

    def allocate(self, num_blocks: int) -> None:
        """Take memory for `num_blocks` blocks beside block 0, replacing what was there.

        Blocks are zeroed when they are handed out, not here: on a CPU memory that is never
        written is never taken.
        """
        self.release()
        shape = (num_blocks + 1, *self._tail)
        for _ in range(self._num_layers):
            k = torch.empty(shape, dtype=self._dtype, device=self._device)
            v = torch.empty(shape, dtype=self._dtype, device=self._device)
            self.layers.append(LayerCache(k, v))
        self.generation += 1
        self.clear([0])

    def release(self) -> None:
        """Give the memory back."""
        self.layers = []

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that are handed out: a hidden key's weight is 0, and 0 * NaN is NaN.

        On a GPU nothing is done: its kernels never read what is hidden.
        """
        if self._device.type == "cuda":
            return
        index = torch.tensor(blocks, device=self._device)
        for layer in self.layers:
            layer.k.index_fill_(0, index, 0)
            layer.v.index_fill_(0, index, 0)
