"""Every recorded step can be run again on fresh ranks: real model runners, real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.copying import write_copying_mtp
from tests.recurrent import RecurrentEngine
from tests.rig import LocalEngine
from tests.runtime.fakes import orders_of
from tests.tiny import random_ids, write_checkpoint
from unisono.launcher.flight_file import Flight, read_flight, replay_plans
from unisono.launcher.replay import compare
from unisono.models.config import ConfigError
from unisono.runtime.flight import FlightRecorder
from unisono.runtime.protocol import Failed, SamplingParams
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import Allocate, Phase, StepPlan, StepResult, int32s

FAMILY = random_ids(150)
PROMPTS = [FAMILY, FAMILY[:130] + random_ids(9, seed=1), random_ids(58, seed=2), FAMILY]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5, top_k=40),
    SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.3, logit_bias=((7, 2.0),)),
    SamplingParams(temperature=1.5, seed=7, min_tokens=4, stop_token_ids=(9,)),
]


class Recorded(LocalEngine):
    """Records what it runs, as the runtime does."""

    recorder: FlightRecorder

    def step(self, plan: StepPlan) -> Any:
        self.recorder.plan(plan)
        output, logits = super().step(plan)
        answer = {"tokens": int32s(output.tokens), "counts": int32s(output.counts)}
        self.recorder.result(StepResult(rank=0, step=plan.step, digest=0, seconds=0.0, **answer))
        return output, logits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", path)
    return path


class RecordedHybrid(Recorded, RecurrentEngine):
    """Of a model whose state is a hash."""


OPTIONS = {"max_model_len": 200, "max_requests": 3, "max_step_tokens": 64}


def fly(checkpoint: Path, file: Path, window: int, **options: Any) -> tuple[Recorded, Flight]:
    engine = Recorded(checkpoint, **{**OPTIONS, **options})
    engine.recorder = FlightRecorder(window)
    engine.generate(PROMPTS, 12, arrivals=(0, 3, 5, 6), params=PARAMS)
    return engine, landed(engine, file)


def landed(engine: Recorded, file: Path, num_states: int = 0) -> Flight:
    """What is left of its flight."""
    orders = orders_of(WorkerConfig(model_path="m", model=engine.config))
    failed = Failed(rank=0, phase="step", step=-1, error="E", message="m", traceback="")
    allocated = Allocate(num_blocks=64, num_states=num_states)
    engine.recorder.write(file, orders, allocated, failed)
    return read_flight(file)


@pytest.mark.parametrize(
    ("window", "options"),
    [(512, {}), (6, {"tp": 2}), (4, {"num_blocks": 5})],
    ids=["all", "folded", "pre-empted"],
)
def test_every_step_of_the_window_gives_its_tokens_again(
    checkpoint: Path, tmp_path: Path, window: int, options: dict[str, Any]
) -> None:
    engine, flight = fly(checkpoint, tmp_path / "f", window, **options)
    assert any(engine.num_cached_tokens), "some blocks were shared"
    assert bool(flight.slots) is (window != 512)
    assert (engine.num_preemptions > 0) is ("num_blocks" in options)
    shared = 0
    # Of a long window every fourth step, and those that share blocks.
    some = [s for s in flight.steps if sum(s.plan.num_shared) or s.plan.step % 4 == 0]
    for step in some if window == 512 else flight.steps:
        fresh = LocalEngine(checkpoint, **{**OPTIONS, **options})
        *setup, plan = replay_plans(flight, step.plan.step)
        assert plan == step.plan
        assert [each.step for each in setup] == list(range(1 - len(setup), 1))
        for each in setup:
            assert set(each.rows.phase) == {Phase.CHUNK}
            fresh.step(each)
        tokens = fresh.step(plan)[0].tokens
        assert int32s(tokens) == step.results[0].tokens, f"step {plan.step}"
        shared += sum(plan.num_shared)
    assert shared or window != 512


TWINS = [FAMILY[:100], FAMILY, FAMILY[:140], FAMILY[:129], FAMILY[:70]]
"""Behind the first four that restore its snapshots, several the same one in the same step."""


@pytest.mark.parametrize(
    ("window", "options"),
    [(512, {}), (5, {"tp": 2}), (9, {"num_blocks": 5, "num_states": 6})],
    ids=["all", "folded", "pre-empted"],
)
def test_states_are_rebuilt_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("unisono.launcher.flight_file._SETUP_TOKENS", 128)
    options = {**OPTIONS, "max_requests": 4, "num_states": 8, "max_step_tokens": 300, **options}
    engine = RecordedHybrid(**options)
    engine.recorder = FlightRecorder(window)
    engine.generate(TWINS, 50, arrivals=(0, 4, 4, 4, 4))
    flight = landed(engine, tmp_path / "f", options["num_states"])
    assert flight.header.num_states == options["num_states"]
    assert (engine.num_preemptions > 0) is ("num_blocks" in options)
    snapshots = [[state for state in step.plan.open_restore if state] for step in flight.steps]
    if window == 512:
        assert sum(map(len, snapshots)) >= 4
        assert any(len(set(some)) < len(some) for some in snapshots), "two read the same one"
    some = zip(flight.steps, snapshots, strict=True)
    for step in [step for step, read in some if read or step.plan.step % 4 == 0 or window < 512]:
        fresh = RecurrentEngine(**options)
        *setup, plan = replay_plans(flight, step.plan.step)
        for each in setup:
            fresh.step(each)
        tokens = fresh.step(plan)[0].tokens
        assert int32s(tokens) == step.results[0].tokens, f"step {plan.step}"


def test_what_hangs_on_drafts_that_may_be_rejected_is_not_compared(tmp_path: Path) -> None:
    """Nobody recorded those drafts; their rows beside it, and all that have none, are compared."""
    write_copying_mtp("qwen3-next", tmp_path, wrong=range(3, 80))
    options = {"max_requests": 3}
    engine = Recorded(tmp_path, num_drafts=2, accept="rejection", **options)
    engine.recorder = FlightRecorder(512)
    free, seeded = SamplingParams(temperature=1.5), SamplingParams(temperature=1.5, seed=3)
    prompts = [random_ids(9, 199, seed=seed) for seed in range(3)]
    engine.generate(prompts, 24, params=[free, seeded, SamplingParams()], arrivals=(0, 0, 2))
    flight = landed(engine, tmp_path / "f", num_states=6)
    compared, left = 0, 0
    for step in flight.steps[::2]:
        number, rows = step.plan.step, step.plan.rows
        drafting = [slot for slot, drafts in zip(rows.slot, rows.drafts, strict=False) if drafts]
        chance = flight.left_to_chance(number)
        assert chance == {1} & {*drafting}
        fresh = LocalEngine(tmp_path, **options)
        *setup, plan = replay_plans(flight, number)
        for each in setup:
            fresh.step(each)
        tokens = int32s(fresh.step(plan)[0].tokens)
        for row in compare(step.plan, step.results, tokens, chance):
            assert row.equal is (None if row.slot in chance else True)
            compared += row.equal is True
        left += len(chance)
    assert compared > 5
    assert left > 1


def test_a_row_behind_the_end_of_its_answer_is_not_compared(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It answered nothing; the rows beside it are compared with their own tokens."""
    engine = Recorded(checkpoint, **OPTIONS, max_in_flight=3)
    engine.recorder = FlightRecorder()
    whole = LocalEngine(checkpoint, **OPTIONS).generate(PROMPTS, 12, params=PARAMS)
    ends = [whole[0].token_ids[4], whole[1].token_ids[6]]
    engine.generate(PROMPTS, 12, arrivals=(0, 3, 5, 6), params=PARAMS, eos_token_ids=ends)
    flight, in_vain = landed(engine, tmp_path / "f"), 0
    for step in flight.steps:
        [result] = step.results
        if 0 not in result.counts:
            continue
        fresh = LocalEngine(checkpoint, **OPTIONS)
        for plan in replay_plans(flight, step.plan.step):
            tokens = int32s(fresh.step(plan)[0].tokens)
        counts = iter(result.counts)
        for row in compare(step.plan, step.results, tokens):
            is_sampling = row.phase != "chunk"
            count = next(counts) if is_sampling else 0
            assert row.equal is (True if count else None)
            assert len(row.recorded) == count
            in_vain += is_sampling and not count
    assert in_vain > 1


def test_a_long_history_is_rebuilt_in_several_steps(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, flight = fly(checkpoint, tmp_path / "f", 4)
    monkeypatch.setattr("unisono.launcher.flight_file._SETUP_TOKENS", 64)
    last = flight.steps[-1]
    *setup, plan = replay_plans(flight, last.plan.step)
    assert len(setup) > 2
    fresh = LocalEngine(checkpoint, **OPTIONS)
    for each in setup:
        assert sum(each.rows.count) <= 64
        fresh.step(each)
    assert int32s(fresh.step(plan)[0].tokens) == last.results[0].tokens


def test_a_step_that_cannot_be_had_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    _, flight = fly(checkpoint, tmp_path / "f", 6)
    first, last = (flight.steps[i].plan.step for i in (0, -1))
    assert flight.find(None) is flight.steps[-1]
    with pytest.raises(ConfigError, match=rf"--step 1: the file holds steps {first} to {last}"):
        replay_plans(flight, 1)
    flight.steps[3].results.clear()
    replay_plans(flight, first + 3)
    with pytest.raises(ConfigError, match=rf"no rank had answered step {first + 3} before"):
        replay_plans(flight, first + 4)
