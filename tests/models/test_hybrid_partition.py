"""Delta nets and experts: every row of every tensor on exactly the ranks that need it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.models.config import DeltaConfig, ExpertsConfig, ModelConfig, RopeConfig
from unisono.models.partition import ModelPartition, PartitionError, cut_heads, legal_rank_counts
from unisono.models.shapes import SHAPES
from unisono.models.weight_specs import WeightSpec

Label = tuple[str, int]
"""What a row is of, and of which head or channel."""


def hybrid(**fields: object) -> ModelConfig:
    values: dict[str, object] = {
        "family": "qwen3_next",
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
        "qk_norm": True,
        "zero_centred_norms": True,
        "attn_output_gate": True,
        "delta": delta(2, 3),
        "delta_layers": (True, False),
        "experts": ExpertsConfig(num_experts=3, num_experts_per_tok=2, width=24, shared_width=20),
    }
    return ModelConfig(**{**values, **fields})  # type: ignore[arg-type]


def delta(key_heads: int, ratio: int, is_grouped: bool = True) -> DeltaConfig:
    return DeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=key_heads * ratio,
        key_head_dim=3,
        value_head_dim=5,
        conv_width=4,
        is_grouped=is_grouped,
    )


@st.composite
def hybrids(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 5))
    return hybrid(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 6)),
        delta=delta(draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.booleans())),
        experts=ExpertsConfig(
            num_experts=draw(st.integers(1, 3)),
            num_experts_per_tok=1,
            width=draw(st.integers(1, 200)),
            shared_width=draw(st.integers(0, 90)),
            dense_layers=draw(st.sampled_from([(), (0,), (1,)])),
        ),
        attn_output_gate=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        num_mtp_layers=draw(st.integers(0, 2)),
        mtp_embedding=draw(st.booleans()),
        mtp_head=draw(st.booleans()),
    )


def labels(config: ModelConfig, name: str) -> list[Label] | None:
    """Each row (of out_proj, o_proj and down_proj: column) of tensor `name`; None: all whole."""
    net = config.delta
    assert net is not None
    keys, values = range(net.num_key_heads), range(net.num_value_heads)
    ratio, wide, deep = len(values) // len(keys), net.value_head_dim, net.key_head_dim
    queries = [("key", head) for head in keys for _ in range(deep)]
    mixed = queries + queries + [("value", head) for head in values for _ in range(wide)]
    value_rows = [("value", head) for head in values for _ in range(wide)]
    per_head = [("value", head) for head in values]
    grouped: list[Label] = []
    pairs: list[Label] = []
    for head in keys:
        inside = range(head * ratio, (head + 1) * ratio)
        grouped += [("key", head)] * (2 * deep)
        grouped += 2 * [("value", each) for each in inside for _ in range(wide)]
        pairs += 2 * [("value", each) for each in inside]
    tables = {
        "in_proj_qkvz": grouped,
        "in_proj_ba": pairs,
        "in_proj_qkv": mixed,
        "in_proj_z": value_rows,
        "in_proj_b": per_head,
        "in_proj_a": per_head,
        "conv1d": mixed,
        "A_log": per_head,
        "dt_bias": per_head,
        "linear_attn.out_proj": value_rows,
    }
    for part, table in tables.items():
        if f"{part}." in name or name.endswith(part):
            return table
    gate = 2 if config.attn_output_gate else 1
    heads = range(config.num_heads)
    if "q_proj" in name:
        return [("head", head) for head in heads for _ in range(gate * config.head_dim)]
    if "o_proj.weight" in name:
        return [("head", head) for head in heads for _ in range(config.head_dim)]
    if "k_proj" in name or "v_proj" in name:
        kv_heads = range(config.num_kv_heads)
        return [("kv", head) for head in kv_heads for _ in range(config.head_dim)]
    assert config.experts is not None
    if "gate_proj" in name or "up_proj" in name or "down_proj" in name:
        if ".shared_expert." in name:
            return [("shared", channel) for channel in range(config.experts.shared_width)]
        if ".experts." in name:
            return [("expert", channel) for channel in range(config.experts.width)]
        return [("mlp", channel) for channel in range(config.intermediate_size)]
    if "embed_tokens" in name or "lm_head" in name:
        return [("token", row) for row in range(config.vocab_size)]
    return None


def held(partition: ModelPartition, rank: int) -> set[Label]:
    """What the rank is to hold of everything that is cut."""
    cuts = {
        "key": partition.key_heads,
        "value": partition.value_heads,
        "head": partition.heads,
        "kv": partition.kv_heads,
        "shared": partition.shared_expert,
        "expert": partition.experts,
        "mlp": partition.mlp,
        "token": partition.vocab,
    }
    return {(kind, i) for kind, cut in cuts.items() for i in range(*cut.ranges[rank])}


def rows_of(spec: WeightSpec) -> list[int]:
    return [row for start, stop in spec.ranges for row in range(start, stop)]


@given(hybrids(), st.data())
def test_every_row_is_on_exactly_the_ranks_that_hold_its_head_or_channel(
    config: ModelConfig, data: st.DataObject
) -> None:
    ranks = data.draw(st.sampled_from([n for n in legal_rank_counts(config) if n <= 8]))
    partition = ModelPartition.of(config, ranks, drafts=data.draw(st.booleans()))
    for rank in range(ranks):
        mine = held(partition, rank)
        for spec in partition.weights(rank):
            table = labels(config, spec.name)
            if table is None:
                assert spec.dim is None, spec.name
                continue
            is_row_parallel = spec.name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj.weight")
            )
            assert spec.dim == (1 if is_row_parallel else 0)
            assert spec.shape[spec.dim] == len(table)
            want = [row for row, label in enumerate(table) if label in mine]
            assert rows_of(spec) == want, spec.name
            assert spec.local_shape[spec.dim] == len(want)


@given(hybrids(), st.data())
def test_ranks_together_hold_everything(config: ModelConfig, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([n for n in legal_rank_counts(config) if n <= 8]))
    partition = ModelPartition.of(config, ranks, drafts=data.draw(st.booleans()))
    columns = [list(partition.weights(rank)) for rank in range(ranks)]
    names = [spec.name for spec in columns[0]]
    assert len({*names}) == len(names)
    for same in zip(*columns, strict=True):
        assert len({(spec.name, spec.shape, spec.dim) for spec in same}) == 1
        spec = same[0]
        if spec.dim is None:
            continue
        rows = [row for part in same for row in rows_of(part)]
        assert {*rows} == {*range(spec.shape[spec.dim])}
        is_shared = re.search(r"\.(k_proj|v_proj|in_proj_qkv|in_proj_qkvz|conv1d)\.", spec.name)
        assert is_shared or len(rows) == len({*rows})


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_delta_nets_are_cut_as_attention_is(keys: int, ratio: int, ranks: int) -> None:
    config = hybrid(num_heads=36, num_kv_heads=6, delta=delta(keys, ratio))
    try:
        values, key_heads = cut_heads(keys * ratio, keys, ranks)
    except PartitionError:
        with pytest.raises(PartitionError, match=f"{keys * ratio} value heads in {keys} groups"):
            ModelPartition.of(config, ranks)
        return
    partition = ModelPartition.of(config, ranks)
    assert (partition.value_heads, partition.key_heads) == (values, key_heads)
    for rank in range(ranks):
        # Local value head v reads local key head v // (value heads / key heads).
        assert values.size(rank) % key_heads.size(rank) == 0


def test_whole_groups_are_read_in_one_piece() -> None:
    for ranks in (1, 2):
        for spec in ModelPartition.of(hybrid(), ranks).weights(0):
            if "in_proj" in spec.name:
                assert spec.more == ()
    shares = ModelPartition.of(hybrid(delta=delta(2, 3, is_grouped=False)), 1).weights(0)
    assert all(spec.more == () for spec in shares)


def test_a_replicated_key_head_and_some_of_its_value_heads() -> None:
    """Two key heads of three value heads each on four ranks: 2 + 1 and 2 + 1."""
    partition = ModelPartition.of(hybrid(), 4)
    assert partition.key_heads.ranges == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert partition.value_heads.ranges == ((0, 2), (2, 3), (3, 5), (5, 6))
    specs = {spec.name: spec for spec in partition.weights(1)}
    name = "model.layers.0.linear_attn."
    # A group: 6 rows of query and key, 15 of values, 15 of z; 3 of b, 3 of a.
    assert specs[name + "in_proj_qkvz.weight"].ranges == ((0, 6), (16, 21), (31, 36))
    assert specs[name + "in_proj_ba.weight"].ranges == ((2, 3), (5, 6))
    assert specs[name + "conv1d.weight"].ranges == ((0, 3), (6, 9), (22, 27))
    assert specs[name + "conv1d.weight"].local_shape == (11, 1, 4)
    num_nets = sum(hybrid().delta_layers)
    assert partition.state_bytes(1, 2, 4) == num_nets * (2 * 11 * 3 + 4 * 15)
    assert partition.pending_shapes(1, 2) == ((3, 11), (3, 1, 3), (3, 1, 5), (3, 1))
    assert partition.pending_shapes(0, 8)[1:] == ((9, 1, 3), (9, 2, 5), (9, 2))
    with_drafts = 2 * (11 * 3 + 33) + 2 * 15 + 4 * (9 + 15 + 3)
    assert partition.state_bytes(1, 2, 2, 2) == num_nets * with_drafts
    assert partition.pending_shapes(1, 0) == ()


def test_names_of_the_two_layouts() -> None:
    def names(is_grouped: bool) -> set[str]:
        config = hybrid(delta=delta(2, 3, is_grouped))
        prefix = "model.layers.0.linear_attn."
        found = (spec.name for spec in ModelPartition.of(config, 1).weights(0))
        return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}

    both = {"conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"}
    assert names(True) == both | {"in_proj_qkvz.weight", "in_proj_ba.weight"}
    assert names(False) == both | {f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}


def test_what_keeps_fp32_and_which_norms_are_zero_centred() -> None:
    """B51: the gated norm of a delta net is not."""
    specs = list(ModelPartition.of(hybrid(), 2).weights(1))
    wide = {spec.name.rsplit("layers.0.")[-1] for spec in specs if spec.keeps_fp32}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    net = {f"linear_attn.{name}" for name in ("A_log", "dt_bias", "norm.weight")}
    other = {f"model.layers.1.{name}" for name in norms}
    other |= {f"model.layers.1.self_attn.{name}_norm.weight" for name in "qk"}
    assert wide == norms | net | other | {"model.norm.weight"}
    centred = {spec.name for spec in specs if spec.zero_centred}
    assert centred == {
        *(spec.name for spec in specs if spec.keeps_fp32 and "linear_attn" not in spec.name)
    }
    plain = ModelPartition.of(hybrid(zero_centred_norms=False), 1).weights(0)
    assert {spec.name for spec in plain if spec.keeps_fp32 or spec.zero_centred} == {
        f"model.layers.0.{name}" for name in net
    }


def mtp_names(config: ModelConfig) -> set[str]:
    """Those that the MTP layer adds, without their "mtp."."""
    plain = [spec.name for spec in ModelPartition.of(config, 2).weights(1)]
    assert not any(name.startswith("mtp.") for name in plain)
    partition = ModelPartition.of(config, 2, drafts=True)
    with_mtp = [spec.name for spec in partition.weights(1)]
    assert with_mtp[: len(plain)] == plain
    assert partition.num_kv_layers == config.num_kv_layers + (len(with_mtp) > len(plain))
    return {name.removeprefix("mtp.") for name in with_mtp[len(plain) :]}


def test_the_mtp_layer_is_attention_with_the_mlp_of_layer_0() -> None:
    ends = {f"{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    attention |= {f"self_attn.{part}_norm.weight" for part in "qk"}
    dense = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    experts = {f"mlp.experts.{i}.{name.removeprefix('mlp.')}" for i in range(3) for name in dense}
    experts |= {f"mlp.shared_expert.{name.removeprefix('mlp.')}" for name in dense}
    experts |= {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}

    def names(mlp: set[str]) -> set[str]:
        layer = {f"layers.0.{name}" for name in norms | attention | mlp}
        return ends | layer | {"norm.weight"}

    # Layer 0 is a delta net here; and of several MTP layers only the first is read.
    for count in (1, 2):
        assert mtp_names(hybrid(num_mtp_layers=count)) == names(experts)
        assert mtp_names(hybrid(num_mtp_layers=count, experts=None)) == names(dense)
    mixed = ExpertsConfig(num_experts=3, num_experts_per_tok=2, width=24, dense_layers=(0,))
    assert mtp_names(hybrid(num_mtp_layers=1, experts=mixed)) == names(dense)
    assert mtp_names(hybrid()) == set()
    own = hybrid(num_mtp_layers=1, experts=None, mtp_embedding=True, mtp_head=True)
    assert mtp_names(own) == names(dense) | {"embed_tokens.weight", "lm_head.weight"}


def test_the_projection_of_pairs_and_its_norms_are_whole_on_every_rank() -> None:
    partition = ModelPartition.of(hybrid(num_mtp_layers=1), 3, drafts=True)
    for rank in range(3):
        specs = {spec.name: spec for spec in partition.weights(rank)}
        assert specs["mtp.fc.weight"] == WeightSpec("mtp.fc.weight", (24, 48))
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            spec = specs[f"mtp.{name}.weight"]
            assert (spec.local_shape, spec.keeps_fp32, spec.zero_centred) == ((24,), True, True)
        rows = specs["mtp.layers.0.self_attn.q_proj.weight"]
        assert rows.ranges == specs["model.layers.1.self_attn.q_proj.weight"].ranges


def test_bytes_in_memory() -> None:
    spec = WeightSpec("a", (6, 4), 0, 0, 2, ((3, 4),))
    assert (spec.num_elements, spec.nbytes(2), spec.nbytes(4)) == (12, 24, 48)
    wide = WeightSpec("a", (6,), 0, 0, 2, keeps_fp32=True)
    assert (wide.nbytes(2), wide.nbytes(4)) == (8, 8)


def test_pieces_say_where_they_lie() -> None:
    spec = WeightSpec("a", (9, 4), 0, 1, 3, ((5, 6), (7, 9)))
    pieces = [(piece.start, piece.stop, piece.more, place) for piece, place in spec.pieces()]
    assert pieces == [
        (1, 3, (), (slice(0, 2),)),
        (5, 6, (), (slice(2, 3),)),
        (7, 9, (), (slice(3, 5),)),
    ]
    whole = WeightSpec("a", (9, 4))
    assert list(whole.pieces()) == [(whole, ())]
    columns = WeightSpec("a", (9, 4), 1, 1, 3)
    assert list(columns.pieces()) == [(columns, (slice(None), slice(0, 2)))]


def test_experts_are_cut_by_channel_and_what_chooses_them_is_whole() -> None:
    partition = ModelPartition.of(hybrid(), 3)
    assert partition.experts.ranges == ((0, 8), (8, 16), (16, 24))
    assert partition.shared_expert.ranges == ((0, 8), (8, 16), (16, 20))
    specs = {spec.name: spec for spec in partition.weights(1)}
    name = "model.layers.1.mlp."
    assert specs[name + "gate.weight"].local_shape == (3, 24)
    assert specs[name + "shared_expert_gate.weight"].local_shape == (1, 24)
    for expert in range(3):
        for part in ("gate_proj", "up_proj"):
            assert specs[f"{name}experts.{expert}.{part}.weight"].local_shape == (8, 24)
        assert specs[f"{name}experts.{expert}.down_proj.weight"].local_shape == (24, 8)


def test_an_mlp_that_no_layer_has_limits_nothing() -> None:
    none = hybrid(intermediate_size=2)
    assert ModelPartition.of(none, 3).mlp.ranges == ((0, 0),) * 3
    experts = ExpertsConfig(num_experts=3, num_experts_per_tok=2, width=24, dense_layers=(0,))
    some = hybrid(intermediate_size=2, experts=experts)
    with pytest.raises(PartitionError, match=r"legal rank counts: 1, 2$"):
        ModelPartition.of(some, 3)
    # Experts that every layer goes without limit nothing either.
    dense = ExpertsConfig(num_experts=3, num_experts_per_tok=2, width=1, dense_layers=(0, 1))
    assert ModelPartition.of(hybrid(experts=dense), 3).experts.total == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "9 query heads in 3 groups, 6 value heads in 2 groups, 24 channels an expert and 20 "),
        ({"delta": None, "delta_layers": ()}, "9 query heads in 3 groups, 24 channels an expert"),
        ({"experts": None}, "6 value heads in 2 groups and 136 MLP channels do not leave"),
        ({"delta": delta(1, 2)}, "legal rank counts: 1, 2$"),
    ],
    ids=str,
)
def test_the_message_names_every_part(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PartitionError, match=words) as caught:
        ModelPartition.of(hybrid(**fields), 30)
    assert str(caught.value).startswith("tp=30: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name, config in SHAPES.items() if config.is_hybrid or config.experts]
)
def test_published_hybrids_run_on_one_to_sixteen_ranks(name: str) -> None:
    assert {*range(1, 17)} <= {*legal_rank_counts(SHAPES[name])}
