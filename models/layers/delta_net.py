"""A gated delta net: linear attention with a recurrent state, cut by key head.

Shape letters: T tokens, K key heads, V value heads of this rank, dk and dv their widths.
Formula: `ops/reference/delta_rule.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.models.interface import Build, ForwardBatch, PartialSum, StateCache
from unisono.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from unisono.models.partition import ModelPartition


class DeltaNet:
    """out(norm(delta(conv(q, k, v), b, a)) * silu(z)); q, k, v, z, b and a are one product.

    Checkpoints hold its rows by key head, [q | k | its v | its z] and [its b | its a], or each
    kind of its own; here all q come first, then all k, v, z, b, a.
    """

    def __init__(self, build: Build, partition: ModelPartition) -> None:
        config, rank = partition.config.delta, build.group.rank
        assert config is not None
        self._ops = build.ops
        self._keys = keys = partition.key_heads.size(rank)
        self._values = values = partition.value_heads.size(rank)
        self._key_dim, self._value_dim = config.key_head_dim, config.value_head_dim
        self._is_grouped = config.is_grouped
        self._eps = partition.config.rms_norm_eps
        mixed = 2 * keys * self._key_dim + values * self._value_dim
        gates = values * self._value_dim
        self._widths = (mixed, gates, values, values)
        parts = {"qkv": mixed, "z": gates, "b": values, "a": values}
        if self._is_grouped:
            parts = {"qkvz": mixed + gates, "ba": 2 * values}
        self.inputs = ColumnParallelLinear(
            build.within("inputs"),
            partition.config.hidden_size,
            {f"in_proj_{name}": rows for name, rows in parts.items()},
            False,
        )
        self.conv = build.empty(mixed, 1, config.conv_width)
        # Applied in fp32, whatever the model's dtype. The decay is -exp(A_log) once it is packed.
        self.decay = build.empty(values, dtype=torch.float32)
        self.dt_bias = build.empty(values, dtype=torch.float32)
        self.norm = build.empty(self._value_dim, dtype=torch.float32)
        self.out = RowParallelLinear(
            build.within("out"), "out_proj", gates, partition.config.hidden_size, False
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.inputs.targets(prefix)
        yield f"{prefix}conv1d.weight", self.conv
        yield f"{prefix}A_log", self.decay
        yield f"{prefix}dt_bias", self.dt_bias
        yield f"{prefix}norm.weight", self.norm
        yield from self.out.targets(prefix)

    def pack(self) -> None:
        self.inputs.pack(self._kinds_apart() if self._is_grouped else None)
        self.out.pack()
        self.decay.exp_().neg_()

    def _kinds_apart(self) -> Tensor:
        """Where the rows of the merged product are in a checkpoint that holds them by key head."""
        shared = self._values // self._keys
        per_key = (self._key_dim, self._key_dim, shared * self._value_dim, shared * self._value_dim)
        rows = torch.arange(self._keys * sum(per_key)).view(self._keys, -1).split(per_key, dim=1)
        gates = torch.arange(2 * self._values).view(self._keys, 2, shared) + self._keys * sum(
            per_key
        )
        return torch.cat([kind.flatten() for kind in (*rows, *gates.unbind(1))])

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: StateCache
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden]; leaves the state behind its tokens in the cache, or, where
        they are held back, that before them."""
        ops = self._ops
        mixed, z, b, a = self.inputs(x).split(self._widths, dim=1)
        mixed = ops.short_conv(mixed, self.conv[:, 0], cache.conv, batch.delta, cache.pending)
        gates = (b, a, self.decay, self.dt_bias)
        y = ops.delta_rule(mixed, *gates, cache.state, batch.delta, self._keys, cache.pending)
        z = z.unflatten(1, (self._values, self._value_dim))
        normed = ops.gated_rms_norm(y, z, self.norm, self._eps)
        return self.out(normed.flatten(1))
