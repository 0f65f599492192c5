"""The matrix of `unisono verify`, its options and its report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.launcher.fakes import tiny_model
from unisono.launcher.verify_compare import Difference, Verdict, judge, rank_bound
from unisono.launcher.verify_options import read_choices
from unisono.launcher.verify_plan import (
    PRE_EMPT_BATCH,
    Reach,
    Setting,
    Sizes,
    by_engine,
    engine_options,
    matrix,
    what_was_missed,
)
from unisono.launcher.verify_prompts import LENGTHS, id_prompts, text_prompts
from unisono.launcher.verify_report import WIDTH, as_json, closing_line, table_text
from unisono.launcher.verify_run import Answer, Run, order_of
from unisono.models.config import ConfigError

PLAIN = Setting(tp=1, dtype="float32")
SIZES = Sizes(longest=100, most_requests=8, num_prompts=4)
GIVEN: dict[str, Any] = {
    "tp": "1",
    "dtype": "auto",
    "batch": "1,8",
    "chunk": "none,64",
    "prefix_cache": "on,off",
    "pre_empt": "off",
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
}
NOTHING = Reach(longest_prompt=0, num_cached_tokens=0, num_preemptions=0)


def test_every_value_stands_alone_once_and_together() -> None:
    settings = matrix((2, 1), ("float32",), VALUES, seeded=True, full=False)
    assert [each.label for each in settings if each.tp == 1] == [
        "plain",
        "batch 8",
        "chunk 64",
        "chunk 256",
        "prefix cache",
        f"batch {PRE_EMPT_BATCH}, pre-empt",
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
    assert len(settings) == len(set(settings)) == 2 * (2 * 3 * 2 * 2)
    for number, setting in enumerate(settings):
        assert settings.index(setting.plain) <= number


def test_engines_are_shared_where_options_are_equal() -> None:
    settings = matrix((1,), ("float32",), VALUES, seeded=True, full=False)
    groups = by_engine(settings, SIZES)
    assert [member.label for member in groups[0][1]] == ["plain", "batch 8", "seeded"]
    assert sum(len(members) for _, members in groups) == len(settings)
    options = engine_options(PLAIN, SIZES)
    assert options["max_step_tokens"] >= 100 * 8
    assert options["kv_tokens"] >= 100 * 8
    assert engine_options(replace(PLAIN, pre_empt=True), SIZES)["kv_tokens"] == 128


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
    ],
)
def test_what_was_not_reached_is_said(
    change: dict[str, Any], reach: dict[str, int], missed: str
) -> None:
    assert what_was_missed(replace(PLAIN, **change), replace(NOTHING, **reach)) == missed


def test_requests_fill_batches_and_come_twice_to_a_cache() -> None:
    assert order_of(PLAIN, 3) == [0, 1, 2]
    assert order_of(replace(PLAIN, batch=4), 3) == [0, 1, 2, 0]
    assert order_of(replace(PLAIN, prefix_cache=True), 2) == [0, 1, 0, 1]


def test_prompts_have_many_lengths_and_common_beginnings() -> None:
    prompts = id_prompts(len(LENGTHS), 199, 150)
    assert [len(prompt) for prompt in prompts] == [min(length, 150) for length in LENGTHS]
    assert all(0 <= token < 199 for prompt in prompts for token in prompt)
    assert prompts == id_prompts(len(LENGTHS), 199, 150)
    assert prompts[2][:64] == prompts[6][:64]
    assert prompts[2][64:70] != prompts[6][64:70]
    texts = text_prompts(8, lambda text: [ord(letter) for letter in text], 400)
    assert [len(text) for text in texts] == list(LENGTHS[:8])
    assert texts[0] == texts[3][:63] or texts[3] == texts[0][:62]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": "0"}, "--batch 0: expected a whole number from 1 up"),
        ({"batch": "1,x"}, "--batch x: expected a whole number from 1 up"),
        ({"chunk": "63"}, "--chunk 63: expected none or a whole number from 64 up"),
        ({"prefix_cache": "yes"}, "--prefix-cache yes: choose on, off or on,off"),
        ({"pre_empt": ""}, "--pre-empt : choose on, off or on,off"),
        ({"max_tokens": 0}, "--max-tokens 0: must be at least 1"),
        ({"num_prompts": 0}, "--prompts 0: must be at least 1"),
        ({"tokens": 0}, "--tokens 0: must be at least 1"),
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
    }
    assert (choices.tps, choices.num_prompts) == ((2, 1), 3)


def run_of(setting: Setting, tokens: list[int], sums: list[int]) -> Run:
    answer = Answer(prompt=0, token_ids=tokens, checksums=sums)
    return Run(setting=setting, answers=[answer], reach=NOTHING)


def test_a_differing_bit_and_a_differing_token_are_told_apart() -> None:
    plain = run_of(PLAIN, [5, 6, 7], [1, 2, 3])
    batch = replace(PLAIN, batch=8)
    assert judge(plain, plain).ok
    bits = judge(run_of(batch, [5, 6, 7], [1, 9, 3]), plain)
    assert bits.first is not None
    assert (bits.ok, bits.num_other_tokens, bits.num_other_logits) == (False, 0, 1)
    assert (bits.first.token, bits.first.is_token) == (1, False)
    token = judge(run_of(batch, [5, 6, 8], [1, 2, 3]), plain)
    assert token.first == Difference(prompt=0, request=0, token=2, want=7, got=8)
    missed = judge(run_of(replace(PLAIN, chunk=64), [5, 6, 7], [1, 2, 3]), plain)
    assert (missed.ok, missed.note) == (False, "not reached: no prompt is longer than a chunk")
    lost = judge(replace(plain, setting=batch, fault="rank 0 died"), plain)
    assert (lost.ok, lost.is_lost) == (False, True)


def test_the_bound_grows_with_depth_and_with_coarser_numbers() -> None:
    model = tiny_model()
    deeper = replace(model, num_layers=4 * model.num_layers)
    bounds = [rank_bound(model, dtype) for dtype in ("float32", "float16", "bfloat16")]
    assert bounds == sorted(bounds)
    assert rank_bound(deeper, "float32") > bounds[0]
    assert bounds[0] < 1e-4


def test_the_table_fits_and_json_says_the_same() -> None:
    first = Difference(prompt=3, request=11, token=17, want=1234, got=56789, margin=0.01)
    setting = Setting(
        tp=2, dtype="bfloat16", batch=64, chunk=256, prefix_cache=True, pre_empt=True, seeded=True
    )
    verdicts = [
        Verdict(setting=PLAIN, against="itself", num_tokens=2000),
        Verdict(setting=setting, against="plain", num_tokens=20000, first=first, ok=False),
    ]
    table = table_text(verdicts)
    assert max(map(len, table.splitlines())) <= WIDTH
    assert "equal" in table
    assert "56789 for" in " ".join(table.split())
    assert closing_line(verdicts, 9.6).startswith("1 of 2 promises hold: 22,000 tokens")
    said = as_json("demo", verdicts, {})
    assert (said["ok"], said["settings"][1]["first"]["got"]) == (False, 56789)
