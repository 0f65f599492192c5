"""A model that can draft, on thread ranks, with caches for one request: pairs in, drafts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.rig import CPU, run_ranks
from unisono.models.config import ModelConfig
from unisono.models.config_reader import read_model_config
from unisono.models.decoder import Decoder
from unisono.models.interface import Build, ForwardBatch, LayerCache, StateCache
from unisono.models.ledger import fill_weights
from unisono.models.partition import ModelPartition
from unisono.models.random_weights import open_weights
from unisono.models.registry import model_class
from unisono.ops import dispatch
from unisono.ops.attention import AttentionShape
from unisono.ops.comm import Group
from unisono.ops.table import Ops
from unisono.workers.config import BLOCK_SIZE

T = TypeVar("T")
LENGTH = 256


class DraftingRank:
    """One rank: `forward` for the model's tokens, `draft` for pairs, as often as one likes."""

    def __init__(
        self,
        path: Path | ModelConfig,
        group: Group,
        dtype: torch.dtype = torch.float32,
        tap: Callable[[Ops, str], Ops] | None = None,
    ) -> None:
        config = path if isinstance(path, ModelConfig) else read_model_config(path)
        self.partition = ModelPartition.of(config, group.size, drafts=True)
        self.ops = dispatch.resolve(CPU, config.head_dim)
        build = Build(self.ops, group, dtype, CPU, tap=tap)
        self.model: Decoder = model_class(config.family)(build, self.partition, LENGTH)
        source = ("", "random") if isinstance(path, ModelConfig) else (str(path), "auto")
        with open_weights(*source, frozenset(), dtype) as weights:
            specs = self.partition.weights(group.rank)
            fill_weights(specs, self.model.targets(), weights, lambda done, total: None)
        self.model.pack()
        self._group, self._config = group, config
        self._shape = AttentionShape(
            self.partition.heads.size(group.rank),
            self.partition.kv_heads.size(group.rank),
            config.head_dim,
        )
        self._caches = [self._cache_of(i, dtype) for i in range(config.num_layers)]
        self._draft_cache = self._kv(dtype)

    def forward(self, ids: Sequence[int], start: int = 0) -> Tensor:
        """States after the final norm of tokens from position `start` on, [ids, hidden].

        From 0 on it is a whole prompt; behind it, tokens that were generated.
        """
        num_prompt = 0 if start else len(ids)
        delta = self.ops.plan_delta([start], [len(ids)], [num_prompt], [1], device=CPU)
        return self.model.forward(self._batch(ids, start, delta), self._caches)

    def draft(self, ids: Sequence[int], hidden: Tensor, start: int = 0) -> Tensor:
        """States of the drafts behind the pairs from position `start` on, [ids, hidden]."""
        batch = self._batch([0] * len(ids), start)  # whose tokens and recurrence do not count
        return self.model.draft(torch.tensor(ids), hidden, batch, self._draft_cache)

    def chain(self, ids: Sequence[int], hidden: Tensor, count: int) -> tuple[list[int], Tensor]:
        """`count` drafts behind the last pair of a request's, and logits [count, vocabulary].

        `hidden` [ids - 1, hidden]: the states of all tokens but the last, whose pairs come first.
        """
        state = self.draft(ids[1:], hidden)[-1:]
        drafts, rows = [], []
        for i in range(count):
            if i:
                state = self.draft(drafts[-1:], state, len(ids) - 2 + i)
            rows.append(self.whole(self.model.draft_logits(state)))
            drafts.append(int(rows[-1].argmax()))
        return drafts, torch.cat(rows)

    def whole(self, logits: Tensor) -> Tensor:
        """The whole vocabulary's logits, of the part of this rank."""
        vocab = self.partition.vocab
        return self._group.gather(logits, [vocab.size(rank) for rank in range(self._group.size)])

    def _batch(self, ids: Sequence[int], start: int, delta: Any = None) -> ForwardBatch:
        positions = torch.arange(start, start + len(ids))
        table = torch.arange(1, LENGTH // BLOCK_SIZE + 1)[None]
        plan = self.ops.plan_attention(self._shape, [start], [len(ids)], table, 0)
        return ForwardBatch(
            torch.tensor(ids),
            positions,
            positions + BLOCK_SIZE,
            {0: plan},
            delta,
        )

    def _cache_of(self, layer: int, dtype: torch.dtype) -> LayerCache | StateCache:
        delta, rank = self._config.delta, self._group.rank
        if not self._config.is_delta(layer) or delta is None:
            return self._kv(dtype)
        keys, values = self.partition.key_heads.size(rank), self.partition.value_heads.size(rank)
        channels = 2 * keys * delta.key_head_dim + values * delta.value_head_dim
        return StateCache(
            torch.zeros(2, delta.conv_width - 1, channels, dtype=dtype),
            torch.zeros(2, values, delta.value_head_dim, delta.key_head_dim),
        )

    def _kv(self, dtype: torch.dtype) -> LayerCache:
        shape = (
            LENGTH // BLOCK_SIZE + 1,
            self._shape.num_kv_heads,
            BLOCK_SIZE,
            self._config.head_dim,
        )
        return LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def on_ranks(
    path: Path | ModelConfig,
    ranks: int,
    body: Callable[[DraftingRank], T],
    dtype: torch.dtype = torch.float32,
) -> list[T]:
    """What `body` returns on each of `ranks` ranks that have the model at `path`."""

    @torch.inference_mode()
    def run(group: Group) -> T:
        return body(DraftingRank(path, group, dtype))

    return run_ranks(ranks, run)
