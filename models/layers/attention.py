"""Grouped-query attention over a paged cache, cut by KV group.

Shape letters: T tokens, H query heads, K KV heads of this rank, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.models.interface import Build, ForwardBatch, LayerCache
from unisono.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from unisono.models.partition import ModelPartition


class Attention:
    """o(attention(rope(norm(q)), rope(norm(k)), v)); the norms only where the model has them."""

    def __init__(self, build: Build, partition: ModelPartition, layer: int) -> None:
        config, rank = partition.config, build.group.rank
        self._ops = build.ops
        self._heads = partition.heads.size(rank)
        self._kv_heads = partition.kv_heads.size(rank)
        self._head_dim = dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._scale = dim**-0.5
        self._window = config.window_of(layer)
        parts = {"q_proj": self._heads, "k_proj": self._kv_heads, "v_proj": self._kv_heads}
        self.qkv = ColumnParallelLinear(
            build.within("qkv"),
            config.hidden_size,
            {name: heads * dim for name, heads in parts.items()},
            config.qkv_bias,
        )
        self.out = RowParallelLinear(
            build.within("out"), "o_proj", self._heads * dim, config.hidden_size, config.o_bias
        )
        self.q_norm = build.empty(dim) if config.qk_norm else None
        self.k_norm = build.empty(dim) if config.qk_norm else None
        self._head_norms: Tensor | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.targets(prefix)
        yield from self.out.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}q_norm.weight", self.q_norm
            yield f"{prefix}k_norm.weight", self.k_norm

    def pack(self) -> None:
        self.qkv.pack()
        self.out.pack()
        if self.q_norm is not None and self.k_norm is not None:
            # One norm over all heads: each row carries its own weight.
            self._head_norms = torch.cat(
                (self.q_norm.expand(self._heads, -1), self.k_norm.expand(self._kv_heads, -1))
            )

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes the KV of the tokens into the cache first."""
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        q = self._ops.rope_and_write_kv(
            heads,
            self._heads,
            self._head_norms,
            self._eps,
            *rope,
            cache.k,
            cache.v,
            batch.slot_mapping,
        )
        attended = self._ops.paged_attention(
            q, cache.k, cache.v, batch.attention[self._window], self._scale
        )
        return self.out(attended.reshape(x.shape[0], -1))
