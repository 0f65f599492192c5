"""A state machine that drives a scheduler against the fake worker and checks all that comes."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.runtime.fakes import FakeWorker, expected, next_token, request, scheduler
from unisono.runtime.protocol import RequestRejected
from unisono.runtime.request import Request, blocks_for
from unisono.runtime.scheduler import Scheduler
from unisono.workers.protocol import Phase, StepPlan

EOS = 7
MAX_STEPS_TO_THE_END = 5000


class Checker(RuleBasedStateMachine):
    """Arrivals, aborts, restarts and steps in any order; every answer must be its prompt's own.

    Few blocks make pre-emptions and evictions frequent; prompts are laid of three bricks of a
    block each, so that they share beginnings, and have equal blocks behind different ones.
    """

    def __init__(self, kind: type[Scheduler] = Scheduler, seen: Counter[str] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.seen = Counter() if seen is None else seen
        self.asked: list[Request] = []
        self.answers: list[list[int]] = []
        self.ended: dict[int, str] = {}
        self.sound = False

    @initialize(
        num_blocks=st.integers(3, 8),
        max_requests=st.sampled_from([1, 2, 3, 6]),
        max_step_tokens=st.sampled_from([64, 100, 130, 1000]),
    )
    def start(self, num_blocks: int, max_requests: int, max_step_tokens: int) -> None:
        self.num_blocks, self.max_step_tokens = num_blocks, max_step_tokens
        self.num_slots = max_requests
        self.plans = scheduler(num_blocks, max_requests, max_step_tokens, EOS, kind=self.kind)
        self.worker = FakeWorker(max_requests)
        self.sound = True

    @rule(
        jobs=st.lists(
            st.tuples(
                st.lists(st.integers(0, 1), min_size=1, max_size=3),
                st.sampled_from([0, 0, 1, 2, 30, 63]),
                st.sampled_from([1, 2, 40, 70, 130, 200]),
                st.sampled_from([0, 0, 0, -1, 1]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, jobs: list[tuple[list[int], int, int, int]]) -> None:
        for bricks, cut, max_tokens, priority in jobs:
            number = len(self.asked)
            prompt = array("i", [100 * brick + i for brick in bricks for i in range(64)])
            prompt = prompt[: len(prompt) - cut]
            asked = request(number, len(prompt), max_tokens, priority=priority)
            asked.prompt_ids = prompt
            fits = blocks_for(len(prompt) + max_tokens - 1) <= self.num_blocks
            try:
                self.plans.add(asked)
            except RequestRejected:
                assert not fits
                continue
            assert fits
            self.asked.append(asked)
            self.answers.append([])

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self._step():
                break

    @precondition(lambda self: len(self.ended) < len(self.asked))
    @rule(which=st.integers(0, 20), in_flight=st.booleans())
    def abort(self, which: int, in_flight: bool) -> None:
        going = [i for i in range(len(self.asked)) if i not in self.ended]
        number = going[which % len(going)]
        if in_flight:
            self._step(abort=number)
        else:
            self._abort(number)
            self.plans.audit()

    @rule(in_flight=st.booleans(), chance=st.integers(0, 7))
    def restart(self, in_flight: bool, chance: int) -> None:
        if chance:
            return
        if in_flight and (plan := self.plans.next_plan()) is not None:
            self.worker.step(plan)
        self.plans.restart()
        self.worker = FakeWorker(self.num_slots)
        self.plans.audit()
        self.seen["restarts"] += 1

    def teardown(self) -> None:
        """Run to the end: all that was asked is answered and every block is free again."""
        if not self.sound:
            return
        for _ in range(MAX_STEPS_TO_THE_END):
            if not self._step():
                break
        assert not self.plans.has_work, "no progress"
        assert self.plans.ledger.num_free == self.num_blocks
        for asked, answer in zip(self.asked, self.answers, strict=True):
            reason = self.ended[asked.request_id]
            if reason != "abort":
                assert (answer, reason) == expected(asked, EOS)
        self.seen["pre-emptions"] += self.plans.num_preemptions
        self.seen["hits"] += sum(asked.num_cached_tokens > 0 for asked in self.asked)

    def _step(self, abort: int | None = None) -> bool:
        """One step, with an abort while it runs; False if there was nothing to compute."""
        self.sound = False
        plan = self.plans.next_plan()
        self.plans.audit()
        if plan is not None:
            self._check_plan(plan)
            tokens = self.worker.step(plan)
        if abort is not None:
            self._abort(abort)
        if plan is not None:
            for news in self.plans.apply(tokens):
                self._take(news.request.request_id, news.token_id, news.reason)
            self.plans.audit()
            self.seen["steps"] += 1
        self.sound = True
        return plan is not None

    def _check_plan(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert len(rows) > 0
        assert sum(rows.count) <= self.max_step_tokens
        for start, count, phase in zip(rows.start, rows.count, rows.phase, strict=True):
            assert phase != Phase.CHUNK or (start + count) % 64 == 0, "a chunk off the grid"

    def _take(self, number: int, token_id: int, reason: str | None) -> None:
        assert number not in self.ended, "a token after the end"
        answer = self.answers[number]
        assert token_id == next_token([*self.asked[number].prompt_ids, *answer])
        answer.append(token_id)
        assert len(answer) <= self.asked[number].max_tokens, "too long an answer"
        if reason is not None:
            self.ended[number] = reason

    def _abort(self, number: int) -> None:
        self.plans.abort("c", number)
        self.ended[number] = "abort"
        self.seen["aborts"] += 1
