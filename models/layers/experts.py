"""A mixture of gated MLPs, each cut by channel on every rank.

Shape letters: T tokens, N experts, I channels of one expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from unisono.models.interface import Build, PartialSum
from unisono.models.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from unisono.models.partition import ModelPartition
from unisono.ops.reference.experts import Experts


class ExpertsMLP:
    """The weighted sum of the experts that the router chooses, and of the shared one if there is.

    Every rank chooses alike, from the same numbers, and holds a part of every expert, so that one
    all-reduce ends the layer: its partial sum is rounded once.
    """

    def __init__(self, build: Build, partition: ModelPartition) -> None:
        config, hidden = partition.config.experts, partition.config.hidden_size
        assert config is not None
        self._ops, self._group = build.ops, build.group
        self._num_chosen = config.num_experts_per_tok
        self._renormalise = config.renormalise
        self.router = ReplicatedLinear(build.within("router"), "gate", hidden, config.num_experts)
        width = partition.experts.size(build.group.rank)
        self.gate_up: Tensor | None = build.empty(config.num_experts, 2 * width, hidden)
        self.down: Tensor | None = build.empty(config.num_experts, hidden, width)
        self._experts: Experts
        self.shared = (
            SharedExpert(build.within("shared"), partition) if config.shared_width else None
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.router.targets(prefix)
        assert self.gate_up is not None
        assert self.down is not None
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"{prefix}experts.{number}.gate_proj.weight", gate
            yield f"{prefix}experts.{number}.up_proj.weight", up
            yield f"{prefix}experts.{number}.down_proj.weight", down
        if self.shared is not None:
            yield from self.shared.targets(prefix)

    def pack(self) -> None:
        self.router.pack()
        assert self.gate_up is not None
        assert self.down is not None
        self._experts = self._ops.pack_experts(self.gate_up, self.down)
        self.gate_up = self.down = None
        if self.shared is not None:
            self.shared.pack()

    def __call__(self, x: Tensor) -> PartialSum:
        """[T, hidden] -> [T, hidden]."""
        weights, ids = self._ops.route_experts(self.router(x), self._num_chosen, self._renormalise)
        shared = None if self.shared is None else self.shared(x)
        part = self._experts(x, weights, ids, shared)
        return PartialSum(part, None, self._ops.reduce_rows, self._group)


class SharedExpert:
    """sigmoid(gate(x)) * mlp(x): this rank's part of it, a partial sum."""

    def __init__(self, build: Build, partition: ModelPartition) -> None:
        hidden, width = partition.config.hidden_size, partition.shared_expert.size(build.group.rank)
        self._ops = build.ops
        self.gate_up = ColumnParallelLinear(
            build.within("gate_up"), hidden, {"gate_proj": width, "up_proj": width}, False
        )
        self.down = RowParallelLinear(build.within("down"), "down_proj", width, hidden, False)
        self.gate = ReplicatedLinear(build.within("gate"), "shared_expert_gate", hidden, 1)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.targets(f"{prefix}shared_expert.")
        yield from self.down.targets(f"{prefix}shared_expert.")
        yield from self.gate.targets(prefix)

    def pack(self) -> None:
        for layer in (self.gate_up, self.down, self.gate):
            layer.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], to be summed over ranks."""
        partial = self.down.product(self._ops.silu_and_mul(self.gate_up(x)))
        return self._ops.sigmoid_and_mul(partial, self.gate(x))
