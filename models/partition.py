"""Who holds what: the cutting rules of tensor parallelism, as numbers. Torch-free.

A `Partition` is a list of half-open ranges, one per rank, never "size / ranks": nine heads in
three groups over two ranks are cut 6 + 3. Ranges may overlap where an item is replicated (a KV
head shared by the ranks that hold its queries).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from unisono.models.config import ConfigError, ModelConfig
from unisono.models.weight_specs import Held, WeightSpec, weight_specs

VOCAB_UNIT = 64
"""Rows of embedding and head are cut in multiples of this, the last shard shorter."""


class PartitionError(ConfigError):
    """A rank count that leaves a rank without a unit to hold. Names the legal counts."""


@dataclass(frozen=True, slots=True)
class Partition:
    """One dimension of `total` items, cut into one half-open range per rank."""

    total: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def even(cls, total: int, ranks: int, unit: int = 1) -> Partition:
        """Cut `total` in whole units, as evenly as they go; earlier ranks take the remainder.

        The last unit may be short. Raises PartitionError if there are fewer units than ranks.
        """
        units = -(-total // unit)
        if units < ranks:
            raise PartitionError(f"{total} items in units of {unit} do not reach {ranks} ranks")
        base, extra = divmod(units, ranks)
        bounds = [unit * (r * base + min(r, extra)) for r in range(ranks + 1)]
        bounds[-1] = total
        return cls(total, tuple(itertools.pairwise(bounds)))

    def size(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def scaled(self, width: int) -> Partition:
        """The same cut where every item is `width` rows wide (heads to channels)."""
        return Partition(self.total * width, tuple((a * width, b * width) for a, b in self.ranges))


def cut_heads(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[Partition, Partition]:
    """Cut attention by KV group; return the partitions of query heads and of KV heads.

    With at least as many groups as ranks a rank takes whole groups. With fewer, a KV head is
    replicated on several ranks and its query heads are cut between them; a rank never holds
    queries of two groups then. Raises PartitionError if a rank would hold no query head.
    """
    group = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        kv = Partition.even(num_kv_heads, ranks)
        return kv.scaled(group), kv
    queries: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    for head, (first, last) in enumerate(Partition.even(ranks, num_kv_heads).ranges):
        inside = Partition.even(group, last - first)
        queries += [(head * group + a, head * group + b) for a, b in inside.ranges]
        keys += [(head, head + 1)] * (last - first)
    return Partition(num_heads, tuple(queries)), Partition(num_kv_heads, tuple(keys))


@dataclass(frozen=True, slots=True)
class ModelPartition:
    """How one model lies on `ranks` ranks. What a model has not is a partition of nothing."""

    config: ModelConfig
    ranks: int
    heads: Partition
    kv_heads: Partition
    mlp: Partition
    vocab: Partition
    key_heads: Partition
    """Of the gated delta nets; as KV heads, replicated where there are fewer than ranks."""
    value_heads: Partition
    experts: Partition
    """Channels of each expert: every rank holds a part of all of them."""
    shared_expert: Partition
    drafts: bool = False
    """The MTP layer that drafts is there too, cut as the others are."""

    @classmethod
    def of(cls, config: ModelConfig, ranks: int, *, drafts: bool = False) -> ModelPartition:
        """Cut `config` over `ranks`, with its MTP layer if there is one and `drafts` asks for it.

        Raises PartitionError naming the legal rank counts.
        """
        try:
            drafts = drafts and config.num_mtp_layers > 0
            return replace(cls._cut(config, ranks), drafts=drafts)
        except PartitionError:
            *parts, last = _named_parts(config)
            legal = ", ".join(map(str, legal_rank_counts(config)))
            raise PartitionError(
                f"tp={ranks}: {', '.join(parts)} and {last} do not leave every rank a part; "
                f"legal rank counts: {legal}"
            ) from None

    @classmethod
    def _cut(cls, config: ModelConfig, ranks: int) -> ModelPartition:
        if ranks < 1:
            raise PartitionError(f"{ranks} ranks")
        heads, kv_heads = cut_heads(config.num_heads, config.num_kv_heads, ranks)
        value_heads = key_heads = Partition(0, ((0, 0),) * ranks)
        if delta := config.delta:
            value_heads, key_heads = cut_heads(delta.num_value_heads, delta.num_key_heads, ranks)
        mlp, experts, shared = (_cut_channels(size, ranks) for size in _mlp_sizes(config))
        unit = VOCAB_UNIT if config.vocab_size > VOCAB_UNIT * (ranks - 1) else 1
        return cls(
            config=config,
            ranks=ranks,
            heads=heads,
            kv_heads=kv_heads,
            mlp=mlp,
            vocab=Partition.even(config.vocab_size, ranks, unit),
            key_heads=key_heads,
            value_heads=value_heads,
            experts=experts,
            shared_expert=shared,
        )

    def weights(self, rank: int) -> Iterator[WeightSpec]:
        """Every tensor that `rank` reads, in the order of the layers."""
        held = {name: getattr(self, name).ranges[rank] for name in Held._fields}
        return weight_specs(self.config, Held(**held), self.drafts)

    @property
    def num_kv_layers(self) -> int:
        """Layers with a KV cache; the MTP layer is the last."""
        return self.config.num_kv_layers + self.drafts

    def kv_elements(self, rank: int) -> int:
        """Numbers of one token's key and value in one layer with a KV cache."""
        return 2 * self.kv_heads.size(rank) * self.config.head_dim

    def state_bytes(self, rank: int, item: int, state_item: int, num_drafts: int = 0) -> int:
        """Bytes of one request's recurrent state on `rank`, all gated delta nets; 0 without any.

        A number of the model's dtype takes `item` bytes: so inputs of the convolution are kept, and
        what a step with `num_drafts` may take back of them, of which the rest is fp32.
        """
        delta = self.config.delta
        if delta is None:
            return 0
        inputs, *rest = map(math.prod, self.pending_shapes(rank, num_drafts) or ((0,),))
        inputs += self.conv_channels(rank) * (delta.conv_width - 1)
        state = self.value_heads.size(rank) * delta.value_head_dim * delta.key_head_dim
        each = inputs * item + state * state_item + 4 * sum(rest)
        return sum(self.config.delta_layers) * each

    def pending_shapes(self, rank: int, num_drafts: int) -> tuple[tuple[int, ...], ...]:
        """What one request keeps in one delta net of a step with up to `num_drafts` drafts: its
        parts of `PendingTokens`, `inputs` (of the model's dtype), then three of fp32. () without
        drafts or delta nets."""
        delta, tokens = self.config.delta, num_drafts + 1
        if delta is None or not num_drafts:
            return ()
        keys, values = self.key_heads.size(rank), self.value_heads.size(rank)
        heads = (keys, delta.key_head_dim), (values, delta.value_head_dim), (values,)
        return (tokens, self.conv_channels(rank)), *((tokens, *head) for head in heads)

    def conv_channels(self, rank: int) -> int:
        """Channels of the convolution before a delta net, on `rank`."""
        delta = self.config.delta
        assert delta is not None
        values = self.value_heads.size(rank) * delta.value_head_dim
        return 2 * self.key_heads.size(rank) * delta.key_head_dim + values


def legal_rank_counts(config: ModelConfig, limit: int = 64) -> tuple[int, ...]:
    """Rank counts up to `limit` that leave every rank a part of every layer."""
    legal = []
    for ranks in range(1, limit + 1):
        try:
            ModelPartition._cut(config, ranks)
        except PartitionError:
            continue
        legal.append(ranks)
    return tuple(legal)


def _cut_channels(size: int, ranks: int) -> Partition:
    """Cut in the largest power of two up to 64 that divides `size` and reaches every rank."""
    unit = 64
    while unit > 1 and (size % unit or size // unit < ranks):
        unit //= 2
    return Partition.even(size, ranks, unit) if size else Partition(0, ((0, 0),) * ranks)


def _mlp_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Channels of an MLP, of an expert and of the shared one; 0 where no layer has it."""
    mixtures = sum(map(config.has_experts, range(config.num_layers)))
    dense = config.intermediate_size if mixtures < config.num_layers else 0
    if config.experts is None or not mixtures:
        return dense, 0, 0
    return dense, config.experts.width, config.experts.shared_width


def _named_parts(config: ModelConfig) -> Iterator[str]:
    """What is cut, for a message."""
    yield f"{config.num_heads} query heads in {config.num_kv_heads} groups"
    if delta := config.delta:
        yield f"{delta.num_value_heads} value heads in {delta.num_key_heads} groups"
    names = ("MLP channels", "channels an expert", "channels of the shared expert")
    for size, name in zip(_mlp_sizes(config), names, strict=True):
        if size:
            yield f"{size} {name}"
