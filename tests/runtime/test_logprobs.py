"""Log-probabilities through the runtime: each reaches its token once, whatever happens to it."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from tests.runtime.fakes import FakeWorker, request, scheduler
from unisono.runtime.logprobs import LogprobCutter, take_prompt_logprobs
from unisono.runtime.request import Request
from unisono.runtime.scheduler import Scheduler
from unisono.runtime.worker_group import Diverged, WorkerGroup
from unisono.workers.protocol import (
    Phase,
    Rows,
    SlotSampling,
    StepPlan,
    StepResult,
    int32s,
    logprob_width,
    unpack_sampling,
)


class LogprobWorker(FakeWorker):
    """Its record of a token is the token's position and the number of likeliest ids, repeated."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.recipes = [SlotSampling()] * (num_slots + 1)

    def step_with_logprobs(self, plan: StepPlan) -> tuple[list[int], array[int] | None]:
        plain = [SlotSampling()] * len(plan.open_slot)
        for slot, recipe in zip(
            plan.open_slot, unpack_sampling(plan.open_sampling) or plain, strict=True
        ):
            self.recipes[slot] = recipe
        tokens = self.step(plan)
        prompts, answers = int32s(), int32s()
        rows = plan.rows
        for slot, start, count, phase in zip(
            rows.slot, rows.start, rows.count, rows.phase, strict=True
        ):
            recipe = self.recipes[slot]
            if recipe.prompt_logprobs >= 0:
                for at in range(start, min(start + count, recipe.num_prompt_tokens - 1)):
                    prompts += record(at + 1, recipe.prompt_logprobs)
            if recipe.logprobs >= 0 and phase != Phase.CHUNK:
                answers += record(start + count, recipe.logprobs)
        kinds = [self.recipes[slot] for slot in rows.slot]
        if any(kind.logprobs >= 0 or kind.prompt_logprobs >= 0 for kind in kinds):
            return tokens, prompts + answers
        return tokens, None


def record(position: int, num_top: int) -> array[int]:
    return int32s([position, num_top] * (logprob_width(num_top) // 2))


def run(
    plans: Scheduler, worker: LogprobWorker, asked: list[Request], abort: dict[int, int]
) -> None:
    """Serve all; `abort`: request by step, forgotten while the step runs. Checks every token."""
    for item in asked:
        plans.add(item)
    got: dict[int, list[int]] = {item.request_id: [] for item in asked}
    of_prompts: dict[int, list[int]] = {item.request_id: [] for item in asked}
    step = 0
    while (plan := plans.next_plan()) is not None:
        step += 1
        tokens, records = worker.step_with_logprobs(plan)
        if step in abort:
            plans.abort("c", abort[step])
        for news in plans.apply(tokens, logprobs=records):
            number, item = news.request.request_id, news.request
            got[number].append(news.token_id)
            num_top = item.params.logprobs
            position = item.num_prompt_tokens + len(got[number]) - 1
            assert news.logprobs == (None if num_top is None else record(position, num_top))
            fresh = take_prompt_logprobs(item)
            assert fresh is None or len(got[number]) == 1
            of_prompts[number] += fresh or []
        plans.audit()
    for item in asked:
        if item.request_id in abort.values():
            continue
        assert len(got[item.request_id]) == item.max_tokens
        num_top = item.params.prompt_logprobs
        want: list[int] = []
        if num_top is not None:
            for position in range(1, item.num_prompt_tokens):
                want += record(position, num_top)
        assert of_prompts[item.request_id] == want


@pytest.mark.parametrize("num_blocks", [5, 20])
@pytest.mark.parametrize("budget", [64, 128, 1000])
def test_each_comes_once_with_its_token(num_blocks: int, budget: int) -> None:
    """Also after a pre-emption in the middle of a prompt, and beside requests that ask for none."""
    asked = [
        request(0, 190, 40, family=1, prompt_logprobs=2, logprobs=0),
        request(1, 100, 60, family=1, logprobs=3),
        request(2, 150, 50, family=1),
        request(3, 150, 90, family=1, prompt_logprobs=0),
        request(4, 1, 9, prompt_logprobs=1, logprobs=1),
    ]
    plans = scheduler(num_blocks=num_blocks, max_step_tokens=budget)
    run(plans, LogprobWorker(4), asked, {})
    assert (plans.num_preemptions > 0) == (num_blocks == 5)
    assert asked[0].num_cached_tokens == asked[3].num_cached_tokens == 0


@pytest.mark.parametrize("step", [1, 2, 4])
def test_those_of_an_aborted_request_go_to_nobody(step: int) -> None:
    asked = [
        request(number, 150, 20, prompt_logprobs=number, logprobs=number + 1) for number in range(3)
    ]
    run(scheduler(max_step_tokens=128), LogprobWorker(4), asked, {step: 0})


def test_a_prompt_that_others_computed_is_computed_again_and_shared_on() -> None:
    """With prompt log-probabilities a request finds nothing in the cache, and publishes."""
    plans, worker = scheduler(num_blocks=30), LogprobWorker(4)
    asked = [request(0, 200, 2, family=1), request(1, 200, 2, family=1, prompt_logprobs=0)]
    for item in asked:
        run(plans, worker, [item], {})
    last = request(2, 200, 2, family=1, logprobs=4)
    run(plans, worker, [last], {})
    assert [item.num_cached_tokens for item in (*asked, last)] == [0, 0, 192]


def test_a_prefix_is_found_again_once_the_prompts_are_known() -> None:
    item = request(0, 100, 9, prompt_logprobs=1)
    assert item.lacks_prompt_logprobs
    LogprobCutter(int32s([0] * 99 * 4)).give_prompt(item, 0, 100)
    assert not item.lacks_prompt_logprobs
    assert not request(1, 100, 9, logprobs=1).lacks_prompt_logprobs
    assert not request(1, 1, 9, prompt_logprobs=1).lacks_prompt_logprobs


def test_too_many_and_too_few_are_our_own_mistake() -> None:
    item = request(0, 100, 9, logprobs=1)
    with pytest.raises(AssertionError, match="are missing"):
        LogprobCutter(int32s([1, 2, 3])).cut(item)
    with pytest.raises(AssertionError, match="nobody asked for"):
        LogprobCutter(int32s([1])).check_empty()


class _Ranks:
    """A hub with the results of one step."""

    def __init__(self, results: list[StepResult]) -> None:
        self._results = [(f"rank {result.rank}", result) for result in results]

    def receive(self, timeout: float | None) -> tuple[str, StepResult]:
        return self._results.pop(0)

    def send(self, name: str, message: object) -> None:
        """The plan has no reader here."""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, ""),
        ({"logprobs": array("i", [5, 7])}, "log-probabilities"),
        ({"logprobs": None}, "log-probabilities"),
        ({"tokens": array("i", [4])}, "tokens"),
        ({"checksums": array("q", [1])}, "logits"),
        ({"digest": 8}, "collectives"),
    ],
)
def test_a_rank_with_other_log_probabilities_is_named(change: dict[str, object], what: str) -> None:
    first = StepResult(
        rank=0, step=3, tokens=array("i", [1]), digest=1, seconds=0.1, logprobs=array("i", [5, 6])
    )
    second = dataclasses.replace(first, rank=1, **change)  # type: ignore[arg-type]
    group = WorkerGroup(_Ranks([second, first]), 2)  # type: ignore[arg-type]
    group.send(StepPlan(step=3, rows=Rows()))
    if not what:
        assert group.receive(3) is first
        return
    with pytest.raises(Diverged, match=f"^other {what} than rank 0$") as caught:
        group.receive(3)
    assert (caught.value.rank, caught.value.step) == (1, 3)
