"""What a layer of the decoders here is: h += mixer(norm(h)); h += mlp(norm(h))."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from unisono.models.interface import Build, ForwardBatch, PartialSum
from unisono.models.layers.norm import RMSNorm
from unisono.models.partition import ModelPartition


class Mixer(Protocol):
    """What mixes the tokens of a request: attention, or a recurrence."""

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]: ...

    def pack(self) -> None: ...

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: Any
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden]; `cache` is the layer's own."""
        ...


class MLP(Protocol):
    """What each token goes through by itself."""

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]: ...

    def pack(self) -> None: ...

    def __call__(self, x: Tensor) -> PartialSum:
        """[T, hidden] -> [T, hidden]."""
        ...


class DecoderLayer:
    """One layer; `name` is what checkpoints call its mixer."""

    def __init__(
        self, build: Build, partition: ModelPartition, name: str, mixer: Mixer, mlp: MLP
    ) -> None:
        config = partition.config
        self.input_norm = RMSNorm.of(build.within("input_norm"), config)
        self.name = name
        self.mixer = mixer
        self.mlp_norm = RMSNorm.of(build.within("mlp_norm"), config)
        self.mlp = mlp

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight
        yield from self.mixer.targets(f"{prefix}{self.name}.")
        yield f"{prefix}post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.mlp.targets(f"{prefix}mlp.")

    def pack(self) -> None:
        for part in (self.input_norm, self.mixer, self.mlp_norm, self.mlp):
            part.pack()

    def __call__(
        self,
        normed: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: Any,
    ) -> tuple[PartialSum, Tensor]:
        """The input, normed, and the stream it is of -> what the MLP adds, and the stream.

        All [T, hidden]. The sums are left to the next norm, which reads them anyway: those over
        ranks, too.
        """
        normed, hidden = self.mlp_norm.add(self.mixer(normed, rope, batch, cache), hidden)
        return self.mlp(normed), hidden
