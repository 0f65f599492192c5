"""What the decoders here share: an embedding, layers, logits = head(norm(h)), and how they draft.

An architecture is a list of layers; its file says what each of them is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.models.decoder_layer import DecoderLayer
from unisono.models.interface import Build, Caches, ForwardBatch, LayerCache
from unisono.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from unisono.models.layers.norm import RMSNorm
from unisono.models.layers.rotary import RotaryTable
from unisono.models.mtp import MTP
from unisono.models.partition import ModelPartition


class Decoder:
    """One rank's part of a model."""

    def __init__(
        self,
        build: Build,
        partition: ModelPartition,
        max_model_len: int,
        layers: Sequence[DecoderLayer],
        mtp: MTP | None = None,
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
        self.mtp = mtp
        self._rope = RotaryTable(build, config, max_model_len)

    def targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the memory that its part of this rank is written to."""
        table = {"model.embed_tokens.weight": self.embed.weight}
        for i, layer in enumerate(self.layers):
            table.update(layer.targets(f"model.layers.{i}."))
        table["model.norm.weight"] = self.norm.weight
        if self.head_weight is not None:
            table["lm_head.weight"] = self.head_weight
        if self.mtp is not None:
            table.update(self.mtp.targets("mtp."))
        return table

    def pack(self) -> None:
        """After loading: hand every product to the device's format, layer by layer."""
        for layer in self.layers:
            layer.pack()
        self.norm.pack()
        if self.mtp is not None:
            self.mtp.pack()
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

    def draft(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """Run the MTP layer over pairs; return what it makes of them, normed, [T, hidden].

        Pair i has `token_ids`[i] (int64), the token behind position `batch.positions`[i], and
        `hidden`[i], the state there: what `forward` returned or, where a draft follows a draft,
        what `draft` did. `draft_logits` of row i are those of the token behind that one. Keys and
        values go to `cache` at the pair's position, which lies below max_model_len; of `batch`
        only positions, slot_mapping and attention count.
        """
        assert self.mtp is not None, "the partition has no drafts"
        rope = self._rope.at(batch.positions)
        embed = self.mtp.embed or self.embed
        return self.mtp(embed(token_ids), hidden, rope, batch, cache)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] that `draft` returned -> fp32 logits [R, this rank's vocabulary rows]."""
        assert self.mtp is not None, "the partition has no drafts"
        head = self.mtp.head or self.head
        return head(hidden)
