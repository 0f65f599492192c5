"""What no model here has is refused before anything runs; and steps that nobody waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.closeness import assert_same_bits
from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from tests.workers.few_parts import few_parts
from unisono.ops import transfer
from unisono.ops.transfer import Result
from unisono.runtime.protocol import SamplingParams
from unisono.workers.channel import ProtocolError
from unisono.workers.model_runner import LateOutput, ModelRunner, StepOutput
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s

ROWS = Rows(slot=int32s([1]), start=int32s([5]), count=int32s([1]), phase=int32s([Phase.DECODE]))


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (
            StepPlan(
                step=3,
                rows=Rows(
                    slot=ROWS.slot,
                    start=ROWS.start,
                    count=ROWS.count,
                    phase=ROWS.phase,
                    drafts=int32s([2]),
                ),
            ),
            "drafts",
        ),
        (StepPlan(step=3, rows=ROWS, open_state=int32s([1])), "recurrent states"),
        (StepPlan(step=3, rows=ROWS, save_state=int32s([1])), "recurrent states"),
    ],
)
def test_drafts_and_states_are_refused(plan: StepPlan, what: str) -> None:
    runner = ModelRunner(few_parts(), cast(Any, None))
    with pytest.raises(ProtocolError, match=f"step 3 .*{what}"):
        runner.step(plan)


class Held(Result):
    """A result that is ready once somebody has waited for it: a busy device, on a CPU."""

    running: list[StepPlan] = []  # noqa: RUF012
    """The step that is being launched, if one is."""
    made: list[Held] = []  # noqa: RUF012

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(numbers)
        self.plan = self.running[-1]
        self.newest_when_read = 0
        self.made.append(self)

    def is_ready(self) -> bool:
        return self.newest_when_read > 0

    def read(self) -> list[int]:
        self.newest_when_read = self.newest_when_read or self.made[-1].plan.step
        return super().read()


class LateEngine(LocalEngine):
    """Reads what a step gives when the scheduler must have it: behind the launch of the next."""

    def step(self, plan: StepPlan) -> tuple[Any, list[torch.Tensor]]:
        [rank] = self.ranks
        rank.logits.clear()
        Held.running.append(plan)
        output = rank.runner.step(plan)
        Held.running.clear()
        if isinstance(output, LateOutput):
            assert not output.is_ready()
            assert (output.logprobs, output.checksums) == (None, None)
        is_sampling = any(phase != Phase.CHUNK for phase in plan.rows.phase)
        return output, list(rank.logits[-1]) if is_sampling else []


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    made: list[Held] = []
    monkeypatch.setattr(Held, "made", made)
    monkeypatch.setattr(Held, "running", [])
    monkeypatch.setattr(transfer, "Result", Held)
    return made


ASKED = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=4),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(logit_bias=((5, 6.0), (9, -7.0)), min_tokens=4),
    SamplingParams(temperature=1.1, seed=9),
]


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


def prompts() -> list[list[int]]:
    return [random_ids(length, seed=length) for length in (120, 3, 90, 65, 8, 64)]


def test_steps_with_prompts_are_read_behind_the_next_launch(
    checkpoint: Path, held: list[Held]
) -> None:
    """Rows of every kind, prompts that are cut and that join: the same tokens, never awaited."""
    options = {"max_step_tokens": 100, "max_requests": 5, "max_model_len": 160}
    how: dict[str, Any] = {"params": ASKED, "arrivals": [0, 1, 2, 3, 3, 6]}
    engine = LateEngine(checkpoint, **options)
    got = engine.generate(prompts(), 9, **how)
    mixed = [result for result in held if not result.plan.rows.decode_only]
    assert any(Phase.DECODE in result.plan.rows.phase for result in mixed)
    assert any(set(result.plan.rows.phase) == {Phase.CHUNK} for result in mixed)
    ahead = sum(result.newest_when_read > result.plan.step for result in mixed)
    assert ahead >= len(mixed) - 1, "a step was waited for before the next was launched"
    count = len(held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "Result", Result)
        want = LocalEngine(checkpoint, max_in_flight=1, **options).generate(prompts(), 9, **how)
    assert len(held) == count
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.token_ids == other.token_ids, f"request {number}"
        logits = torch.stack(one.logits), torch.stack(other.logits)
        assert_same_bits(f"logits of request {number}", *logits)


def test_what_is_more_than_tokens_is_waited_for(checkpoint: Path, held: list[Held]) -> None:
    engine = LateEngine(checkpoint)
    outputs: list[Any] = []
    [rank] = engine.ranks
    step = rank.runner.step
    rank.runner.step = lambda plan: outputs.append(step(plan)) or outputs[-1]  # type: ignore[method-assign,func-returns-value]
    params = [SamplingParams(logprobs=2), SamplingParams(prompt_logprobs=1), SamplingParams()]
    engine.generate(prompts()[:3], 4, params=params)
    first, *others = outputs
    assert isinstance(first, StepOutput)
    assert first.logprobs
    assert all(isinstance(output, StepOutput) == bool(output.logprobs) for output in others)
    assert all(result.is_ready() for result in held)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_nan_is_heard_of_when_a_late_result_is_read(
    num_drafts: int, held: list[Held], tmp_path: Path
) -> None:
    """The step after it is launched all the same. Drafts of prompts are late, too."""
    write_checkpoint("qwen3.5", tmp_path, mtp=True)
    for name in ("logits", "draft_logits")[: 1 + bool(num_drafts)]:
        held.clear()
        engine = LateEngine(tmp_path, num_drafts=num_drafts)
        [rank] = engine.ranks

        def spoil(step: int, rank: Any = rank, name: str = name) -> None:
            if step == 0:
                whole = getattr(rank.model, name)
                setattr(rank.model, name, lambda hidden: _spoiled(whole(hidden)))

        asked = [random_ids(length, seed=length) for length in (9, 5, 70)]
        # Behind drafts the second place is the first row's, and the host waits for that step.
        row = 0 if num_drafts and name == "logits" else 1
        message = rf"the logits of sampling rows \[{row}\] hold NaN"
        with pytest.raises(FloatingPointError, match=message):
            engine.generate(asked, 5, before_step=spoil)
        if not num_drafts:  # what is behind drafts, the host has to know
            assert [result.plan.step for result in held] == [1, 2]


def _spoiled(logits: torch.Tensor) -> torch.Tensor:
    logits[1, 7] = torch.nan
    return logits


def test_prompts_alone_are_never_waited_for_where_there_are_drafts(
    held: list[Held], tmp_path: Path
) -> None:
    """Their drafts are made from lengths that the host knows; the answers are those without."""
    write_checkpoint("qwen3.5", tmp_path, mtp=True)
    asked = [random_ids(length, seed=length) for length in (9, 150, 70)]
    options = {"max_step_tokens": 128, "max_model_len": 200}
    engine = LateEngine(tmp_path, num_drafts=3, **options)
    got = engine.generate(asked, 8)
    assert [result.plan.step for result in held][:2] == [1, 2]
    assert held[0].newest_when_read == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "Result", Result)
        want = LocalEngine(tmp_path, **options).generate(asked, 8)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
