"""Who holds what: every cut covers everything, gives each rank a part, and tiles each tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.models.config import ModelConfig, RopeConfig
from unisono.models.partition import (
    ModelPartition,
    Partition,
    PartitionError,
    cut_heads,
    legal_rank_counts,
)


def model(**fields: object) -> ModelConfig:
    values: dict[str, object] = {
        "family": "llama",
        "vocab_size": 199,
        "hidden_size": 24,
        "intermediate_size": 136,
        "num_layers": 2,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "rope": RopeConfig(rotary_dim=4),
    }
    return ModelConfig(**{**values, **fields})  # type: ignore[arg-type]


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 6))
    return model(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 7)),
        intermediate_size=draw(st.integers(1, 400)),
        vocab_size=draw(st.integers(1, 1100)),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


def assert_tiles(cut: Partition) -> None:
    """Ranges follow each other from 0 to the total, none of them empty."""
    assert [start for start, _ in cut.ranges] == [0, *(stop for _, stop in cut.ranges[:-1])]
    assert cut.ranges[-1][1] == cut.total
    assert all(start < stop for start, stop in cut.ranges)


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 130))
def test_even_cut_covers_everything_once(total: int, ranks: int, unit: int) -> None:
    if -(-total // unit) < ranks:
        with pytest.raises(PartitionError):
            Partition.even(total, ranks, unit)
        return
    cut = Partition.even(total, ranks, unit)
    assert_tiles(cut)
    assert all(start % unit == 0 for start, _ in cut.ranges)
    units = [-(-cut.size(rank) // unit) for rank in range(ranks)]
    assert max(units) - min(units) <= 1
    assert units == sorted(units, reverse=True)


def test_scaled_cut_is_the_same_cut_in_channels() -> None:
    assert Partition.even(9, 2, 3).scaled(64).ranges == ((0, 384), (384, 576))


def test_nine_heads_in_three_groups_over_two_ranks() -> None:
    heads, kv_heads = cut_heads(9, 3, 2)
    assert heads.ranges == ((0, 6), (6, 9))
    assert kv_heads.ranges == ((0, 2), (2, 3))


def test_two_kv_heads_over_four_ranks_are_replicated() -> None:
    """B20; models with 2 KV heads run on 3 and 4 ranks in tests/test_speculation.py."""
    heads, kv_heads = cut_heads(8, 2, 4)
    assert heads.ranges == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert kv_heads.ranges == ((0, 1), (0, 1), (1, 2), (1, 2))


def test_two_kv_heads_over_three_ranks() -> None:
    heads, kv_heads = cut_heads(14, 2, 3)
    assert heads.ranges == ((0, 4), (4, 7), (7, 14))
    assert kv_heads.ranges == ((0, 1), (0, 1), (1, 2))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 90))
def test_queries_lie_with_the_kv_head_they_use(kv: int, group: int, ranks: int) -> None:
    if ranks > kv and any(len(range(head, ranks, kv)) > group for head in range(kv)):
        with pytest.raises(PartitionError):
            cut_heads(kv * group, kv, ranks)
        return
    heads, kv_heads = cut_heads(kv * group, kv, ranks)
    assert_tiles(heads)
    assert heads.total == kv * group
    assert kv_heads.total == kv
    for (first, last), (first_kv, last_kv) in zip(heads.ranges, kv_heads.ranges, strict=True):
        assert {head // group for head in range(first, last)} == {*range(first_kv, last_kv)}
        # Attention maps local query i to local kv head i // (queries / kv heads).
        assert (last - first) % (last_kv - first_kv) == 0


@given(models(), st.integers(1, 45))
def test_legal_rank_counts_are_those_that_can_be_cut(config: ModelConfig, ranks: int) -> None:
    legal = legal_rank_counts(config)
    if ranks in legal:
        assert ModelPartition.of(config, ranks).ranks == ranks
        return
    with pytest.raises(PartitionError) as caught:
        ModelPartition.of(config, ranks)
    message = str(caught.value)
    assert f"tp={ranks}:" in message
    assert "\n" not in message
    assert message.endswith("legal rank counts: " + ", ".join(map(str, legal)))


@given(models(), st.data())
def test_weights_of_all_ranks_tile_each_tensor(config: ModelConfig, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(legal_rank_counts(config)))
    partition = ModelPartition.of(config, ranks)
    columns = [list(partition.weights(rank)) for rank in range(ranks)]
    names = [spec.name for spec in columns[0]]
    assert len(set(names)) == len(names)
    for same in zip(*columns, strict=True):
        assert len({(spec.name, spec.shape, spec.dim) for spec in same}) == 1
        spec = same[0]
        if spec.dim is None:
            assert all(part.local_shape == spec.shape for part in same)
            continue
        ranges = [(part.start, part.stop) for part in same]
        if "k_proj" in spec.name or "v_proj" in spec.name:
            ranges = list(dict.fromkeys(ranges))
        assert_tiles(Partition(spec.shape[spec.dim], tuple(ranges)))
        for part in same:
            size = part.stop - part.start
            shape = [*spec.shape]
            shape[spec.dim] = size
            assert part.local_shape == tuple(shape)
            assert part.num_elements == size * (1 if len(shape) == 1 else spec.shape[1 - spec.dim])


def test_output_rows_and_input_columns_of_a_rank_are_the_same_channels() -> None:
    for spec_rank in range(2):
        specs = {s.name: s for s in ModelPartition.of(model(), 2).weights(spec_rank)}
        for column, row in (
            ("self_attn.q_proj", "self_attn.o_proj"),
            ("mlp.gate_proj", "mlp.down_proj"),
            ("mlp.up_proj", "mlp.down_proj"),
        ):
            out = specs[f"model.layers.1.{column}.weight"]
            into = specs[f"model.layers.1.{row}.weight"]
            assert (out.dim, into.dim) == (0, 1)
            assert (out.start, out.stop) == (into.start, into.stop)


def test_row_bias_is_whole_on_every_rank() -> None:
    partition = ModelPartition.of(model(o_bias=True, mlp_bias=True), 3)
    for rank in range(3):
        specs = {spec.name: spec for spec in partition.weights(rank)}
        for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
            assert specs[f"model.layers.0.{name}"].local_shape == (24,)


def test_mlp_is_cut_in_the_largest_unit_that_reaches_every_rank() -> None:
    assert ModelPartition.of(model(intermediate_size=1536), 2).mlp.ranges == (
        (0, 768),
        (768, 1536),
    )
    assert ModelPartition.of(model(intermediate_size=192), 2).mlp.ranges == ((0, 128), (128, 192))
    assert ModelPartition.of(model(intermediate_size=136), 3).mlp.ranges == (
        (0, 48),
        (48, 96),
        (96, 136),
    )


def test_vocabulary_is_cut_in_multiples_of_64() -> None:
    assert ModelPartition.of(model(vocab_size=1003), 3).vocab.ranges == (
        (0, 384),
        (384, 704),
        (704, 1003),
    )


def test_illegal_rank_counts_name_the_legal_ones() -> None:
    with pytest.raises(PartitionError, match=r"9 query heads in 3 groups.*legal rank counts: 1, 2"):
        ModelPartition.of(model(), 10)
    with pytest.raises(PartitionError, match=r"tp=0: .*legal rank counts: 1, 2"):
        ModelPartition.of(model(), 0)
