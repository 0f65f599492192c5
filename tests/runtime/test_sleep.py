"""Sleep, wake and other weights as the runtime obeys them: between steps, on all ranks or none."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from tests.runtime.fakes import FakeWorker, expected, request, scheduler, told
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import (
    EngineState,
    Finished,
    Reload,
    Sleep,
    Stop,
    Submit,
    Wake,
    WorkerLost,
)
from unisono.runtime.worker_group import RankFault, WorkerGroup
from unisono.workers.protocol import (
    Allocate,
    Fault,
    LoadWeights,
    Progress,
    Ready,
    Release,
    Shutdown,
    StepPlan,
    StepResult,
)

OWN = LoadWeights(path="own")
MOVE = 6
"""How often the ranks are heard between two things that the client says."""


class Ranks:
    """A hub with two ranks that obey; a step's result comes when it is asked for.

    `faults`: by path, the ranks that cannot load it. Rank 1 has what rank 0 has.
    """

    def __init__(self, faults: dict[str, Sequence[int]]) -> None:
        self.faults = faults
        self.worker = FakeWorker(4)
        self.log: list[object] = []
        self.answers: deque[tuple[str, object]] = deque()
        self.has_memory, self.num_due = True, 0
        self.num_heard = 0

    def send(self, name: str, message: object) -> None:
        rank = int(name.split()[1])
        if rank == 0:
            self.log.append(message)
        match message:
            case StepPlan():
                assert self.has_memory, "a plan for ranks that sleep"
                if rank == 0:
                    self.tokens = array("i", self.worker.step(message))
                result = StepResult(
                    rank=rank, step=message.step, tokens=self.tokens, digest=0, seconds=0.0
                )
                self.num_due += 1
                self.answers.append((name, result))
            case Shutdown():
                pass
            case Allocate() | Release() | LoadWeights():
                assert not self.num_due, "a step is in flight"
                self.answers.append((name, Progress(rank=rank, phase="load weights")))
                self.answers.append((name, self.obey(rank, message)))

    def obey(self, rank: int, message: object) -> object:
        match message:
            case Allocate():
                self.worker, self.has_memory = FakeWorker(4), True
            case Release():
                self.has_memory = False
            case LoadWeights(path="deadly") if rank == 1:
                return Fault(rank=1, phase="load", step=3, error="E", message="m", traceback="")
            case LoadWeights(path=path):
                self.worker = FakeWorker(4)
                return Ready(rank=rank, error="no" if rank in self.faults.get(path, ()) else "")
        return Ready(rank=rank)

    def receive(self, timeout_s: float) -> tuple[str, object] | None:
        self.num_heard += 1
        if self.num_heard % MOVE == 0 or not self.answers:
            return None
        answer = self.answers.popleft()
        self.num_due -= isinstance(answer[1], StepResult)
        return answer


class Client:
    """Says the next of `script` each time the runtime has heard enough of its ranks."""

    def __init__(self, ranks: Ranks, script: Sequence[object]) -> None:
        self.ranks, self.script = ranks, deque(script)
        self.next_at = 0
        self.sent: list[Any] = []

    def send(self, name: str, message: object) -> None:
        assert name == "c"
        self.sent.append(message)

    def receive(self, timeout_s: float) -> tuple[str, object] | None:
        if timeout_s:  # an idle engine would wait for ever
            self.next_at = self.ranks.num_heard
        if self.ranks.num_heard < self.next_at or not self.script:
            return ("c", Stop()) if timeout_s and not self.script else None
        self.next_at = self.ranks.num_heard + MOVE
        return "c", self.script.popleft()


ASKED = [request(number, 90, 30, family=number % 2) for number in range(5)]
SUBMITS = [Submit(request_id=a.request_id, prompt_ids=a.prompt_ids, params=a.params) for a in ASKED]


def serve(script: Sequence[object], **faults: Sequence[int]) -> tuple[Client, Ranks, WorkerGroup]:
    ranks = Ranks(faults)
    client = Client(ranks, script)
    workers: Any = WorkerGroup(ranks, 2)  # type: ignore[arg-type]
    workers.weights, workers.allocated = OWN, Allocate(num_blocks=20)
    Engine(client, workers, scheduler(), 400).run()  # type: ignore[arg-type]
    return client, ranks, workers


def check_answers(client: Client) -> None:
    for asked in ASKED:
        assert (told(client.sent, asked.request_id), "length") == expected(asked)


def states(client: Client) -> list[EngineState]:
    return [each for each in client.sent if isinstance(each, EngineState)]


def orders(ranks: Ranks) -> list[object]:
    return [each for each in ranks.log if not isinstance(each, StepPlan | Shutdown)]


def test_it_sleeps_between_steps_and_every_answer_is_whole() -> None:
    naps = [Sleep(level=1), Sleep(level=1), Sleep(level=2), Sleep(level=1), Wake(), Wake()]
    client, ranks, _ = serve([*SUBMITS[:3], *naps, SUBMITS[3], Sleep(level=2), SUBMITS[4], Wake()])
    assert states(client) == [
        EngineState(level=1),
        EngineState(level=1),
        EngineState(level=2),
        EngineState(level=2),
        EngineState(),
        EngineState(),
        EngineState(level=2),
        EngineState(),
    ]
    deep = [Release(weights=True), OWN, Allocate(num_blocks=20)]
    assert orders(ranks) == [Release(weights=False), *deep, *deep]
    assert any(isinstance(each, StepPlan) for each in ranks.log[: ranks.log.index(Release())])
    ended = [message for message in client.sent if isinstance(message, Finished)]
    assert {message.num_preemptions for message in ended} == {0}, "a pause is no lack of memory"
    check_answers(client)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_other_weights_are_taken_at_once_or_when_it_wakes(level: int) -> None:
    nap = [Sleep(level=level)] if level else []
    other = LoadWeights(path="other")
    reload = Reload(path="other", load_format="auto")
    client, ranks, workers = serve([*SUBMITS, *nap, reload, Wake()])
    asleep = [EngineState(level=level)] * 2 if level else [EngineState()]
    assert states(client) == [*asleep, EngineState()]
    before = [Release(weights=level == 2)] if level else []
    after = [Allocate(num_blocks=20)] if level else []
    assert orders(ranks) == [*before, other, *after]
    assert workers.weights == other
    check_answers(client)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_weights_that_one_rank_cannot_load_are_taken_by_none(
    level: int, failing: tuple[int, ...]
) -> None:
    nap = [Sleep(level=1)] if level else []
    reload = Reload(path="torn", load_format="auto")
    client, ranks, workers = serve([*SUBMITS, *nap, reload, Wake()], torn=failing)
    error = f"rank {failing[0]}: no"
    said = EngineState(level=1, error=error) if level else EngineState(error=error)
    assert states(client)[-2:] == [said, EngineState()]
    assert orders(ranks)[level : level + 2] == [LoadWeights(path="torn"), OWN]
    assert workers.weights == OWN
    check_answers(client)


def test_it_sleeps_on_without_weights_and_holds_no_memory() -> None:
    wakes = [Wake(), Reload(path="own", load_format="auto"), Wake()]
    torn = Reload(path="torn", load_format="auto")
    client, ranks, _ = serve([*SUBMITS, Sleep(level=2), torn, *wakes], torn=[1])
    asleep = EngineState(level=2)
    failed = EngineState(level=2, error="rank 1: no")
    assert states(client) == [asleep, asleep, failed, asleep, EngineState()]
    release = Release(weights=True)
    assert orders(ranks) == [
        *(release, LoadWeights(path="torn"), release),
        *(OWN, Allocate(num_blocks=20)),
    ]
    check_answers(client)


def test_where_the_former_weights_are_gone_too_the_rank_is_named() -> None:
    with pytest.raises(WorkerLost, match=r"^rank 0: no$") as lost:
        serve([*SUBMITS, Reload(path="torn", load_format="auto")], torn=[1], own=[0])
    assert (lost.value.rank, lost.value.phase) == (0, "load weights")


def test_a_rank_that_ends_in_it_is_named() -> None:
    with pytest.raises(RankFault, match=r"^rank 1 failed in phase 'load': E: m$"):
        serve([*SUBMITS, Reload(path="deadly", load_format="auto")])


class Clock:
    """Time that passes only while ranks answer: a second for a step, ten for anything else."""

    def __init__(self, ranks: Ranks) -> None:
        self.now, self.receive = 100.0, ranks.receive
        ranks.receive = self.passing  # type: ignore[method-assign]

    def passing(self, timeout_s: float) -> tuple[str, object] | None:
        answer = self.receive(timeout_s)
        if answer is not None and answer[0] == "rank 1" and not isinstance(answer[1], Progress):
            self.now += 1 if isinstance(answer[1], StepResult) else 10
        return answer


def test_it_says_what_the_pause_went_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: what was in flight, then each thing that ranks were told; of a failed load twice."""
    script = [Sleep(level=1), Wake(), Reload(path="torn", load_format="auto"), Sleep(level=2)]
    ranks = Ranks({"torn": [1]})
    clock = Clock(ranks)
    monkeypatch.setattr("unisono.runtime.engine.time.monotonic", lambda: clock.now)
    client = Client(ranks, [*SUBMITS, *script, Sleep(level=1), Wake()])
    workers: Any = WorkerGroup(ranks, 2)  # type: ignore[arg-type]
    workers.weights, workers.allocated = OWN, Allocate(num_blocks=20)
    Engine(client, workers, scheduler(), 400).run()  # type: ignore[arg-type]
    check_answers(client)
    told = [dict(state.took) for state in states(client)]
    flights = [took.pop("steps in flight") for took in told]
    assert flights[0] == 1, "a step was under way"
    assert {*flights} <= {0, 1}
    assert [took.pop("the rest") for took in told] == [0] * 6
    assert told == [
        {"giving memory back": 10},
        {"taking memory": 10},
        {"loading weights": 20},
        {"giving memory back": 10},
        {},
        {"loading weights": 10, "taking memory": 10},
    ]


def test_it_stops_asleep() -> None:
    client, ranks, _ = serve([*SUBMITS, Sleep(level=2)])
    assert states(client) == [EngineState(level=2)]
    assert isinstance(ranks.log[-1], Shutdown)
