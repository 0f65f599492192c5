"""Steps that decode behind drafts beside prompts, laid out without waiting, run without a GPU: the
bits of steps whose rows the host has asked for, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.copying import write_copying_mtp
from tests.device_plans import with_device_plans_of_prompts
from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from tests.workers.test_draft_steps import Both, scripted, wrong
from unisono.runtime.protocol import SamplingParams
from unisono.workers.mixed_steps import MixedSteps

VOCABULARY = 199
LENGTHS = (5, 90, 64, 17, 70, 1, 33, 130)
ARRIVALS = (0, 1, 2, 2, 3, 5, 5, 7)
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, stop_token_ids=(i * 7 % VOCABULARY,))
    for i in range(len(LENGTHS))
]
MIXED: dict[str, Any] = {
    "ops_of": with_device_plans_of_prompts,
    "prompt_graphs": True,
    "max_step_tokens": 80,
    "max_requests": 8,
    "max_model_len": 160,
    "prefix_cache": False,
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each step that was laid out so: its rows, and those of them that hold drafts."""
    seen: list[tuple[int, int]] = []
    lay_out = MixedSteps.lay_out

    def noted(self: MixedSteps, plan: Any) -> Any:
        seen.append((len(plan.rows), sum(map(bool, plan.rows.drafts))))
        return lay_out(self, plan)

    monkeypatch.setattr(MixedSteps, "lay_out", noted)
    return seen


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5"])
def erring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a third of the drafts is wrong."""
    directory = tmp_path_factory.mktemp(request.param)
    write_copying_mtp(request.param, directory, wrong=wrong(1 / 3))
    return directory


def ask(engines: Both, max_tokens: int = 9) -> None:
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in LENGTHS]
    engines.generate(prompts, max_tokens=max_tokens, arrivals=ARRIVALS, params=PARAMS)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_nothing_is_another_bit(erring: Path, num_drafts: int, steps: Any) -> None:
    """Logits, tokens, caches, states and slot table, of greedy and drawn rows, some of which end by
    a stop id within their drafts or beside a prompt."""
    ask(Both(erring, num_drafts=num_drafts, **MIXED))
    assert sum(1 for _, with_drafts in steps if with_drafts) >= 4, steps
    assert max(rows for rows, _ in steps) >= 4


def test_drafts_may_change_from_step_to_step(erring: Path, steps: Any) -> None:
    ask(Both(erring, num_drafts=4, policy_of=scripted(4, 0, 2, 3, 1), **MIXED))
    assert {with_drafts > 0 for _, with_drafts in steps} == {True, False}


def test_forced_drafts(erring: Path, steps: Any) -> None:
    ask(Both(erring, num_drafts=3, forced=0.6, **MIXED))
    assert steps


def test_rows_at_the_end_of_their_context(tmp_path: Path, steps: Any) -> None:
    """Where a row might begin further on than there is room, it does not."""
    write_copying_mtp("qwen3-next", tmp_path)
    engines = Both(tmp_path, num_drafts=4, **{**MIXED, "max_model_len": 128})
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in (110, 119, 124, 60, 127)]
    engines.generate(prompts, max_tokens=40, arrivals=(0, 3, 5, 6, 8))
    assert steps


def test_what_needs_the_host_is_laid_out_by_it(erring: Path, steps: Any) -> None:
    params = [SamplingParams(logprobs=2), SamplingParams(temperature=0.8, top_k=5, seed=1)]
    engines = Both(erring, num_drafts=2, **MIXED)
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in (5, 90)]
    engines.generate(prompts, max_tokens=8, arrivals=(0, 2), params=params)
    assert not steps


def test_a_nan_is_named(tmp_path: Path, steps: Any) -> None:
    write_checkpoint("qwen3-next", tmp_path, mtp=True)
    engine = LocalEngine(tmp_path, graphs=True, num_drafts=2, **MIXED)
    [rank] = engine.ranks
    whole = rank.model.logits

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        return whole(hidden).fill_(torch.nan) if steps else whole(hidden)

    rank.model.logits = spoiled
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in (9, 30)]
    with pytest.raises(FloatingPointError, match=r"sampling rows \[0, 1\] hold NaN"):
        engine.generate(prompts, 8, arrivals=(0, 2))
    assert len(steps) == 1
