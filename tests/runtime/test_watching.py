"""What the runtime hands on of steps that are watched, and how long it says it waited."""

from __future__ import annotations

from array import array
from collections import deque

import pytest

from tests.runtime.fakes import scheduler
from tests.workers.test_timings import WATCHED
from unisono.runtime import engine as engine_module
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import Finished, SamplingParams, Stop, Submit
from unisono.runtime.worker_group import WorkerGroup
from unisono.workers.protocol import Phase, StepPlan, StepResult
from unisono.workers.timings import StepsSeen, WatchSteps

WATCH = WatchSteps(num_rows=1, num_tokens=1, phase=int(Phase.DECODE), skip=0, num_steps=2)


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Ranks:
    """A hub with two ranks that take a second for each step, and see nothing for its first half.

    Rank 1 has seen its steps before its last result.
    """

    def __init__(self, clock):
        self.clock, self.sent = clock, []
        self.answers = deque()
        self.silent = True

    def send(self, name, message):
        self.sent.append((name, message))
        if not isinstance(message, StepPlan):
            return
        rank = int(name.split()[1])
        tokens = [7] * sum(phase != Phase.CHUNK for phase in message.rows.phase)
        if rank == 1 and message.step == 2:
            self.answers.append((name, StepsSeen(rank=1, watched=WATCHED)))
        result = StepResult(
            rank=rank, step=message.step, tokens=array("i", tokens), digest=0, seconds=0.0
        )
        self.answers.append((name, result))

    def receive(self, timeout_s):
        if self.silent:
            self.clock.now += 0.5
            self.silent = False
            return None
        answer = self.answers.popleft()
        if answer[0] == "rank 1" and isinstance(answer[1], StepResult):
            self.clock.now += 0.5
            self.silent = True
        return answer


class Clients:
    def __init__(self, clock):
        self.clock, self.sent = clock, []
        self.waiting = deque()

    def send(self, name, message):
        self.sent.append((name, message))
        self.clock.now += 0.125

    def receive(self, timeout_s):
        return self.waiting.popleft() if self.waiting else None


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(engine_module, "time", found)
    return found


def submit(request_id):
    return Submit(
        request_id=request_id,
        prompt_ids=array("i", [1, 2, 3]),
        params=SamplingParams(max_tokens=4, ignore_eos=True),
    )


def test_what_ranks_have_seen_reaches_who_asked(clock):
    ranks, clients = Ranks(clock), Clients(clock)
    workers = WorkerGroup(ranks, 2)
    clients.waiting += [("bench", WATCH), ("bench", submit(1))]
    engine = Engine(clients, workers, scheduler(), 400)
    engine._drain()
    assert ranks.sent == [("rank 0", WATCH), ("rank 1", WATCH)]
    while engine._scheduler.has_work:
        engine._send_plans()
        engine._take_result()
        engine._tell()
    assert ("bench", StepsSeen(rank=1, watched=WATCHED)) in clients.sent
    assert [m.token_ids[0] for _, m in clients.sent if hasattr(m, "token_ids")] == [7] * 4


def test_waiting_is_what_lies_within_a_request(clock):
    """The second request comes in the middle of a wait, of which it has the second half."""
    ranks, clients = Ranks(clock), Clients(clock)
    engine = Engine(clients, WorkerGroup(ranks, 2), scheduler(), 400)
    clients.waiting.append(("a", submit(1)))
    engine._drain()
    clients.waiting.append(("b", submit(2)))
    while engine._scheduler.has_work:
        engine._send_plans()
        engine._take_result()
        engine._tell()
    ends = [message for _, message in clients.sent if isinstance(message, Finished)]
    # Each step is a second of waiting, each message that is sent before takes an eighth.
    assert [end.waited_s for end in ends] == [4.0, 5.5]
    assert [end.total_s for end in ends] == [4.0 + 4 * 0.125, 5.5 + 8 * 0.125]


def test_the_runtime_still_stops(clock):
    clients = Clients(clock)
    clients.waiting.append(("a", Stop()))
    ranks = Ranks(clock)
    Engine(clients, WorkerGroup(ranks, 1), scheduler(), 400).run()
    assert len(ranks.sent) == 1
