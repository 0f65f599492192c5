"""Parts of the runtime that note what they do: the same decisions, and the right events of them."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest

from tests.runtime.fakes import FakeWorker, request
from tests.runtime.test_ahead import IDLE, Clients, submit
from unisono.runtime.config import RuntimeOrders
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import Abort, Stop
from unisono.runtime.scheduler import Scheduler
from unisono.runtime.timed import RUNTIME, Parts, TimedEngine, TimedGroup, TimedScheduler, parts_for
from unisono.runtime.worker_group import WorkerGroup
from unisono.workers.channel import Hub
from unisono.workers.protocol import Shutdown, StepPlan, StepResult, int32s
from unisono.workers.timeline import Kind, Noted, Timeline, make_ring, ring_bytes

OPTIONS: dict[str, Any] = {
    "num_blocks": 7,
    "max_requests": 3,
    "max_model_len": 400,
    "max_step_tokens": 128,
    "eos_token_ids": (),
}
SCRIPT = [
    (0, submit(0, 150, max_tokens=100)),
    (0, submit(1, 140, max_tokens=70)),
    (20, submit(2, 60, max_tokens=50)),
    (30, Abort(request_id=2)),
    (IDLE, submit(0, 150, max_tokens=3)),
    (IDLE, Stop()),
]
"""More than the blocks can hold at once, one request that leaves, and one that comes again."""


class Ranks:
    """A hub of one rank that computes a plan when it comes and answers when it is asked."""

    def __init__(self) -> None:
        self.worker = FakeWorker(3)
        self.results: deque[StepResult] = deque()

    def send(self, peer: str, message: object) -> None:
        assert isinstance(message, StepPlan | Shutdown)
        if isinstance(message, StepPlan):
            tokens = int32s(self.worker.step(message))
            self.results.append(
                StepResult(rank=0, step=message.step, tokens=tokens, digest=0, seconds=0.0)
            )

    def receive(self, timeout_s: float | None) -> tuple[str, object] | None:
        return ("rank 0", self.results.popleft()) if self.results and timeout_s else None


def serve(parts: Parts) -> Clients:
    clients = Clients(list(SCRIPT))
    workers = parts.workers(cast(Hub, Ranks()), 1)
    scheduler = parts.scheduler(**OPTIONS)
    parts.engine(cast(Hub, clients), workers, scheduler, 400).run()
    return clients


@pytest.fixture(scope="module")
def served() -> tuple[Clients, list[Noted]]:
    timeline = Timeline(bytearray(ring_bytes(8192)), 8192)

    def timed(kind: Any) -> Any:
        return lambda *parts, **options: kind(timeline, *parts, **options)

    clients = serve(Parts(timed(TimedEngine), timed(TimedGroup), timed(TimedScheduler)))
    found = timeline.recorded()
    assert not found.num_dropped
    return clients, list(found.events)


def of(events: list[Noted], kind: Kind) -> list[Noted]:
    return [event for event in events if event.kind is kind]


def test_answers_are_those_of_the_plain_parts(served: tuple[Clients, list[Noted]]) -> None:
    plain = serve(Parts())
    for number in range(3):
        assert served[0].tokens(number) == plain.tokens(number) != []


def test_every_step_is_planned_sent_awaited_and_applied_in_order(
    served: tuple[Clients, list[Noted]],
) -> None:
    _, events = served
    by_step = {
        kind: {event.numbers[0]: event for event in of(events, kind)}
        for kind in (Kind.PLAN, Kind.SEND, Kind.RESULT, Kind.WAIT, Kind.APPLY)
    }
    steps = list(by_step[Kind.PLAN])
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 100
    for kind, found in by_step.items():
        assert list(found) == steps, kind
    for step in steps:
        plan, send, result, wait, apply = (found[step] for found in by_step.values())
        assert plan.end <= send.begin <= send.end <= result.begin
        assert result.begin <= wait.begin <= wait.end <= apply.begin <= apply.end <= result.end
    rows = {event.numbers[1] for event in of(events, Kind.PLAN)}
    tokens = {event.numbers[2] for event in of(events, Kind.PLAN)}
    assert rows >= {1, 2}
    assert max(tokens) <= 128 < sum(tokens)
    applied = sum(event.numbers[1] for event in of(events, Kind.APPLY))
    assert applied >= sum(len(served[0].tokens(number)) for number in range(3))


def test_requests_prefix_hits_preemptions_and_aborts_are_told(
    served: tuple[Clients, list[Noted]],
) -> None:
    clients, events = served
    arrived = [event.numbers[:2] for event in of(events, Kind.ARRIVE)]
    assert arrived == [(0, 150), (1, 140), (2, 60), (0, 150)]
    finished = [message for message in clients.sent if hasattr(message, "num_preemptions")]
    # The aborted one may have been pre-empted, too, and nobody is told how often.
    preempted = [event for event in of(events, Kind.PREEMPT) if event.numbers[0] != 2]
    assert len(preempted) == sum(message.num_preemptions for message in finished) > 0
    assert preempted[0].numbers[0] == 1, "the last to come leaves first"
    assert 140 < preempted[0].numbers[1] < 210
    assert [event.numbers[0] for event in of(events, Kind.ABORT)] == [2]
    hits = [event.numbers[:2] for event in of(events, Kind.PREFIX_HIT)]
    assert hits[-1] == (0, 128), "two whole blocks of the prompt that came again"


def test_the_load_stands_beside_each_plan(served: tuple[Clients, list[Noted]]) -> None:
    _, events = served
    loads = of(events, Kind.LOAD)
    assert len(loads) == len(of(events, Kind.PLAN))
    running, waiting, used = ({load.numbers[place] for load in loads} for place in range(3))
    assert {1, 2} <= running <= {1, 2, 3}
    assert waiting >= {0, 1}
    assert (min(used) >= 1, max(used)) == (True, 7)


def test_parts_are_plain_unless_a_ring_was_made(tmp_path: Path) -> None:
    orders = cast(RuntimeOrders, type("Orders", (), {"timeline_dir": ""})())
    assert parts_for(orders) == (Engine, WorkerGroup, Scheduler)
    orders = cast(RuntimeOrders, type("Orders", (), {"timeline_dir": str(tmp_path)})())
    make_ring(tmp_path, RUNTIME).close()
    scheduler = parts_for(orders).scheduler(**OPTIONS)
    assert isinstance(scheduler, TimedScheduler)
    scheduler.add(request(0, 5, 1))
    assert scheduler.next_plan() is not None
    assert scheduler.apply(array("i", [7]))
