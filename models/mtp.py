"""Multi-token prediction: a layer behind the decoder that drafts the token after the next.

Formula and names: the `mtp.*` tensors of Qwen3-Next and Qwen3.5, which transformers' MtpModel reads
too. The right state to draft from is the one after the final norm; another would cost accepted
drafts only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.models.decoder_layer import DecoderLayer
from unisono.models.interface import Build, ForwardBatch, LayerCache
from unisono.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from unisono.models.layers.linear import ReplicatedLinear
from unisono.models.layers.norm import RMSNorm
from unisono.models.partition import ModelPartition


class MTP:
    """norm(layer(fc([norm_e(embedding of x_{t+1}) | norm_h(h_t)]))): state of a draft for t + 2.

    `embed` and `head` are None where they are those of the decoder. Where a checkpoint has several
    such layers, each trained for one place of a chain, the first drafts all of them, from its own
    output.
    """

    def __init__(self, build: Build, partition: ModelPartition, layer: DecoderLayer) -> None:
        config = partition.config
        self.embedding_norm = RMSNorm.of(build.within("embedding_norm"), config)
        self.hidden_norm = RMSNorm.of(build.within("hidden_norm"), config)
        width = config.hidden_size
        self.embed: VocabParallelEmbedding | None = None
        if config.mtp_embedding:
            scope = build.within("embed")
            self.embed = VocabParallelEmbedding(scope, partition.vocab, width)
        self.head: VocabParallelHead | None = None
        self.head_weight: Tensor | None = None
        if config.mtp_head:
            self.head = VocabParallelHead(build.within("head"), partition.vocab, width)
            self.head_weight = build.empty(*self.head.shape)
        self.fc = ReplicatedLinear(build.within("fc"), "fc", 2 * width, width)
        self.layer = layer
        self.norm = RMSNorm.of(build.within("norm"), config)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under `prefix` and where each is to be written."""
        if self.embed is not None:
            yield f"{prefix}embed_tokens.weight", self.embed.weight
        if self.head_weight is not None:
            yield f"{prefix}lm_head.weight", self.head_weight
        yield from self.fc.targets(prefix)
        yield f"{prefix}pre_fc_norm_embedding.weight", self.embedding_norm.weight
        yield f"{prefix}pre_fc_norm_hidden.weight", self.hidden_norm.weight
        yield from self.layer.targets(f"{prefix}layers.0.")
        yield f"{prefix}norm.weight", self.norm.weight

    def pack(self) -> None:
        """After loading, once."""
        for part in (self.embedding_norm, self.hidden_norm, self.fc, self.layer, self.norm):
            part.pack()
        if self.head is not None and self.head_weight is not None:
            self.head.pack(self.head_weight)
            self.head_weight = None

    def __call__(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
    ) -> Tensor:
        """Embeddings of tokens and the states before them, [T, hidden] each -> [T, hidden]."""
        pairs = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=1)
        stream = self.fc(pairs)
        added, stream = self.layer(self.layer.input_norm(stream), stream, rope, batch, cache)
        return self.norm.add(added, stream)[0]
