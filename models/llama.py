"""The llama decoder: h += attn(norm(h)); h += mlp(norm(h)); logits = head(norm(h)).

Serves llama, qwen2 (bias on q, k, v) and qwen3 (a norm on each head of q and k before the
rotation): their differences are fields of `ModelConfig`, set by the family's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from unisono.models.interface import Build, ForwardBatch, LayerCache
from unisono.models.layers.attention import Attention
from unisono.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from unisono.models.layers.mlp import GatedMLP
from unisono.models.layers.norm import RMSNorm
from unisono.models.layers.rotary import RotaryTable
from unisono.models.partition import ModelPartition


class LlamaLayer:
    """One decoder layer."""

    def __init__(self, build: Build, partition: ModelPartition, layer: int) -> None:
        config = partition.config
        build = build.within(f"layers.{layer}")
        self.input_norm = RMSNorm(
            build.within("input_norm"), config.hidden_size, config.rms_norm_eps
        )
        self.attention = Attention(build.within("attention"), partition, layer)
        self.mlp_norm = RMSNorm(build.within("mlp_norm"), config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(build.within("mlp"), partition)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight
        yield from self.attention.targets(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.mlp.targets(f"{prefix}mlp.")

    def __call__(
        self,
        normed: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """The input, normed, and the stream it is of -> what the MLP adds, and the stream.

        All [T, hidden]. The sum is left to the next norm, which reads it anyway.
        """
        normed, hidden = self.mlp_norm.add(self.attention(normed, rope, batch, cache), hidden)
        return self.mlp(normed), hidden


class Llama:
    """One rank's part of the model."""

    def __init__(self, build: Build, partition: ModelPartition, max_model_len: int) -> None:
        config = partition.config
        self.config = config
        self.embed = VocabParallelEmbedding(
            build.within("embed"), partition.vocab, config.hidden_size
        )
        self.layers = [LlamaLayer(build, partition, i) for i in range(config.num_layers)]
        self.norm = RMSNorm(build.within("norm"), config.hidden_size, config.rms_norm_eps)
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
            layer.attention.pack()
            layer.mlp.pack()
        self.head.pack(self.embed.weight if self.head_weight is None else self.head_weight)
        self.head_weight = None

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
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
