"""What decoding reads at least, against sums by hand and token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.fakes import tiny_model
from unisono.launcher.model_source import resolve_model
from unisono.launcher.roofline import (
    H200_COPY,
    Items,
    answers_bytes,
    card_here,
    draft_bytes,
    floor_s,
    kv_bytes,
    prompt_bytes,
    prompt_flops,
    step_bytes,
    weight_bytes,
    weight_sizes,
)
from unisono.models.config_reader import read_model_config
from unisono.models.partition import ModelPartition
from unisono.models.shapes import SHAPES

BF16 = Items(2, 4)


def partition(name, ranks=1, **changes):
    return ModelPartition.of(replace(SHAPES[name], **changes), ranks)


def test_the_weights_of_a_step():
    """Qwen3-8B has a head of its own; of 0.6B the embedding is the head and is read whole."""
    assert weight_bytes(partition("qwen3-8b"), 0, 2) == pytest.approx(15.136e9, rel=1e-4)
    assert weight_bytes(partition("qwen3-0.6b"), 0, 2) == pytest.approx(1.192e9, rel=1e-3)


def test_keys_and_values_of_a_row():
    """36 layers of 8 heads of 128 channels, keys and values in bfloat16; windows cut layers."""
    whole = partition("qwen3-8b")
    assert kv_bytes(whole, 0, 2, 1000) == 36 * 2 * 8 * 128 * 2 * 1000
    cut = partition("qwen3-8b", sliding_windows=(0, 100) * 18)
    assert kv_bytes(cut, 0, 2, 1000) == 18 * 2 * 8 * 128 * 2 * 1100
    assert kv_bytes(partition("qwen3-8b", 2), 1, 2, 1000) == kv_bytes(whole, 0, 2, 1000) / 2


def test_a_step_of_many_rows_reads_the_weights_once():
    whole = partition("qwen3-8b")
    [one], [many] = (step_bytes(whole, BF16, rows, 500.5) for rows in (1, 32))
    assert many - one == 31 * kv_bytes(whole, 0, 2, 500.5)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_reads_and_writes_the_state_of_each_row(state_dtype, ranks):
    """Qwen3.5-27B: 48 delta nets of 48 states of 128 x 128, three inputs of 10,240 channels."""
    model, items = partition("qwen3.5-27b", ranks), Items.of("bfloat16", state_dtype)
    state = 48 * (48 * 128 * 128 * (4 if state_dtype == "float32" else 2) + 3 * 10240 * 2) // ranks
    few, many = (step_bytes(model, items, rows, 500) for rows in (1, 32))
    for rank in range(ranks):
        row = kv_bytes(model, rank, 2, 500) + 2 * state
        assert many[rank] - few[rank] == 31 * row
    lengths = [(5, 1), (3, 4)]
    wanted = [
        3 * (weight_bytes(model, rank, 2) + 2 * state)
        + sum(kv_bytes(model, rank, 2, keys) for keys in (4, 5, 6))
        for rank in range(ranks)
    ]
    assert answers_bytes(model, items, lengths) == pytest.approx(wanted)
    # Two more tokens a step: one step of three, whose rows read their states once.
    shared = [
        weight_bytes(model, rank, 2)
        + 2 * state
        + sum(kv_bytes(model, rank, 2, keys) for keys in (4, 5, 6)) / 3
        for rank in range(ranks)
    ]
    assert answers_bytes(model, items, lengths, num_drafts=2) == pytest.approx(shared)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_prompts_multiplies_every_weight_with_every_token(ranks):
    """Qwen3-8B by hand: 36 layers, and the head with the last token of each prompt alone."""
    model, hidden, width, heads, groups, dim = partition("qwen3-8b", ranks), 4096, 12288, 32, 8, 128
    layer = 2 * hidden * heads * dim + 2 * hidden * groups * dim + 3 * hidden * width
    pairs = 1000 * 1001 // 2
    attention = 2 * heads * dim * pairs
    head = model.config.vocab_size * hidden
    wanted = 2 * 4 * (36 * (1000 * layer + attention) + head)
    assert sum(prompt_flops(model, 4, 1000)) == wanted
    each = [
        weight_bytes(model, rank, 2) + 4000 * 36 * 2 * 8 * 128 * 2 / ranks for rank in range(ranks)
    ]
    assert prompt_bytes(model, BF16, 4, 1000) == each


def test_prompts_take_what_one_token_takes_of_experts_windows_and_states():
    """Of a mixture each token takes its experts; a window hides keys, which are written all the
    same; a state is written once."""
    mixture = partition("qwen3-30b-a3b")
    config = mixture.config
    assert config.experts is not None
    expert = 3 * config.hidden_size * config.experts.width
    fewer = replace(config.experts, num_experts_per_tok=config.experts.num_experts_per_tok - 1)
    less = ModelPartition.of(replace(config, experts=fewer), 1)
    [more], [flops] = prompt_flops(mixture, 1, 100), prompt_flops(less, 1, 100)
    assert more - flops == 2 * 100 * config.num_layers * expert
    whole, cut = partition("qwen3-8b"), partition("qwen3-8b", sliding_windows=(0, 100) * 18)
    hidden = 18 * sum(max(token - 100, 0) for token in range(1, 301))
    [all_], [seen] = prompt_flops(whole, 2, 300), prompt_flops(cut, 2, 300)
    assert all_ - seen == 2 * 4 * 32 * 128 * hidden
    assert prompt_bytes(whole, BF16, 2, 300) == prompt_bytes(cut, BF16, 2, 300)
    hybrid = partition("qwen3.5-27b")
    [two], [one] = (prompt_bytes(hybrid, BF16, count, 64) for count in (2, 1))
    written = 64 * hybrid.num_kv_layers * hybrid.kv_elements(0) * 2
    assert two - one == hybrid.state_bytes(0, *BF16) + written


def test_a_draft_reads_a_layer_and_the_head_again():
    """Of tiny-mtp, whose embedding is the head: once more for each draft, with the keys."""
    model = read_model_config(resolve_model("tiny-mtp").path)
    whole = ModelPartition.of(model, 1)
    sizes = weight_sizes(ModelPartition.of(model, 1, drafts=True), 0, 2)
    layer = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    keys = 3 * 100 * 2 * 2 * 64 * 2
    assert layer > 0
    assert draft_bytes(whole, 0, 2, 3, 100) == layer + 2 * 2048 * 256 + keys
    [none], [two] = (step_bytes(whole, BF16, 3, 100, num_drafts=n) for n in (0, 2))
    assert two - none == 2 * draft_bytes(whole, 0, 2, 3, 100)
    # A head of its own is as large; of an embedding of its own it reads a few rows.
    own = replace(model, mtp_embedding=True, mtp_head=True)
    assert draft_bytes(ModelPartition.of(own, 1), 0, 2, 3, 100) == layer + 2 * 2048 * 256 + keys


def test_ranks_share_a_memory_or_have_their_own():
    assert floor_s([3e9, 1e9], 1e9, share=False) == 3.0
    assert floor_s([3e9, 1e9], 1e9, share=True) == 4.0


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=4)


@given(lengths, st.integers(1, 3), st.sampled_from([(), (0, 5), (3, 40)]))
def test_answers_read_what_their_steps_read(lengths, ranks, windows):
    """Step by step: a row is there until its answer ends, and its first token cost no step."""
    model = ModelPartition.of(tiny_model(sliding_windows=windows), ranks)
    wanted = [0.0] * ranks
    for step in range(1, max(answer for _, answer in lengths)):
        rows = [prompt + step for prompt, answer in lengths if step < answer]
        for rank in range(ranks):
            wanted[rank] += weight_bytes(model, rank, 4)
            wanted[rank] += sum(kv_bytes(model, rank, 4, keys) for keys in rows)
    assert answers_bytes(model, Items.of("float32", "float32"), lengths) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("names", "card"),
    [
        (["NVIDIA H200", "NVIDIA H200"], H200_COPY),
        (["NVIDIA H200", "NVIDIA L4"], None),
        (["NVIDIA L4"], None),
        ([], None),
    ],
)
def test_a_card_is_known_by_its_drivers_name(tmp_path, names, card):
    for number, name in enumerate(names):
        path = tmp_path / "proc/driver/nvidia/gpus" / f"0000:0{number}:00.0" / "information"
        path.parent.mkdir(parents=True)
        path.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 7\nBus Type: \t PCIe\n")
    assert card_here(tmp_path) == card
