"""`unisono bench speculate`: what a line says, what is recommended, refusals, a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.end_to_end import command
from unisono.launcher.bench.engine import Got
from unisono.launcher.bench.report import WIDTH
from unisono.launcher.bench.speculate import (
    advice_of,
    line_of,
    make_plan,
    recommended,
    speculate_command,
    summary,
    titles,
)


def got(tokens: Sequence[int], drafted: Sequence[int] = (), accepted: Sequence[int] = ()) -> Got:
    return Got(token_ids=list(tokens), drafted=drafted, accepted=accepted)


def line(drafts: str, tokens_per_s: float, base: float = 100.0) -> dict[str, Any]:
    return {
        "drafts": drafts,
        "batch": 2,
        "tokens_per_s": tokens_per_s,
        "speedup": tokens_per_s / base,
        "tokens_per_step": 1.5,
    }


def test_a_line_counts_tokens_steps_and_drafts_by_place():
    """The first run is not timed; a request may never reach the last place of a chain."""
    off = summary(
        "off", 2, [([got([1, 2]), got([3, 4])], 9.0)] + 2 * [([got([1, 2])], 2.0)], None, ""
    )
    assert (off["tokens_per_s"], off["speedup"], off["right"]) == (2.0, 1.0, [])
    assert off["same_answers"]
    answers = [got([1, 2], [4, 4], [3, 1]), got([3, 4], [4], [1])]
    runs = [(answers, 9.0), (answers, 1.0), (answers, 3.0), (answers, 1.0)]
    found = summary("2", 2, runs, off, "")
    assert (found["seconds"], found["tokens_per_s"], found["speedup"]) == (1.0, 4.0, 2.0)
    assert found["tokens_per_step"] == 1 + 5 / 8
    assert found["right"] == [4 / 8, 1 / 4]
    assert found["same_answers"]
    shown = line_of(found)
    assert shown.split()[:5] == ["2", "2", "4.0", "2.00", "1.62"]
    assert shown.endswith("  50 25 %")
    assert titles().index("digest") == shown.index(found["digest"][:16])


@pytest.mark.parametrize("wrong", [[9, 2], [1]])
def test_another_answer_than_without_drafts_is_found(wrong):
    off = summary("off", 1, 2 * [([got([1, 2])], 1.0)], None, "")
    drafting = summary("1", 1, 2 * [([got(wrong, [1], [1])], 1.0)], off, "")
    assert off["same_answers"]
    assert not drafting["same_answers"]


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ([100, 150, 190, 180], "3"),
        ([100, 101, 99, 60], "off"),
        ([100, 101.9, 102.1, 60], "3"),
    ],
)
def test_the_fastest_is_recommended_if_it_is_worth_it(speeds, best):
    """B53: none, where drafts are no gain."""
    names = ("off", "1", "3", "8")
    lines = [line(name, speed) for name, speed in zip(names, speeds, strict=True)]
    assert recommended(lines, 2) == best
    words = advice_of(lines, 2, best)
    assert ("leave --speculate off" in words) == (best == "off")
    assert advice_of(lines, 2, best, 0.9) == f"SYNTHETIC, 0.9 right: {words}"
    assert len(words) < WIDTH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafts", "0"), "--drafts 0: expected whole numbers of 1 to 8, as 1,3"),
        (("--drafts", "1,9"), "--drafts 1,9: expected whole numbers of 1 to 8, as 1,3"),
        (("--batch", "2,x"), "--batch 2,x: expected whole numbers of 1 to 65536, as 1,8"),
        (("--batch", "1000000000000"), "--batch 1000000000000: expected whole numbers of 1 to 65"),
        (("--tokens", "0"), "--tokens 0: must be at least 1"),
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
        (("--tokens", "9" * 4300), "9' has more than 19 digits"),
        (("--tokens", "9999"), "--tokens 9999: a prompt and its answer may have"),
        (("--prompts-file", "gone.txt"), "gone.txt"),
        (("--force-acceptance", "1.5"), "--force-acceptance 1.5: must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused(options, message, capsys):
    err = command.refused(capsys, "bench", "speculate", "tiny-mtp", *options)
    assert err.startswith("unisono: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_prompt_that_leaves_no_room_is_what_is_too_long(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("x = 1 " * 4000)
    err = command.refused(capsys, "bench", "speculate", "tiny-mtp", "--prompts-file", str(file))
    assert "limit is 2048: a prompt has " in err
    assert "choose a shorter one" in err


def test_none_to_eight_drafts_are_tried_unless_one_says():
    asked = speculate_command.make_context("speculate", ["tiny-mtp"]).params
    plan = make_plan(**asked)
    assert [name for name, _ in plan.settings] == ["off", *map(str, range(1, 9))]
    assert [each.worker.num_drafts for _, each in plan.settings] == [*range(9)]


def test_a_model_that_cannot_draft_is_refused(capsys):
    err = command.refused(capsys, "bench", "speculate", "shape:qwen3-0.6b", "--drafts", "2")
    assert "--speculate 2: drafts come from a layer of the model's own" in err


@pytest.mark.timeout(180)
def test_trained_drafts_are_measured_and_change_no_answer():
    out, _ = command.run(
        *("bench", "speculate", "tiny-mtp", "--drafts", "2", "--batch", "1,3"),
        *("--tokens", "24", "--repeats", "1", "--json"),
    )
    found = json.loads(out)
    names = [(each["drafts"], each["batch"]) for each in found["lines"]]
    assert names == [("off", 1), ("off", 3), ("2", 1), ("2", 3)]
    assert all(each["same_answers"] for each in found["lines"])
    digests = [each["digest"] for each in found["lines"]]
    assert digests[:2] == digests[2:]
    assert all(1 < each["tokens_per_step"] <= 3 for each in found["lines"][2:])
    assert set(found["recommended"]) == {"1", "3"}


@pytest.mark.timeout(180)
def test_forced_acceptance_is_labelled_wherever_it_shows():
    asked = ("--drafts", "2", "--batch", "2", "--tokens", "24", "--repeats", "1")
    out, _ = command.run("bench", "speculate", "tiny-mtp", *asked, "--force-acceptance", "1")
    header, _, rest = out.partition("SYNTHETIC: 1 of the drafts at each place are taken for right")
    assert "tiny-mtp" in header
    *_, last = rest.splitlines()
    found = json.loads(last)
    assert (found["synthetic"], "synthetic acceptance 1" in found["workload"]) == (1.0, True)
    off, forced = found["lines"]
    assert off["same_answers"]
    assert (forced["digest"], forced["same_answers"]) == ("synthetic", None)
    # The last chain of an answer may be longer than what is left of it.
    assert 2.7 < forced["tokens_per_step"] <= 3
    assert min(forced["right"]) > 0.85
    [shown] = [each for each in rest.splitlines() if each.split()[:2] == ["2", "2"]]
    assert "synthetic" in shown
    assert "batch 2: SYNTHETIC, 1 right: " in rest
    assert found["recommended"]["2"].startswith("synthetic: ")
