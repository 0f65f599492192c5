"""All ranks as one: hand out a command, gather one answer, name the rank that differs."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from unisono.runtime.flight import FlightRecorder
from unisono.runtime.protocol import WorkerLost
from unisono.workers.channel import Hub, ProtocolError
from unisono.workers.protocol import (
    Allocate,
    Fault,
    Hello,
    Loaded,
    LoadWeights,
    Progress,
    Ready,
    Release,
    Shutdown,
    StepPlan,
    StepResult,
    StepsSeen,
    WatchSteps,
)

_SAME_ON_EVERY_RANK = {
    "tokens": "tokens",
    "counts": "tokens",
    "logprobs": "log-probabilities",
    "checksums": "logits",
    "digest": "collectives",
}
"""Fields of a StepResult, and what differs where they do."""
SILENCE_S = 0.1
"""How long ranks may say nothing before the launcher is heard: it may know that one is gone."""


class Diverged(WorkerLost):
    """A rank computes something else than the others."""


class RankFault(WorkerLost):
    """A rank ended by its own exception."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(
            f"rank {fault.rank} failed in phase {fault.phase!r}: {fault.error}: {fault.message}",
            rank=fault.rank,
        )
        self.fault = fault


class WorkerGroup:
    """The runtime's side of the ranks' channel. Every method may raise RankFault."""

    def __init__(self, hub: Hub, num_ranks: int) -> None:
        self._hub = hub
        self._num_ranks = num_ranks
        self.recorder = FlightRecorder()
        self.on_silence: Callable[[], None] = lambda: None
        """Called again and again while ranks are awaited that say nothing."""
        self.on_seen: Callable[[StepsSeen], None] = lambda seen: None
        """Called with what ranks have seen of steps that they were told to watch."""
        self.on_progress: Callable[[Progress], None] = lambda news: None
        """Called with where ranks are while they load or obey an order."""
        self._hellos: dict[int, Hello] = {}
        self.allocated = Allocate(num_blocks=0)
        """What the ranks were last told to take."""
        self.weights = LoadWeights(path="")
        """Where they have their weights from, or will have them when they wake."""
        self.spent_s: dict[str, float] = {}
        """Seconds in which all ranks obeyed, by what, since somebody emptied it."""
        self._last_sent = -1
        self._results: dict[int, dict[int, StepResult]] = {}

    @property
    def pids(self) -> array[int]:
        """Process ids of the ranks, in rank order."""
        return array("i", [self._hellos[rank].pid for rank in range(self._num_ranks)])

    def wait_loaded(self) -> dict[int, Loaded]:
        """Wait until every rank has loaded; what each of them has."""
        loaded: dict[int, Loaded] = {}
        while len(loaded) < self._num_ranks:
            match self._next():
                case Hello() as hello:
                    self._greet(hello)
                case Progress() as news:
                    self.on_progress(news)
                case Loaded() as report:
                    loaded[report.rank] = report
                case other:
                    raise ProtocolError(f"{type(other).__name__} from a rank that is loading")
        return loaded

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """Have every rank take memory for KV and states, and wait until it has."""
        self.allocated = Allocate(num_blocks=num_blocks, num_states=num_states)
        self._await_ready(self.allocated, "taking memory")

    def release(self, *, weights: bool) -> None:
        """Have every rank give the memory of KV and states back, and that of weights if so."""
        self._await_ready(Release(weights=weights), "giving memory back")

    def load(self, wanted: LoadWeights) -> WorkerLost | None:
        """Have every rank take other weights. Returns what one says that could not.

        Then some may have them, and others none.
        """
        # Recorded steps cannot be run again with other weights.
        self.recorder = FlightRecorder()
        errors = self._await_ready(wanted, "loading weights")
        for rank, error in sorted(errors.items()):
            if error:
                return WorkerLost(f"rank {rank}: {error}", rank=rank, phase="load weights")
        self.weights = wanted
        return None

    def send(self, plan: StepPlan) -> None:
        """Start a step on every rank. Further ones may follow before its results are in."""
        self.recorder.plan(plan)
        self._send(plan)
        self._last_sent = plan.step

    def receive(self, step: int) -> StepResult:
        """Wait for `step`, the oldest that is due, on every rank; return what rank 0 says.

        A rank may be ahead of another: what it says of later steps is kept for their turn.
        Raises Diverged naming the first rank whose tokens, log-probabilities or collectives
        differ from rank 0's.
        """
        results = self._results.setdefault(step, {})
        while len(results) < self._num_ranks:
            match self._next():
                case StepResult() as result if step <= result.step <= self._last_sent:
                    self.recorder.result(result)
                    self._results.setdefault(result.step, {})[result.rank] = result
                case StepsSeen() as seen:
                    self.on_seen(seen)
                case other:
                    raise ProtocolError(f"{type(other).__name__} while step {step} is due")
        del self._results[step]
        first = results[0]
        for rank in range(1, self._num_ranks):
            for name, what in _SAME_ON_EVERY_RANK.items():
                if getattr(results[rank], name) != getattr(first, name):
                    raise Diverged(f"other {what} than rank 0", rank=rank, phase="step", step=step)
        return first

    def watch(self, wanted: WatchSteps) -> None:
        """Have every rank watch its next steps."""
        self._send(wanted)

    def check(self) -> None:
        """Raise RankFault if a rank has failed while nothing was due."""
        message = self._hub.receive(0)
        if message is not None:
            match message[1]:
                case Fault() as fault:
                    raise RankFault(fault)
                case other:
                    raise ProtocolError(f"{type(other).__name__} from an idle rank")

    def drain_faults(self, seconds: float) -> list[Fault]:
        """Faults that arrive within `seconds`: the root cause may come after a consequence."""
        faults = []
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            message = self._hub.receive(left)
            if message is not None and isinstance(message[1], Fault):
                faults.append(message[1])
        return faults

    def shutdown(self) -> None:
        """Have every rank end."""
        self._send(Shutdown())

    def _await_ready(self, order: Allocate | Release | LoadWeights, what: str) -> dict[int, str]:
        """Wait until every rank has obeyed; what went wrong on each."""
        began = time.monotonic()
        self._send(order)
        answers: dict[int, str] = {}
        while len(answers) < self._num_ranks:
            match self._next():
                case Ready(rank=rank, error=error):
                    answers[rank] = error
                case Progress() as news:
                    self.on_progress(news)
                case other:
                    raise ProtocolError(f"{type(other).__name__} from a rank {what}")
        self.spent_s[what] = self.spent_s.get(what, 0.0) + time.monotonic() - began
        return answers

    def _send(
        self, message: Allocate | Release | LoadWeights | StepPlan | WatchSteps | Shutdown
    ) -> None:
        for rank in range(self._num_ranks):
            self._hub.send(f"rank {rank}", message)

    def _next(self) -> object:
        while (received := self._hub.receive(SILENCE_S)) is None:
            self.on_silence()
        message = received[1]
        if isinstance(message, Fault):
            raise RankFault(message)
        return message

    def _greet(self, hello: Hello) -> None:
        for other in self._hellos.values():
            if other.config_digest != hello.config_digest:
                raise Diverged(
                    f"on {hello.host} it was started with another configuration than "
                    f"rank {other.rank} on {other.host}",
                    rank=hello.rank,
                    phase="start",
                )
        self._hellos[hello.rank] = hello
