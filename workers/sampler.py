"""Logits over vocabulary shards to tokens, the same on every rank."""

from __future__ import annotations

from torch import Tensor

from unisono.models.partition import ModelPartition
from unisono.ops.comm import Group
from unisono.ops.dispatch import Ops


class Sampler:
    """Greedy: the greatest logit of the whole vocabulary, the lowest id on ties."""

    def __init__(
        self, ops: Ops, group: Group, partition: ModelPartition, num_token_ids: int
    ) -> None:
        self._ops = ops
        self._group = group
        self._first_id = partition.vocab.ranges[group.rank][0]
        vocab_size = partition.config.vocab_size
        self._num_ids = min(num_token_ids or vocab_size, vocab_size)

    def sample(self, logits: Tensor) -> Tensor:
        """logits [S, this rank's rows] fp32 -> token ids [S] int64.

        Raises FloatingPointError if a row's logits hold a NaN on any rank.
        """
        keys = self._ops.argmax_keys(logits, self._first_id, self._num_ids)
        token_ids, is_nan = self._ops.unpack_keys(self._group.max(keys))
        if bool(is_nan.any()):
            rows = is_nan.nonzero().flatten().tolist()
            raise FloatingPointError(f"the logits of sampling rows {rows} hold NaN")
        return token_ids
