"""What the decoders here share: h += mixer(norm(h)); h += mlp(norm(h)); logits = head(norm(h)).

An architecture is a list of layers; its file says what each of them is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from unisono.models.interface import Build, Caches, ForwardBatch
from unisono.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from unisono.models.layers.norm import RMSNorm
from unisono.models.layers.rotary import RotaryTable
from unisono.models.partition import ModelPartition


class Mixer(Protocol):
    """What mixes the tokens of a request: attention, or a recurrence."""

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]: ...

    def pack(self) -> None: ...

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: Any
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; `cache` is the layer's own."""
        ...


class MLP(Protocol):
    """What each token goes through by itself."""

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]: ...

    def pack(self) -> None: ...

    def __call__(self, x: Tensor) -> Tensor:
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
    ) -> tuple[Tensor, Tensor]:
        """The input, normed, and the stream it is of -> what the MLP adds, and the stream.

        All [T, hidden]. The sum is left to the next norm, which reads it anyway.
        """
        normed, hidden = self.mlp_norm.add(self.mixer(normed, rope, batch, cache), hidden)
        return self.mlp(normed), hidden


class Decoder:
    """One rank's part of a model."""

    def __init__(
        self,
        build: Build,
        partition: ModelPartition,
        max_model_len: int,
        layers: Sequence[DecoderLayer],
    ) -> None:
        config = partition.config
        self.config = config
        self.embed = VocabParallelEmbedding(
            build.within("embed"), partition.vocab, config.hidden_size
        )
        self.layers = layers
        self.norm = RMSNorm.of(build.within("norm"), config)
        self.head = VocabParallelHead(build.within("head"), partition.vocab, config.hidden_size)
        self.head_weight: Tensor | None = (
            None if config.tie_word_embeddings else build.empty(*self.head.shape)
        )
        self._rope = RotaryTable(build, config, max_model_len)

    def targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the memory that its part of this rank is written to."""
        table = {"model.embed_tokens.weight": self.embed.weight}
        for i, layer in enumerate(self.layers):
            table.update(layer.targets(f"model.layers.{i}."))
        table["model.norm.weight"] = self.norm.weight
        if self.head_weight is not None:
            table["lm_head.weight"] = self.head_weight
        return table

    def pack(self) -> None:
        """After loading: hand every product to the device's format, layer by layer."""
        for layer in self.layers:
            layer.pack()
        self.norm.pack()
        self.head.pack(self.embed.weight if self.head_weight is None else self.head_weight)
        self.head_weight = None

    def forward(self, batch: ForwardBatch, caches: Caches) -> Tensor:
        """Run the step's tokens; return the hidden state after the final norm, [T, hidden]."""
        hidden = self.embed(batch.token_ids)
        rope = self._rope.at(batch.positions)
        normed = self.layers[0].input_norm(hidden)
        norms = (*(layer.input_norm for layer in self.layers[1:]), self.norm)
        for layer, cache, norm in zip(self.layers, caches, norms, strict=True):
            added, hidden = layer(normed, hidden, rope, batch, cache)
            normed, hidden = norm.add(added, hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> fp32 logits [R, this rank's vocabulary rows]."""
        return self.head(hidden)
