"""Steps planned before the last results are in: scheduler, engine loop and group of ranks."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace
from itertools import repeat
from typing import Any, cast

import pytest

from tests.runtime.fakes import FakeWorker, drain, expected, request, scheduler, told
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import (
    Abort,
    Delta,
    Finished,
    Reschedule,
    SamplingParams,
    Stop,
    Submit,
    Tokens,
    WorkerLost,
)
from unisono.runtime.scheduler import NewToken, Scheduler
from unisono.runtime.worker_group import Diverged, WorkerGroup
from unisono.workers.channel import Hub, ProtocolError
from unisono.workers.protocol import (
    Allocate,
    Phase,
    Rows,
    Shutdown,
    StepPlan,
    StepResult,
    int32s,
)

IDLE = -1


class Ranks:
    """A fake group of ranks: runs a plan when it is sent, answers when it is asked."""

    def __init__(self) -> None:
        self.worker = FakeWorker(4)
        self.due: deque[tuple[int, list[int], list[int]]] = deque()
        self.most_due = 0
        self.allocated = Allocate(num_blocks=64)
        self.is_shut = False

    def send(self, plan: StepPlan) -> None:
        self.due.append((plan.step, *self.worker.run(plan, repeat(0))))
        self.most_due = max(self.most_due, len(self.due))

    def receive(self, step: int) -> StepResult:
        number, tokens, counts = self.due.popleft()
        assert number == step
        return StepResult(
            rank=0,
            step=step,
            tokens=int32s(tokens),
            counts=int32s(counts if 0 in counts else []),
            digest=0,
            seconds=0.0,
            num_replays=3 * step,
            eager=("prompt tokens", "sampling") if step == 1 else ("sampling",) * (step % 2),
        )

    def check(self) -> None:
        assert not self.due, "idle with a result due"

    def shutdown(self) -> None:
        assert not self.due, "shut down with a result due"
        self.is_shut = True


class Clients:
    """A fake hub: each entry of `script` comes when so many answers were sent, or when IDLE."""

    def __init__(self, script: list[tuple[int, object]]) -> None:
        self.script = deque(script)
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None) -> tuple[str, object] | None:
        is_idle = bool(timeout_s)
        if self.script and (is_idle or 0 <= self.script[0][0] <= len(self.sent)):
            return "c", self.script.popleft()[1]
        return None

    def send(self, client: str, message: object) -> None:
        self.sent.append(message)

    def tokens(self, number: int) -> list[int]:
        return told(self.sent, number)

    def tellings(self) -> list[list[int]]:
        """Whose tokens each message has."""
        news = [each for each in self.sent if isinstance(each, Delta | Tokens)]
        return [
            [each.request_id] if isinstance(each, Delta) else list(each.request_ids)
            for each in news
        ]


def submit(number: int, length: int, **params: Any) -> Submit:
    return Submit(
        request_id=number,
        prompt_ids=request(number, length, 1).prompt_ids,
        params=SamplingParams(**params),
    )


def serve(script: list[tuple[int, object]], **options: Any) -> tuple[Clients, Ranks, Scheduler]:
    clients, ranks, plans = Clients(script), Ranks(), scheduler(**options)
    Engine(cast(Hub, clients), cast(WorkerGroup, ranks), plans, 400).run()
    assert ranks.is_shut
    return clients, ranks, plans


def test_the_engine_keeps_two_steps_in_flight_and_ends_with_none() -> None:
    """Behind a stop id there is a row in vain; its result is taken before the engine idles."""
    answer, _ = expected(request(0, 70, 40))
    stop = (answer[20],)
    clients, ranks, plans = serve(
        [(0, submit(0, 70, max_tokens=40, stop_token_ids=stop)), (IDLE, Stop())]
    )
    assert clients.tokens(0) == answer[:21]
    assert ranks.most_due == 2
    assert not plans.has_work
    finished = clients.sent[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.num_tokens) == ("stop", 21)


def test_an_engine_takes_other_limits_once_no_step_is_under_way() -> None:
    """The row in vain behind a stop id lands first; then nothing is cached, and steps go on."""
    answer, _ = expected(request(0, 70, 40))
    asked = submit(0, 70, max_tokens=40, stop_token_ids=(answer[20],))
    limits = Reschedule(num_blocks=2, max_step_tokens=64, prefix_cache=False)
    clients, _, plans = serve(
        [
            (0, asked),
            (22, limits),  # 21 tokens and the end are sent, the next step is under way
            (23, submit(1, 70, max_tokens=40)),
            (IDLE, Stop()),
        ]
    )
    assert clients.sent.index(limits) == 22
    first, second = (event for event in clients.sent if isinstance(event, Finished))
    assert (second.num_cached_tokens, plans.ledger.num_blocks) == (0, 2)
    assert clients.tokens(1) == expected(request(1, 70, 40))[0]
    # The counts of the ranks go on, and a chunk of 64 tokens is a step of its own.
    assert first.num_replays < second.num_replays == 3 * (22 + 41)
    assert dict(second.eager) == {"prompt tokens": 1, "sampling": (22 + 41 + 1) // 2}


def test_requests_that_follow_each_other_begin_in_one_step() -> None:
    """The second comes only when the engine has time to wait: it waits for it, not for a third."""
    first = replace(submit(0, 70, max_tokens=5), more=True)
    clients, _, _ = serve([(0, first), (IDLE, submit(1, 30, max_tokens=5)), (IDLE, Stop())])
    assert clients.tellings() == [[0], [1]] + [[0, 1]] * 4
    for number, length in ((0, 70), (1, 30)):
        assert clients.tokens(number) == expected(request(number, length, 5))[0]
    clients, _, _ = serve(
        [(0, replace(first, more=False)), (IDLE, submit(1, 30, max_tokens=5)), (IDLE, Stop())]
    )
    assert clients.tellings() == [[0]] * 5 + [[1]] * 5


def test_tokens_of_a_step_are_told_at_once_and_more_than_tokens_one_by_one() -> None:
    """The first of each answer comes alone, so do those with checksums; ends come behind tokens."""
    asked = [submit(number, 9 + number, max_tokens=4) for number in range(4)]
    asked[2] = replace(asked[2], checksums=True)

    class Summing(Ranks):
        def receive(self, step: int) -> StepResult:
            return replace(super().receive(step), checksums=array("q", [step]))

    clients = Clients([*((0, each) for each in asked), (IDLE, Stop())])
    Engine(cast(Hub, clients), cast(WorkerGroup, Summing()), scheduler(), 400).run()
    assert clients.tellings() == [[0], [1], [2], [3]] + [[2], [0, 1, 3]] * 3
    assert [isinstance(each, Finished) for each in clients.sent[-5:]] == [False] + [True] * 4
    sums = [each.checksums for each in clients.sent if isinstance(each, Delta)]
    assert sums == [None, None, array("q", [1]), None] + [array("q", [step]) for step in (2, 3, 4)]
    for number in range(4):
        assert clients.tokens(number) == expected(request(number, 9 + number, 4))[0]


def test_a_request_is_named_once_for_each_token_of_a_step() -> None:
    clients, plans = Clients([]), scheduler()
    engine = Engine(cast(Hub, clients), cast(WorkerGroup, Ranks()), plans, 400)
    one, two = request(1, 5, 9), request(2, 5, 9)
    engine._news = [NewToken(one, 30, None), NewToken(two, 40, None), NewToken(one, 31, None)]
    engine._news += [NewToken(one, 32, "length")]
    engine._tell()
    assert clients.tellings() == [[1], [2], [1, 1]]
    assert (clients.tokens(1), clients.tokens(2)) == ([30, 31, 32], [40])
    assert isinstance(clients.sent[-1], Finished)
    engine._tell()
    assert len(clients.sent) == 4, "nothing is told twice"


def test_ranks_have_their_next_plan_before_anybody_hears_of_the_last_result() -> None:
    log: list[str] = []

    class Noted(Clients):
        def send(self, client: str, message: object) -> None:
            log.append(type(message).__name__)
            super().send(client, message)

    class Slow(Ranks):
        def send(self, plan: StepPlan) -> None:
            log.append("plan")
            super().send(plan)

        def receive(self, step: int) -> StepResult:
            log.append("result")
            return super().receive(step)

    clients = Noted([(0, submit(0, 9, max_tokens=4)), (IDLE, Stop())])
    Engine(cast(Hub, clients), cast(WorkerGroup, Slow()), scheduler(), 400).run()
    assert log[:8] == ["plan", "plan", "result", "plan", "Delta", "result", "plan", "Tokens"]
    # Nothing is left to plan: what the last step said is told before the engine waits.
    assert log[8:] == ["result", "Tokens", "result", "Tokens", "Finished"]


def test_what_came_before_a_rank_was_lost_is_told_first() -> None:
    class Mortal(Ranks):
        def send(self, plan: StepPlan) -> None:
            if plan.step == 4:
                raise WorkerLost("rank 0 has died")
            super().send(plan)

    clients = Clients([(0, submit(0, 9, max_tokens=8))])
    with pytest.raises(WorkerLost, match="has died"):
        Engine(cast(Hub, clients), cast(WorkerGroup, Mortal()), scheduler(), 400).run()
    # Steps 1 and 2 had answered before step 4 could not be sent.
    assert clients.tokens(0) == expected(request(0, 9, 8))[0][:2]


def test_accepted_drafts_may_leap_over_the_end_of_a_block() -> None:
    """The block is found by the next request all the same."""
    plans, worker = scheduler(num_drafts=8), FakeWorker(4)
    first = request(0, 60, 30)
    plans.add(first)
    while plans.has_work:
        plan = cast(StepPlan, plans.next_plan())
        plans.apply(*worker.run(plan, iter([8])))
        plans.audit()
    again = request(1, 1, 2)
    again.prompt_ids = first.tokens(0, 88)
    plans.add(again)
    drain(plans, worker)
    assert again.num_cached_tokens == 64


def test_limits_are_not_changed_under_a_request() -> None:
    plans = scheduler()
    plans.add(request(0, 70, 5))
    with pytest.raises(AssertionError, match="requests are there"):
        plans.reschedule(Reschedule(num_blocks=2, max_step_tokens=64, prefix_cache=True))


def test_stop_and_abort_with_steps_in_flight() -> None:
    other, _ = expected(request(1, 30, 50))
    clients, ranks, _ = serve(
        [
            (0, submit(0, 70, max_tokens=200)),
            (3, submit(1, 30, max_tokens=50)),
            (20, Abort(request_id=0)),
            (40, submit(2, 9, max_tokens=300)),
            (100, Stop()),
        ]
    )
    assert ranks.most_due == 2
    assert clients.tokens(0) == expected(request(0, 70, 200))[0][: len(clients.tokens(0))]
    assert clients.tokens(1) == other
    assert clients.tokens(2), "it was being answered when Stop came"


def test_a_request_gets_no_row_behind_its_last_token() -> None:
    plans, worker = scheduler(), FakeWorker(4)
    plans.add(request(0, 5, 2))
    steps = [plans.next_plan(), plans.next_plan()]
    assert None not in steps
    assert plans.next_plan() is None, "two are in flight"
    plans.apply(worker.step(cast(StepPlan, steps[0])))
    assert plans.next_plan() is None, "the last token is in flight"
    assert plans.num_in_flight == 1
    assert plans.apply(worker.step(cast(StepPlan, steps[1])))[0].reason == "length"
    assert not plans.has_work


def test_who_needs_the_host_skips_a_step_and_holds_nobody_back() -> None:
    plans, worker = scheduler(), FakeWorker(4)
    slow, fast = request(0, 5, 20), request(1, 6, 40)
    slow.needs_host = True
    for asked in (slow, fast):
        plans.add(asked)
    due: deque[list[int]] = deque()
    rows: list[int] = []
    answers: dict[int, list[int]] = {0: [], 1: []}
    while plans.has_work:
        while (plan := plans.next_plan()) is not None:
            due.append(worker.step(plan))
            rows.append(len(plan.rows))
        for news in plans.apply(due.popleft()):
            answers[news.request.request_id].append(news.token_id)
    assert answers == {0: expected(slow)[0], 1: expected(fast)[0]}
    assert rows == [2, 1] * 20, "every second step has it, every step has the other"


def test_short_of_blocks_nothing_is_planned_ahead_and_nobody_is_pre_empted_in_flight() -> None:
    plans, worker = scheduler(num_blocks=3, prefix_cache=False), FakeWorker(4)
    for number in range(2):
        plans.add(request(number, 63, 60))
    first, second = plans.next_plan(), plans.next_plan()
    assert first is not None
    assert second is not None
    tokens = [worker.step(first), worker.step(second)]
    plans.apply(tokens[0])
    assert plans.next_plan() is None, "both need a second block and one is left"
    assert (plans.has_work, plans.num_preemptions) == (True, 0)
    plans.apply(tokens[1])
    answers = drain(plans, worker)
    assert plans.num_preemptions > 0
    for number in range(2):
        assert answers[number] == expected(request(number, 63, 60))[0][2:]


def test_drafts_end_with_the_room_of_the_request() -> None:
    """Rows of 1 + 8 tokens, two in flight, reserve the most and never pass max_tokens."""
    plans, worker = scheduler(num_drafts=8), FakeWorker(4)
    asked = request(0, 62, 30)
    plans.add(asked)
    due: deque[tuple[list[int], list[int]]] = deque()
    drafts, answer = [], []
    while plans.has_work:
        while (plan := plans.next_plan()) is not None:
            plans.audit()
            due.append(worker.run(plan, iter([5])))
            drafts += list(plan.rows.drafts) or [0]
        for news in plans.apply(*due.popleft()):
            answer.append(news.token_id)
        plans.audit()
    assert answer == expected(asked)[0]
    # After the prompt's 1 each row answers 6, but while it is due it may answer 9.
    assert drafts == [0, 8, 8, 8, 7, 2, 1]
    assert len(worker.tokens[1]) == 62 + 30


class RankHub:
    """A fake hub of ranks: what they say, in the order in which it comes."""

    def __init__(self, results: list[StepResult]) -> None:
        self.results = deque(results)
        self.sent: list[object] = []

    def send(self, peer: str, message: object) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float | None) -> tuple[str, object]:
        result = self.results.popleft()
        return f"rank {result.rank}", result


def result(rank: int, step: int, token: int, digest: int = 0) -> StepResult:
    return StepResult(rank=rank, step=step, tokens=array("i", [token]), digest=digest, seconds=0.0)


def group(*results: StepResult) -> WorkerGroup:
    workers = WorkerGroup(cast(Hub, RankHub(list(results))), 3)
    for step in (1, 2):
        workers.send(StepPlan(step=step, rows=Rows(phase=int32s([Phase.PROMPT]))))
    return workers


def test_a_rank_may_be_a_step_ahead_of_the_others() -> None:
    workers = group(*(result(rank, step, 10 * step) for rank in (2, 0, 1) for step in (1, 2)))
    assert [workers.receive(step).tokens[0] for step in (1, 2)] == [10, 20]
    workers.shutdown()
    assert isinstance(cast(Any, workers)._hub.sent[-1], Shutdown)


@pytest.mark.parametrize(("digests", "what"), [((0, 7, 7), "collectives"), ((0, 0, 0), "tokens")])
def test_the_first_rank_that_diverges_is_named_in_its_step(
    digests: tuple[int, ...], what: str
) -> None:
    ahead = [result(rank, 2, 5, 0) for rank in (2, 1)]
    tokens = (5, 6, 6) if what == "tokens" else (5, 5, 5)
    workers = group(*ahead, *(result(rank, 1, tokens[rank], digests[rank]) for rank in (2, 1, 0)))
    with pytest.raises(Diverged, match=f"other {what} than rank 0") as caught:
        workers.receive(1)
    assert (caught.value.rank, caught.value.step) == (1, 1)


@pytest.mark.parametrize("step", [0, 3])
def test_a_result_that_is_not_due_ends_the_session(step: int) -> None:
    with pytest.raises(ProtocolError, match="while step 1 is due"):
        group(result(0, step, 5)).receive(1)
