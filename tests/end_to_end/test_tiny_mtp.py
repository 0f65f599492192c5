"""tiny-mtp as a user runs it: trained drafts, of which many are right and some are not."""

from __future__ import annotations

import json
import keyword
import re

import pytest

from tests.end_to_end.command import json_lines, run

PROMPTS = (
    "def read(self, path):",
    "class Reader:",
    "    def __repr__(self):",
    '    def __init__(self, name):\n        """',
    "for name in sorted(names):\n",
    "def test_",
)
TOKENS = 96
ASKED = ("generate", "tiny-mtp", *PROMPTS, "--max-tokens", str(TOKENS), "--json")


@pytest.fixture(scope="module")
def plain() -> list[dict[str, object]]:
    return json_lines(run(*ASKED)[0])


@pytest.fixture(scope="module")
def drafted() -> tuple[list[dict[str, object]], str]:
    out, err = run(*ASKED, "--speculate", "3")
    return json_lines(out), err


def test_drafts_change_no_answer(plain, drafted) -> None:
    answers, err = drafted
    assert [each["digest"] for each in answers] == [each["digest"] for each in plain]
    assert re.search(r"\d\.\d\d tokens a step \(drafts right: \d+ %, \d+ %, \d+ %\)", err)


@pytest.mark.parametrize("way", [("--tp", "2"), ("--dtype", "bfloat16")], ids=" ".join)
def test_nor_do_they_drawn_on_ranks_or_in_bf16(way: tuple[str, str]) -> None:
    drawn = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "3", *way)
    few = ("generate", "tiny-mtp", *PROMPTS[:3], "--max-tokens", "40", "--json", *drawn)
    without, with_drafts = (
        json_lines(run(*few, "--speculate", count)[0]) for count in ("off", "3")
    )
    assert [each["digest"] for each in with_drafts] == [each["digest"] for each in without]
    right, checked = (
        sum(sum(each["drafts"][key]) for each in with_drafts) for key in ("right", "checked")
    )
    assert 0 < right < checked


def test_rejection_is_for_requests_without_a_seed() -> None:
    """Those draw anew each time, and more of their drafts are right; others keep their answer."""
    few = ("generate", "tiny-mtp", *PROMPTS, "--max-tokens", "40", "--ignore-eos", "--json")
    drawn = (*few, "--temperature", "0.8")
    rejecting = ("--speculate", "3", "--accept", "rejection")
    for asked in (few, (*drawn, "--seed", "3")):
        want, got = (json_lines(run(*asked, *how)[0]) for how in ((), rejecting))
        assert [each["digest"] for each in got] == [each["digest"] for each in want]
    one, two = (json_lines(run(*drawn, *rejecting, "--tp", tp)[0]) for tp in ("1", "2"))
    for first, second in zip(one, two, strict=True):
        assert first["digest"] != second["digest"]
        assert len(first["token_ids"]) == len(second["token_ids"]) == 40
        assert sum(first["drafts"]["right"]) > 0
    _, err = run(*few, "--accept", "rejection", code=2)
    assert "--accept rejection: judges drafts, and --speculate off makes none" in err


def test_more_than_two_drafts_in_five_are_right(drafted) -> None:
    answers, _ = drafted
    right, checked = (
        [sum(each["drafts"][key][place] for each in answers) for place in range(3)]
        for key in ("right", "checked")
    )
    shares = [r / c for r, c in zip(right, checked, strict=True)]
    assert sum(right) / sum(checked) > 0.4, shares
    assert shares[0] > 0.5, shares


def test_it_writes_what_looks_like_python(plain) -> None:
    text = "\n".join(str(each["text"]) for each in plain)
    words = set(re.findall(r"[A-Za-z_]+", text))
    assert {"self", "return"} <= words, text
    assert len(words & set(keyword.kwlist)) >= 5, text
    assert len(words) > 30, text


def test_inspect_knows_it() -> None:
    out, _ = run("inspect", "tiny-mtp", "--json")
    facts = json.loads(out)["facts"]
    assert (facts["family"], facts["mtp_layers"]) == ("qwen3_5", 1)
