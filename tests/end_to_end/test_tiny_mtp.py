"""tiny-mtp as a user runs it: trained drafts, of which many are right and some are not."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.command import json_lines, refused, run
from unisono import LLM, SamplingParams
from unisono.launcher import cli
from unisono.launcher.answering import Answer
from unisono.launcher.draft_counts import DraftCounts

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
def undrafted() -> Iterator[LLM]:
    with LLM("tiny-mtp", max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(undrafted: LLM) -> list[Answer]:
    return undrafted.generate(PROMPTS, SamplingParams(max_tokens=TOKENS))


@pytest.fixture(scope="module")
def drafted() -> tuple[list[dict[str, object]], str]:
    out, err = run(*ASKED, "--speculate", "3")
    return json_lines(out), err


def test_drafts_change_no_answer(plain, drafted) -> None:
    answers, err = drafted
    assert [each["digest"] for each in answers] == [each.digest for each in plain]
    shares = re.search(r"\d\.\d\d tokens a step \(drafts right: (\d+) %, (\d+) %, (\d+) %\)", err)
    assert shares is not None, err
    for place, share in enumerate(shares.groups()):
        checked, right = (
            sum(a["drafts"][key][place] for a in answers) for key in ("checked", "right")
        )
        assert share == f"{100 * right / checked:.0f}"


RANKS, BF16 = {"tp": 2}, {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    "way", [RANKS | BF16, *(pytest.param(way, marks=pytest.mark.soak) for way in (RANKS, BF16))]
)
def test_nor_do_they_drawn_on_ranks_or_in_bf16_for_two_clients(way: dict[str, Any]) -> None:
    """B17: of two that ask at the same time, one for what is easily guessed and one for what is
    not, each has its answers."""
    drawn = {"max_tokens": 24, "top_p": 0.95, "seed": 3}
    asked = [
        (PROMPTS[:2], SamplingParams(temperature=0.2, **drawn)),
        (PROMPTS[2:4], SamplingParams(temperature=1.2, **drawn)),
    ]

    def answers(drafts: str) -> list[list[Answer]]:
        with (
            LLM("tiny-mtp", speculate=drafts, max_model_len=256, **way) as llm,
            ThreadPoolExecutor(2) as clients,
        ):
            return list(clients.map(lambda each: llm.generate(*each), asked))

    plain, drafted = answers("off"), answers("3")
    for want, got in zip(plain, drafted, strict=True):
        assert [each.digest for each in got] == [each.digest for each in want]
    easy, hard = map(DraftCounts.of, drafted)
    assert easy != hard, "drafts of both should not be as often right"
    assert sum(easy.right) > 0 < sum(hard.right)


def test_rejection_is_for_requests_without_a_seed(
    undrafted: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those draw anew each time; greedy ones and those with a seed keep their answer."""
    limits = {"max_tokens": 40, "ignore_eos": True}
    promised = [SamplingParams(**limits), SamplingParams(temperature=0.8, seed=3, **limits)]
    want = [undrafted.generate(PROMPTS[:3], params) for params in promised]
    with LLM("tiny-mtp", speculate="3", accept="rejection", max_model_len=256) as llm:
        got = [llm.generate(PROMPTS[:3], params) for params in promised]
        free = SamplingParams(temperature=0.8, **limits)
        one, two = (llm.generate(PROMPTS[:3], free) for _ in range(2))
    for answers, plain in zip(got, want, strict=True):
        assert [each.digest for each in answers] == [each.digest for each in plain]
    for first, second in zip(one, two, strict=True):
        assert first.token_ids != second.token_ids
        assert len(first.token_ids) == len(second.token_ids) == 40
    err = refused(capsys, "generate", "tiny-mtp", "a", "--accept", "rejection")
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


def test_stop_strings_among_accepted_drafts_end_everything_at_one_token(undrafted: LLM) -> None:
    """B62, B63: with 7 drafts as with none, text, ids, log-probabilities and count end where the
    earliest match does, in the first accepted token too; stops of one character among them."""
    params = [
        SamplingParams(max_tokens=60, logprobs=1, stop=stop, temperature=heat, seed=seed)
        for stop in (("(",), ("zzz", "e"), ("self.", "self"), ("\n",), ("return", "et", "r"))
        for heat, seed in ((0.0, None), (0.9, 2))
    ]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    asked = list(zip(prompts, params, strict=True))
    want = [undrafted.generate(prompt, each)[0] for prompt, each in asked]
    with LLM("tiny-mtp", speculate="7", max_model_len=256) as llm:
        got = [llm.generate(prompt, each)[0] for prompt, each in asked]
    stopped = 0
    for plain, drafted, each in zip(want, got, params, strict=True):
        assert drafted.text == plain.text
        assert drafted.token_ids == plain.token_ids
        assert drafted.finish_reason == plain.finish_reason
        assert drafted.logprobs == plain.logprobs
        assert drafted.logprobs is not None
        assert [entry.token_id for entry in drafted.logprobs] == list(drafted.token_ids)
        assert not any(stop in drafted.text for stop in each.stop)
        stopped += drafted.finish_reason == "stop"
    assert stopped > len(params) // 2
    assert len({len(each.token_ids) for each in got}) > 3


def test_it_writes_what_looks_like_python(plain) -> None:
    text = "\n".join(each.text for each in plain)
    words = set(re.findall(r"[A-Za-z_]+", text))
    assert {"self", "return"} <= words, text
    assert len(words & set(keyword.kwlist)) >= 5, text
    assert len(words) > 30, text


def test_inspect_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", "tiny-mtp", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert (facts["family"], facts["mtp_layers"]) == ("qwen3_5", 1)
