"""Vocabulary-parallel embedding and head: rows of the table are cut, tied or not."""

from __future__ import annotations

from torch import Tensor

from unisono.models.interface import Build
from unisono.models.partition import Partition
from unisono.ops.linear import Linear


class VocabParallelEmbedding:
    """Rows [first, last) of the table on this rank; the sum over ranks is the embedding."""

    def __init__(self, build: Build, vocab: Partition, hidden_size: int) -> None:
        self._build = build
        self.first_id, last = vocab.ranges[build.group.rank]
        self.weight = build.empty(last - self.first_id, hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        part = self._build.ops.embed_shard(token_ids, self.weight, self.first_id)
        return self._build.ops.reduce_rows(part, None, self._build.group)


class VocabParallelHead:
    """Logits of this rank's vocabulary rows, fp32 whatever the dtype of the model."""

    def __init__(self, build: Build, vocab: Partition, hidden_size: int) -> None:
        self._build = build
        self.first_id, last = vocab.ranges[build.group.rank]
        self.shape = (last - self.first_id, hidden_size)
        self._product: Linear | None = None

    def pack(self, weight: Tensor) -> None:
        """Take the head's rows [shard, hidden], or the embedding's where they are tied."""
        self._product = self._build.ops.pack_head(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, shard] fp32."""
        assert self._product is not None, "pack() comes first"
        return self._product(hidden)
