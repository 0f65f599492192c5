"""A model whose recurrent state is a running hash of its tokens, on the real workers.

Whatever of a state is lost, stale, doubled or another's shows in the next token, and so does a
prompt that is computed in another form or cut elsewhere than on the grid of 64. The last layer is
attention over the hashes so far: it shows KV blocks of another prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.launcher.fakes import tiny_model
from tests.rig import LocalEngine
from unisono.models.config import DeltaConfig, ModelConfig
from unisono.models.interface import Build, Caches, ForwardBatch, LayerCache, StateCache
from unisono.models.partition import ModelPartition
from unisono.ops.table import Ops
from unisono.workers.config import BLOCK_SIZE

PRIME = 4093
"""Hashes lie below it, so that fp32 holds them, their products and the length exactly."""
CONFIG: ModelConfig = tiny_model(
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    max_position_embeddings=4096,
    delta=DeltaConfig(
        num_key_heads=2, num_value_heads=2, key_head_dim=2, value_head_dim=4, conv_width=3
    ),
    delta_layers=(True, True, False),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan_delta` was told."""

    starts: Sequence[int]
    counts: Sequence[int]
    num_prompts: Sequence[int]
    states: Sequence[int]
    saves: dict[tuple[int, int], int]
    """By row and length."""


def plan_delta(
    starts: Sequence[int],
    counts: Sequence[int],
    num_prompts: Sequence[int],
    states: Tensor,
    saves: Sequence[tuple[int, int, int]] = (),
    *,
    device: torch.device,
) -> Plan:
    """Keep what the builder says, and check the promises of its contract."""
    for start, count, num_prompt in zip(starts, counts, num_prompts, strict=True):
        assert start >= num_prompt or start % BLOCK_SIZE == 0, "a row begins off the grid"
        end = start + count
        assert end >= num_prompt or end % BLOCK_SIZE == 0, "a row ends off the grid"
    for row, length, _ in saves:
        assert length % BLOCK_SIZE == 0, "a snapshot off the grid"
        assert starts[row] < length <= min(starts[row] + counts[row], num_prompts[row])
    numbers = states.tolist()
    named = [number for number in numbers + [state for *_, state in saves] if number]
    assert len(set(named)) == len(named), "a state is named twice"
    return Plan(
        list(starts),
        list(counts),
        list(num_prompts),
        numbers,
        {(row, length): state for row, length, state in saves},
    )


class Recurrent:
    """The model, as workers see it."""

    def __init__(self, build: Build, partition: ModelPartition) -> None:
        self.config = partition.config
        self._ops = build.ops
        self._vocab = torch.arange(*partition.vocab.ranges[build.group.rank])
        self._heads = partition.heads.size(build.group.rank)

    def targets(self) -> dict[str, Tensor]:
        return {}

    def pack(self) -> None:
        pass

    def forward(self, batch: ForwardBatch, caches: Caches) -> Tensor:
        """Each layer's column holds its hash behind each token; attention's, the bits of a mean."""
        hidden = torch.zeros(len(batch.token_ids), self.config.hidden_size)
        inputs = batch.token_ids.tolist()
        for layer, cache in enumerate(caches):
            if isinstance(cache, StateCache):
                inputs = _recur(inputs, batch.delta, cache, layer)
                hidden[:, layer] = torch.tensor(inputs, dtype=torch.float32)
            else:
                hidden[:, layer] = self._attend(hidden[:, layer - 1], batch, cache)
        return hidden

    def _attend(self, hashes: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        block, offset = batch.slot_mapping // BLOCK_SIZE, batch.slot_mapping % BLOCK_SIZE
        cache.k[block, :, offset] = 0
        cache.v[block, :, offset] = hashes[:, None, None].expand(-1, *cache.v.shape[1::2])
        q = torch.zeros(len(hashes), self._heads, self.config.head_dim)
        return self._ops.paged_attention(q, cache.k, cache.v, batch.attention[0], 1.0)[:, 0, 0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits without a pattern, from every bit of the three columns."""
        bits = hidden[:, :3].contiguous().view(torch.int32).long()
        key = (bits * torch.tensor([40503, 69069, 1664525])).sum(dim=1) % 1000003
        return ((key[:, None] + 1) * (self._vocab + 7919) * 7919 % 1000003).float()

    logits = head


def _recur(inputs: Sequence[int], plan: Plan, cache: StateCache, layer: int) -> list[int]:
    """The running hash behind each token. `cache.state` holds it and how many it is of."""
    hashes: list[int] = []
    for row, (start, count, number) in enumerate(
        zip(plan.starts, plan.counts, plan.states, strict=True)
    ):
        seen, now, recent = 0, layer, [0] * cache.conv.shape[1]
        if start and number:  # what lies in scratch is nobody's
            seen, now = (int(number) for number in cache.state[number].flatten()[:2])
            recent = [int(token) for token in cache.conv[number, :, 0]]
        assert seen == start or not number, "a state that is of another length"
        for position in range(start, start + count):
            in_prompt = position < plan.num_prompts[row]
            recent = [*recent[1:], inputs[len(hashes)]]
            now = (now * (31 if in_prompt else 37) + sum(recent) + recent[-1]) % PRIME
            length = position + 1
            ends_chunk = length % BLOCK_SIZE == 0 or length in (
                start + count,
                plan.num_prompts[row],
            )
            if in_prompt and ends_chunk:
                now = (now * 41 + 1) % PRIME
            if length == start + count:
                _write(cache, number, length, now, recent)
            if saved := plan.saves.get((row, length)):
                _write(cache, saved, length, now, recent)
            hashes.append(now)
    return hashes


def _write(cache: StateCache, number: int, length: int, now: int, recent: list[int]) -> None:
    cache.state[number].flatten()[:2] = torch.tensor([float(length), float(now)])
    cache.conv[number] = torch.tensor(recent, dtype=torch.float32)[:, None]


class RecurrentEngine(LocalEngine):
    """The real scheduler and workers with this model. All states are NaN before they are used."""

    def __init__(self, config: ModelConfig = CONFIG, **options: Any) -> None:
        super().__init__(config, ops_of=_with_plan, **options)
        self.poison()

    @torch.inference_mode()
    def poison(self) -> None:
        """Make every state such that nobody can have read it."""
        for rank in self.ranks:
            assert rank.states is not None
            for layer in rank.states.layers:
                layer.conv.fill_(float("nan"))
                layer.state.fill_(float("nan"))

    def _load(self, build: Build, path: Path | None = None) -> Recurrent:
        return Recurrent(build, self.partition)


def _with_plan(rank: int, ops: Ops) -> Ops:
    return replace(ops, plan_delta=plan_delta)
