"""Gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from unisono.models.interface import Build, PartialSum
from unisono.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from unisono.models.partition import ModelPartition


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product, cut by channel."""

    def __init__(self, build: Build, partition: ModelPartition) -> None:
        config = partition.config
        width = partition.mlp.size(build.group.rank)
        self.gate_up = ColumnParallelLinear(
            build.within("gate_up"),
            config.hidden_size,
            {"gate_proj": width, "up_proj": width},
            config.mlp_bias,
        )
        self.down = RowParallelLinear(
            build.within("down"), "down_proj", width, config.hidden_size, config.mlp_bias
        )
        self._activation = build.ops.silu_and_mul

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, x: Tensor) -> PartialSum:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self._activation(self.gate_up(x)))
