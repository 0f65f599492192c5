"""Grouped-query attention over a paged cache, cut by KV group.

Shape letters: T tokens, H query heads, K KV heads of this rank, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.models.interface import Build, ForwardBatch, LayerCache, PartialSum
from unisono.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from unisono.models.layers.norm import NormWeight
from unisono.models.partition import ModelPartition


class Attention:
    """o(gate(attention(rope(norm(q)), rope(norm(k)), v))); norms and gate where the model has them.

    A gate multiplies the output by its sigmoid. In the checkpoint each head of q_proj is [query D |
    gate D]; here the rows of the merged product are all queries, keys, values, then all gates.
    """

    def __init__(self, build: Build, partition: ModelPartition, layer: int) -> None:
        config, rank = partition.config, build.group.rank
        self._ops = build.ops
        self._heads = partition.heads.size(rank)
        self._kv_heads = partition.kv_heads.size(rank)
        self._head_dim = dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._scale = dim**-0.5
        self._window = config.window_of(layer)
        self._gated = config.attn_output_gate
        query = self._heads * (2 if self._gated else 1)
        parts = {"q_proj": query, "k_proj": self._kv_heads, "v_proj": self._kv_heads}
        self._num_merged = sum(parts.values())
        self.qkv = ColumnParallelLinear(
            build.within("qkv"),
            config.hidden_size,
            {name: heads * dim for name, heads in parts.items()},
            config.qkv_bias,
        )
        self.out = RowParallelLinear(
            build.within("out"), "o_proj", self._heads * dim, config.hidden_size, config.o_bias
        )
        self.q_norm, self.k_norm = (
            NormWeight(build, dim, zero_centred=config.zero_centred_norms)
            if config.qk_norm
            else None
            for _ in range(2)
        )
        self._head_norms: Tensor | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.targets(prefix)
        yield from self.out.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}q_norm.weight", self.q_norm.weight
            yield f"{prefix}k_norm.weight", self.k_norm.weight

    def pack(self) -> None:
        self.qkv.pack(self._gates_last() if self._gated else None)
        self.out.pack()
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.pack()
            self.k_norm.pack()
            # One norm over all heads: each row carries its own weight.
            queries = self.q_norm.weight.expand(self._heads, -1)
            keys = self.k_norm.weight.expand(self._kv_heads, -1)
            self._head_norms = torch.cat((queries, keys))

    def _gates_last(self) -> Tensor:
        """Where the rows of the merged product are in the order of the checkpoint."""
        rows = torch.arange(2 * (self._heads + self._kv_heads) * self._head_dim)
        of_queries = rows[: 2 * self._heads * self._head_dim]
        queries, gates = of_queries.view(self._heads, 2, self._head_dim).unbind(1)
        return torch.cat((queries.flatten(), rows[len(of_queries) :], gates.flatten()))

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden]; writes the KV of the tokens into the cache first."""
        merged = self.qkv(x).view(-1, self._num_merged, self._head_dim)
        heads = merged[:, : self._heads + 2 * self._kv_heads] if self._gated else merged
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
        attended = attended.flatten(1)
        if self._gated:
            gates = merged[:, heads.shape[1] :].flatten(1)
            attended = self._ops.sigmoid_and_mul(attended, gates)
        return self.out(attended)
