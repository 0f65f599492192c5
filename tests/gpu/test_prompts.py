"""Steps with prompts on a GPU: the host lays them out and goes on, however busy the device is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from tests.waiting import waits_are_errors
from unisono.runtime.protocol import SamplingParams
from unisono.workers.model_runner import LateOutput
from unisono.workers.protocol import Phase, StepPlan

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NAP = 200_000_000
"""Cycles of a GPU: a tenth of a second, in which the host launches any of these steps."""
LENGTHS = (5, 150, 64, 9, 70, 130, 33, 2, 65, 17)
HOW = {
    "greedy": [SamplingParams()] * len(LENGTHS),
    "drawn": [SamplingParams(temperature=0.8 * (i % 2), seed=i) for i in range(len(LENGTHS))],
    "filtered and penalized": [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=30, seed=i, repetition_penalty=1.2)
        if i % 2
        else SamplingParams(logit_bias=((7, 4.0),), min_tokens=3)
        for i in range(len(LENGTHS))
    ],
}


class Napping(LocalEngine):
    """Has the device asleep when a step with prompts is launched. `strict`: a wait is an error."""

    naps = strict = False
    num_strict = 0

    def guard(self) -> None:
        """Begin to."""
        [rank] = self.ranks
        step = rank.runner.step

        def guarded(plan: StepPlan) -> Any:
            phases = set(plan.rows.phase)
            if not self.naps or phases == {Phase.DECODE}:
                return step(plan)
            torch.cuda._sleep(NAP)
            if not self.strict:
                return step(plan)
            with waits_are_errors():
                output = step(plan)
            assert isinstance(output, LateOutput)
            assert not output.is_ready(), "the host has waited for the device"
            self.num_strict += 1
            return output

        rank.runner.step = guarded  # type: ignore[method-assign]


def never_waits(engine: Napping, **how: Any) -> None:
    """Two rounds load kernels and take pinned memory; the third must not wait."""
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    engine.guard()
    want = engine.generate(prompts, 8, **how)
    engine.naps = True
    engine.generate(prompts, 8, **how)
    engine.strict = True
    got = engine.generate(prompts, 8, **how)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "qwen3-next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


@pytest.mark.parametrize("how", HOW)
def test_prompts_that_join_rows_that_decode_are_not_waited_for(model: Path, how: str) -> None:
    """Prompts in chunks, too, whose steps answer nothing; slots change hands."""
    options = {"dtype": "bfloat16", "device": GPU, "graphs": True, "max_model_len": 200}
    engine = Napping(model, max_step_tokens=128, max_requests=6, **options)
    arrivals = [0, 0, 1, 2, 3, 5, 6, 6, 8, 9]
    never_waits(engine, params=HOW[how], arrivals=arrivals)
    assert engine.num_strict >= 6


def test_prompts_are_not_waited_for_beside_rows_with_drafts(tmp_path: Path) -> None:
    write_checkpoint("qwen3-next", tmp_path, mtp=True)
    options = {"dtype": "bfloat16", "device": GPU, "graphs": True, "max_model_len": 200}
    engine = Napping(tmp_path, max_step_tokens=128, max_requests=6, num_drafts=3, **options)
    arrivals = [0, 0, 1, 2, 3, 5, 6, 6, 8, 9]
    never_waits(engine, arrivals=arrivals)
    assert engine.num_strict >= 6


def test_a_nan_of_a_prompt_is_named_when_it_is_read(model: Path) -> None:
    engine = LocalEngine(model, dtype="bfloat16", device=GPU, graphs=True)
    [rank] = engine.ranks
    whole = rank.model.logits
    rank.model.logits = lambda hidden: whole(hidden).index_fill_(
        0, torch.ones(1, dtype=torch.int64, device=GPU), torch.nan
    )
    prompts = [random_ids(length, seed=length) for length in (9, 30)]
    with pytest.raises(FloatingPointError, match=r"sampling rows \[1\] hold NaN"):
        engine.generate(prompts, 4)
