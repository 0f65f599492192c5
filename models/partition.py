"""Who holds what: the cutting rules of tensor parallelism, as numbers. Torch-free.

A `Partition` is a list of half-open ranges, one per rank, never "size / ranks": nine heads in
three groups over two ranks are cut 6 + 3. Ranges may overlap where an item is replicated (a KV
head shared by the ranks that hold its queries).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.models.config import ConfigError, ModelConfig

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


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the checkpoint, and the part of it that one rank reads.

    `dim` is the cut dimension (None: the whole tensor is read) and [start, stop) the rows or
    columns of this rank in it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(
            self.stop - self.start if axis == self.dim else size
            for axis, size in enumerate(self.shape)
        )

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.local_shape:
            count *= size
        return count


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


def _mlp_unit(size: int, ranks: int) -> int:
    """Largest power of two up to 64 that divides `size` and leaves every rank a unit."""
    unit = 64
    while unit > 1 and (size % unit or size // unit < ranks):
        unit //= 2
    return unit


@dataclass(frozen=True, slots=True)
class ModelPartition:
    """How one model lies on `ranks` ranks."""

    config: ModelConfig
    ranks: int
    heads: Partition
    kv_heads: Partition
    mlp: Partition
    vocab: Partition

    @classmethod
    def of(cls, config: ModelConfig, ranks: int) -> ModelPartition:
        """Cut `config` over `ranks`. Raises PartitionError naming the legal rank counts."""
        try:
            return cls._cut(config, ranks)
        except PartitionError:
            legal = ", ".join(map(str, legal_rank_counts(config)))
            raise PartitionError(
                f"tp={ranks}: {config.num_heads} query heads in {config.num_kv_heads} groups and "
                f"{config.intermediate_size} MLP channels do not leave every rank a part; "
                f"legal rank counts: {legal}"
            ) from None

    @classmethod
    def _cut(cls, config: ModelConfig, ranks: int) -> ModelPartition:
        if ranks < 1:
            raise PartitionError(f"{ranks} ranks")
        heads, kv_heads = cut_heads(config.num_heads, config.num_kv_heads, ranks)
        mlp = Partition.even(
            config.intermediate_size, ranks, _mlp_unit(config.intermediate_size, ranks)
        )
        unit = VOCAB_UNIT if config.vocab_size > VOCAB_UNIT * (ranks - 1) else 1
        return cls(
            config, ranks, heads, kv_heads, mlp, Partition.even(config.vocab_size, ranks, unit)
        )

    def weights(self, rank: int) -> Iterator[WeightSpec]:
        """Every tensor that `rank` reads, in the order of the layers."""
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        yield _cut_spec("model.embed_tokens.weight", table, 0, self.vocab, rank)
        for layer in range(config.num_layers):
            yield from self._layer_weights(f"model.layers.{layer}.", rank)
        yield WeightSpec("model.norm.weight", (config.hidden_size,))
        if not config.tie_word_embeddings:
            yield _cut_spec("lm_head.weight", table, 0, self.vocab, rank)

    def _layer_weights(self, prefix: str, rank: int) -> Iterator[WeightSpec]:
        config, hidden = self.config, self.config.hidden_size
        query = self.heads.scaled(config.head_dim)
        key = self.kv_heads.scaled(config.head_dim)
        yield WeightSpec(prefix + "input_layernorm.weight", (hidden,))
        attention = prefix + "self_attn."
        for name, cut in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            yield from _column(attention + name, hidden, cut, config.qkv_bias, rank)
        if config.qk_norm:
            yield WeightSpec(attention + "q_norm.weight", (config.head_dim,))
            yield WeightSpec(attention + "k_norm.weight", (config.head_dim,))
        yield from _row(attention + "o_proj", hidden, query, config.o_bias, rank)
        yield WeightSpec(prefix + "post_attention_layernorm.weight", (hidden,))
        for name in ("gate_proj", "up_proj"):
            yield from _column(prefix + "mlp." + name, hidden, self.mlp, config.mlp_bias, rank)
        yield from _row(prefix + "mlp.down_proj", hidden, self.mlp, config.mlp_bias, rank)


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


def _cut_spec(name: str, shape: tuple[int, ...], dim: int, cut: Partition, rank: int) -> WeightSpec:
    start, stop = cut.ranges[rank]
    return WeightSpec(name, shape, dim, start, stop)


def _column(name: str, hidden: int, cut: Partition, bias: bool, rank: int) -> Iterator[WeightSpec]:
    """Output rows are cut, the bias with them."""
    yield _cut_spec(name + ".weight", (cut.total, hidden), 0, cut, rank)
    if bias:
        yield _cut_spec(name + ".bias", (cut.total,), 0, cut, rank)


def _row(name: str, hidden: int, cut: Partition, bias: bool, rank: int) -> Iterator[WeightSpec]:
    """Input columns are cut; every rank reads the whole bias, added once after the all-reduce."""
    yield _cut_spec(name + ".weight", (hidden, cut.total), 1, cut, rank)
    if bias:
        yield WeightSpec(name + ".bias", (hidden,))
