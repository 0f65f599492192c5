"""The matrix of `unisono verify`: its settings, its options, what an engine is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.launcher.fakes import tiny_model
from unisono.launcher.verify.options import read_choices, with_defaults
from unisono.launcher.verify.plan import (
    COMPANY,
    Reach,
    Setting,
    Sizes,
    by_engine,
    engine_options,
    interruptions,
    limits,
    matrix,
    what_was_missed,
)
from unisono.launcher.verify.prompts import LENGTHS, id_prompts, prompt_lengths, text_prompts
from unisono.launcher.verify.run import NOBODY, order_of, summed_place
from unisono.models.config import ConfigError
from unisono.runtime.protocol import Reload, Sleep, Wake
from unisono.workers.config import WorkerConfig

PLAIN = Setting(tp=1, dtype="float32")
SIZES = Sizes(longest=100, most_requests=8)
GIVEN: dict[str, Any] = {
    "tp": "1",
    "dtype": "auto",
    "batch": "1,8",
    "chunk": "none,64",
    "prefix_cache": "on,off",
    "pre_empt": "off",
    "graphs": None,
    "speculate": None,
    "sleep": None,
    "reload": None,
    "against": None,
    "seeded": False,
    "full": False,
    "num_prompts": None,
    "max_tokens": 16,
    "tokens": None,
}
VALUES = {
    "batch": (1, 8),
    "chunk": (0, 64, 256),
    "prefix_cache": (False, True),
    "pre_empt": (False, True),
    "graphs": (False,),
    "speculate": ("off",),
    "sleep": (False,),
    "reload": (False,),
}
NOTHING = Reach(
    longest_prompt=0, num_cached_tokens=0, num_preemptions=0, num_replays=0, num_drafted=0
)


def test_every_value_stands_alone_once_and_together() -> None:
    settings = matrix((2, 1), ("float32",), VALUES, seeded=True, full=False)
    assert [each.label for each in settings if each.tp == 1] == [
        "plain",
        "batch 8",
        f"batch {COMPANY}, chunk 64",
        f"batch {COMPANY}, chunk 256",
        f"batch {COMPANY}, prefix cache",
        f"batch {COMPANY}, pre-empt",
        "batch 8, chunk 256, pre-empt",
        "batch 8, chunk 256, prefix cache",
        "seeded",
        "batch 8, chunk 256, prefix cache, seeded",
    ]
    assert [each.tp for each in settings] == sorted(each.tp for each in settings)
    assert {replace(each, tp=1) for each in settings if each.tp == 2} == {
        each for each in settings if each.tp == 1
    }


def test_full_is_the_product_and_plain_comes_first() -> None:
    settings = matrix((1,), ("float32", "bfloat16"), VALUES, seeded=False, full=True)
    # With pre-emption nobody is alone.
    assert len(settings) == len(set(settings)) == 2 * ((2 + 1) * 3 * 2)
    for number, setting in enumerate(settings):
        assert settings.index(setting.plain) <= number


def test_one_engine_serves_all_that_a_scheduler_can_be_told() -> None:
    values = {**VALUES, "graphs": (False, True)}
    settings = matrix((1, 2), ("float32", "bfloat16"), values, seeded=True, full=False)
    groups = by_engine(settings, SIZES)
    assert [options["no_graphs"] for options, _ in groups] == [True, False] * 4
    assert sorted({(options["tp"], options["dtype"]) for options, _ in groups}) == [
        (tp, dtype) for tp in (1, 2) for dtype in ("bfloat16", "float32")
    ]
    assert [setting for _, members in groups[:2] for setting in members if setting.graphs] == (
        groups[1][1]
    )
    assert sum(len(members) for _, members in groups) == len(settings)


def test_an_engine_can_hold_what_its_settings_ask_for() -> None:
    options = engine_options(PLAIN, SIZES)
    whole = limits(PLAIN, SIZES)
    assert (whole.max_step_tokens, whole.num_blocks, whole.prefix_cache) == (800, 16, False)
    small = limits(replace(PLAIN, chunk=64, pre_empt=True, prefix_cache=True), SIZES)
    assert (small.max_step_tokens, small.num_blocks, small.prefix_cache) == (64, 2, True)
    assert options["max_step_tokens"] >= whole.max_step_tokens
    assert options["kv_tokens"] == 64 * whole.num_blocks
    assert (options["max_requests"], options["max_model_len"]) == (8, 101)


@pytest.mark.parametrize(
    ("change", "reach", "missed"),
    [
        ({}, {}, ""),
        ({"batch": 8}, {}, ""),
        ({"chunk": 64}, {"longest_prompt": 64}, "no prompt is longer than a chunk"),
        ({"chunk": 64}, {"longest_prompt": 65}, ""),
        ({"prefix_cache": True}, {}, "no prefix was found"),
        ({"prefix_cache": True}, {"num_cached_tokens": 64}, ""),
        ({"pre_empt": True}, {}, "nobody was pre-empted"),
        ({"pre_empt": True}, {"num_preemptions": 1}, ""),
        ({"graphs": True}, {}, "no graph was replayed"),
        ({"graphs": True}, {"num_replays": 1}, ""),
        ({"speculate": "3"}, {}, "no draft was checked"),
        ({"speculate": "3"}, {"num_drafted": 1}, ""),
        ({"speculate": "3", "pre_empt": True}, {"num_preemptions": 1}, ""),
        ({"speculate": "3", "graphs": True}, {"num_drafted": 1}, "no graph was replayed"),
        ({"speculate": "3", "graphs": True}, {"num_drafted": 1, "num_replays": 1}, ""),
        ({"sleep": True}, {}, "nobody was answered when the engine slept"),
        ({"sleep": True}, {"interrupted": frozenset({"sleep"})}, ""),
        ({"reload": True}, {}, "nobody was answered when weights were loaded"),
        ({"reload": True}, {"interrupted": frozenset({"reload"})}, ""),
    ],
)
def test_what_was_not_reached_is_said(
    change: dict[str, Any], reach: dict[str, int], missed: str
) -> None:
    found = what_was_missed(replace(PLAIN, **change), replace(NOTHING, **reach))
    assert ", ".join(found.values()) == missed


def test_each_axis_has_a_first_word_before_one_has_its_second() -> None:
    again = Reload(path="m", load_format="auto")
    both = replace(PLAIN, sleep=True, reload=True)
    assert interruptions(both, again) == [
        ("sleep", (Sleep(level=2), Wake())),
        ("reload", (again,)),
        ("sleep", (Sleep(level=1), Wake())),
    ]
    assert interruptions(PLAIN, again) == []
    [sleep, reload] = [
        each
        for each in matrix(
            (1,),
            ("float32",),
            {**VALUES, "sleep": (False, True), "reload": (False, True)},
            seeded=False,
            full=False,
        )
        if each.label in (f"batch {COMPANY}, sleep", f"batch {COMPANY}, reload")
    ]
    assert (sleep.sleep, reload.reload) == (True, True)


@pytest.mark.parametrize(
    ("asked", "max_tokens", "values"),
    [
        (None, 16, (False, True)),
        (None, 15, (False,)),
        ("off", 16, (False,)),
        ("on", 16, (False, True)),
    ],
)
def test_interruptions_are_tried_where_there_is_time(
    asked: str | None, max_tokens: int, values: tuple[bool, ...]
) -> None:
    given = {**GIVEN, "sleep": asked, "reload": asked, "max_tokens": max_tokens}
    choices = with_defaults(read_choices(given), worker())
    assert (choices.values["sleep"], choices.values["reload"]) == (values, values)


def test_requests_fill_batches_and_waves_come_again_to_caches_and_graphs() -> None:
    assert order_of(PLAIN, 3) == [0, 1, 2]
    assert order_of(replace(PLAIN, batch=4), 3) == [0, 1, 2, 0]
    assert order_of(replace(PLAIN, prefix_cache=True), 2) == [0, 0, 1, 1]
    pair = replace(PLAIN, prefix_cache=True, batch=2, graphs=True)
    assert order_of(pair, 3) == [0, 1] * 3 + [2, 0] * 3


def test_of_graphs_the_last_wave_is_compared_by_tokens_alone() -> None:
    graphs = replace(PLAIN, graphs=True)
    assert [summed_place(graphs, wave) for wave in range(4)] == [None, NOBODY, None, NOBODY]
    both = replace(graphs, prefix_cache=True)
    assert [summed_place(both, wave) for wave in range(4)] == [None, None, NOBODY, None]
    assert summed_place(replace(PLAIN, prefix_cache=True), 1) is None


def test_prompts_have_many_lengths_and_common_beginnings() -> None:
    lengths = prompt_lengths(len(LENGTHS), 0, 150)
    assert lengths == [min(length, 150) for length in LENGTHS]
    prompts = id_prompts(lengths, 199)
    assert [len(prompt) for prompt in prompts] == lengths
    assert all(0 <= token < 199 for prompt in prompts for token in prompt)
    assert prompts == id_prompts(lengths, 199)
    assert prompts[1][:64] == prompts[7][:64]
    assert prompts[1][64:70] != prompts[7][64:70]
    texts = text_prompts(LENGTHS[:8], lambda text: [ord(letter) for letter in text])
    assert [len(text) for text in texts] == list(LENGTHS[:8])
    assert texts[2] == texts[5][:63]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("chunk", [0, 64, 100, 256, 4096])
def test_a_prompt_is_longer_than_the_largest_chunk_however_few_there_are(
    count: int, chunk: int
) -> None:
    for longest in (chunk + 1, chunk + 500):
        lengths = prompt_lengths(count, chunk, longest)
        assert len(lengths) == count
        assert chunk < max(lengths) <= longest


@pytest.mark.parametrize(
    ("asked", "limit", "values"),
    [
        (None, 128, (0, 64)),
        (None, 82, (0, 64)),
        (None, 81, (0,)),
        (None, 274, (0, 64, 256)),
        (None, 273, (0, 64)),
        ("none", 20, (0,)),
        ("none,110", 128, (0, 110)),
    ],
)
def test_chunks_are_tried_where_prompts_are_longer(
    asked: str | None, limit: int, values: tuple[int, ...]
) -> None:
    choices = read_choices({**GIVEN, "chunk": asked})
    fit = worker(max_model_len=limit)
    assert with_defaults(choices, fit).values["chunk"] == values


def test_one_prompt_alone_is_not_pre_empted() -> None:
    for asked, count, values in (
        (None, 1, (False,)),
        (None, 2, (False, True)),
        ("off", 2, (False,)),
        ("on,off", 2, (False, True)),
    ):
        choices = read_choices({**GIVEN, "pre_empt": asked, "num_prompts": count})
        assert with_defaults(choices, worker()).values["pre_empt"] == values
    choices = read_choices({**GIVEN, "pre_empt": "on", "num_prompts": 1})
    with pytest.raises(ConfigError, match=r"^--pre-empt on: .*; choose off, or more --prompts$"):
        with_defaults(choices, worker())


def test_a_chunk_that_no_prompt_exceeds_is_refused() -> None:
    choices = read_choices({**GIVEN, "chunk": "none,64,111"})
    said = (
        "^--chunk 111: no prompt is longer, since with --max-tokens 16 the model's limit leaves "
        "111 tokens; choose none or less than 111$"
    )
    with pytest.raises(ConfigError, match=said):
        with_defaults(choices, worker())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": "0"}, "--batch 0: expected a whole number of 1 to 65536"),
        ({"batch": "1,x"}, "--batch x: expected a whole number of 1 to 65536"),
        ({"batch": "65537"}, "--batch 65537: expected a whole number of 1 to 65536"),
        ({"batch": "9" * 4301}, "--batch 9999"),
        ({"chunk": "²"}, "--chunk ²: expected none or a whole number from 64 up"),
        ({"chunk": "63"}, "--chunk 63: expected none or a whole number from 64 up"),
        ({"prefix_cache": "yes"}, "--prefix-cache yes: choose on, off or on,off"),
        ({"pre_empt": ""}, "--pre-empt : choose on, off or on,off"),
        ({"graphs": "auto"}, "--graphs auto: choose on, off or on,off"),
        ({"sleep": "2"}, "--sleep 2: choose on, off or on,off"),
        ({"reload": "yes"}, "--reload yes: choose on, off or on,off"),
        ({"speculate": "off,9"}, "--speculate 9: choose off, auto, 1, 2"),
        ({"against": "vllm"}, "--against vllm: choose transformers"),
        ({"max_tokens": 0}, "--max-tokens 0: must be at least 1"),
        ({"num_prompts": 0}, "--prompts 0: must be at least 1"),
        ({"num_prompts": 65537}, "--prompts 65537: must be at most 65536"),
        ({"tokens": 0}, "--tokens 0: must be at least 1"),
        ({"tokens": 10**12}, "--tokens 1000000000000: must be at most "),
        ({"tokens": 9, "num_prompts": 2}, "--tokens 9: --prompts 2 sets the number of prompts"),
        ({"tp": "0"}, "--tp 0: must be at least 1"),
        ({"dtype": "int8"}, "--dtype int8: choose auto, float32, bfloat16 or float16"),
    ],
)
def test_bad_options_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_choices({**GIVEN, **change})
    assert str(caught.value).startswith(message)


def test_options_become_values_with_the_plain_one_among_them() -> None:
    choices = read_choices({**GIVEN, "batch": "4", "chunk": "64", "tokens": 33, "tp": "2,1,2"})
    assert choices.values == {
        "batch": (1, 4),
        "chunk": (0, 64),
        "prefix_cache": (False, True),
        "pre_empt": (False,),
        "graphs": (False,),
        "speculate": ("off",),
        "sleep": (False,),
        "reload": (False,),
    }
    assert (choices.tps, choices.num_prompts) == ((2, 1), 3)


@pytest.mark.parametrize(
    ("asked", "device", "attn", "values"),
    [
        (None, "cpu", "tiled", (False,)),
        (None, "cuda", "triton", (False, True)),
        (None, "cuda", "reference", (False,)),
        ("off", "cuda", "triton", (False,)),
        ("off", "cpu", "tiled", (False,)),
        ("on", "cuda", "triton", (False, True)),
    ],
)
def test_graphs_are_tried_where_there_are_any(
    asked: str | None, device: str, attn: str, values: tuple[bool, ...]
) -> None:
    choices = with_defaults(read_choices({**GIVEN, "graphs": asked}), worker(device, attn))
    assert choices.values["graphs"] == values


@pytest.mark.parametrize(
    ("asked", "num_mtp_layers", "values"),
    [
        (None, 0, ("off",)),
        (None, 1, ("off", "3")),
        ("off", 1, ("off",)),
        ("1,auto", 1, ("off", "1", "auto")),
        ("0,1,8", 1, ("off", "1", "8")),
        ("2", 0, ("off", "2")),  # refused with the model, as everywhere
    ],
)
def test_drafts_are_tried_where_the_model_makes_any(
    asked: str | None, num_mtp_layers: int, values: tuple[str, ...]
) -> None:
    choices = read_choices({**GIVEN, "speculate": asked})
    model = replace(tiny_model(), num_mtp_layers=num_mtp_layers)
    assert with_defaults(choices, worker(model=model)).values["speculate"] == values


def worker(device: str = "cpu", attn: str = "tiled", **changes: Any) -> WorkerConfig:
    fields = {"model": tiny_model(), "max_model_len": 128, **changes}
    return WorkerConfig(model_path="m", device=device, attn=attn, **fields)


def test_axes_that_hide_each_other_are_not_put_together() -> None:
    values = {**VALUES, "graphs": (False, True), "speculate": ("off", "3")}
    settings = matrix((1,), ("float32",), values, seeded=True, full=False)
    together = [each for each in settings if each.label.count(",") > 1]
    assert [each.label for each in together] == [
        "batch 8, chunk 256, pre-empt, graphs, 3 drafts",
        "batch 8, chunk 256, prefix cache, graphs, 3 drafts",
        "batch 8, chunk 256, prefix cache, graphs, 3 drafts, seeded",
    ]


@pytest.mark.parametrize(
    ("device", "attn", "message"),
    [
        ("cpu", "tiled", "--graphs on: cpu has no graphs; choose off"),
        ("cuda", "torch-flash", "--graphs on: with --attn torch-flash nothing is captured; choose"),
    ],
)
def test_graphs_are_refused_where_there_are_none(device: str, attn: str, message: str) -> None:
    choices = read_choices({**GIVEN, "graphs": "on,off"})
    with pytest.raises(ConfigError) as caught:
        with_defaults(choices, worker(device, attn))
    assert str(caught.value).startswith(message)
