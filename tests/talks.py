"""Talks of several turns with tiny-mtp as it is shipped: what B43 asks of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.rig import LocalEngine
from unisono.launcher.model_source import resolve_model
from unisono.launcher.text.tokenizer import Tokenizer
from unisono.runtime.protocol import SamplingParams

TURNS = 12
SAID = (
    "class Reader:\n",
    "\n    def read(self, path):\n",
    "\n    def __repr__(self):\n",
    "\nimport os\n",
    "\nfor name in sorted(names):\n",
    "\ndef test_",
)
"""What the other side says, in turn."""


@cache
def ids_of(text: str) -> list[int]:
    return Tokenizer.load(resolve_model("tiny-mtp")).encode(text)


def said(turn: int) -> list[int]:
    return ids_of(SAID[turn % len(SAID)])


def assert_drafts_change_no_turn(num_tokens: int, options: Mapping[str, Any]) -> None:
    """Greedy: each turn of `num_tokens` is found by an engine without drafts, and given again by
    one that drafts, where it starts from snapshots of the turns before."""
    path = resolve_model("tiny-mtp").path
    plain, talk = LocalEngine(path, **options), list[int]()
    asked, answers = [], []
    for turn in range(TURNS):
        asked.append(talk + said(turn))
        [answer] = plain.generate([asked[-1]], num_tokens)
        answers.append(answer.token_ids)
        talk = asked[-1] + answer.token_ids
    engine = LocalEngine(path, num_drafts=3, num_states=2 * TURNS, **options)
    # Turn by turn: one has ended before the next is there.
    got = engine.generate(asked, num_tokens, [turn * (num_tokens + 8) for turn in range(TURNS)])
    for turn, answer in enumerate(got):
        assert answer.token_ids == answers[turn], f"turn {turn}"
    assert any(engine.num_cached_tokens)
    accepted, drafted = sum(map(sum, engine.accepted)), sum(map(sum, engine.drafted))
    assert 0.1 * drafted < accepted < drafted


def lengths_by_turn(num_talks: int, num_tokens: int, options: Mapping[str, Any]) -> list[float]:
    """Tokens a step in each turn of `num_talks` talks at a time, drawn at temperature 1."""
    engine = LocalEngine(resolve_model("tiny-mtp").path, num_drafts=3, **options)
    talks: list[list[int]] = [[] for _ in range(num_talks)]
    params = [
        SamplingParams(temperature=1.0, seed=seed, ignore_eos=True) for seed in range(num_talks)
    ]
    lengths = []
    for turn in range(TURNS):
        talks = [talk + said(turn) for talk in talks]
        answers = engine.generate(talks, num_tokens, params=params)
        talks = [talk + each.token_ids for talk, each in zip(talks, answers, strict=True)]
        steps = sum(each[0] for each in engine.drafted)
        lengths.append(1 + sum(map(sum, engine.accepted)) / steps)
    return lengths
