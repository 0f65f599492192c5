"""The parts of a rank that note what they do, for `--trace`. Without it none of this runs.

On a GPU events at both ends of each piece of a step tell where it lay on the device. They record
the device's own time; reading them waits for nothing, since only those are read that are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from unisono.ops.comm import Group
from unisono.workers.channel import Peer
from unisono.workers.device import join_group
from unisono.workers.graph_pool import GraphPool
from unisono.workers.model_runner import LateOutput
from unisono.workers.orders import WorkerOrders
from unisono.workers.protocol import Allocate, LoadWeights, Release, StepPlan
from unisono.workers.reporter import Reporter
from unisono.workers.timeline import Kind, Timeline, now, open_ring
from unisono.workers.worker import Worker

T = TypeVar("T")
_COLLECTIVES = {"all_reduce": Kind.ALL_REDUCE, "max": Kind.MAX, "gather": Kind.GATHER}
_ON_DEVICE = {"forward": Kind.DEVICE_FORWARD, "tail": Kind.DEVICE_TAIL}


class Event(Protocol):
    """What is needed of a CUDA event that records time."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


def make_worker(orders: WorkerOrders, peer: Peer, report: Reporter) -> Worker:
    """The plain worker, or one that notes what it does, if the orders say where."""
    timeline = open_ring(orders.timeline_dir, f"rank {orders.rank}")
    if timeline is None:
        return Worker(orders, peer, report)
    return TimedWorker(orders, peer, report, timeline)


class TimedWorker(Worker):
    """Notes what it receives, launches, waits for and answers."""

    def __init__(
        self, orders: WorkerOrders, peer: Peer, report: Reporter, timeline: Timeline
    ) -> None:
        super().__init__(orders, peer, report)
        self._timeline = timeline
        on_gpu = self._device.type == "cuda"
        self._track = DeviceTrack(timeline, _timed_event) if on_gpu else None
        self.make_pool = partial(TimedPool, timeline, self._track)
        if not on_gpu:  # there a collective is launched here, and takes its time on the device
            self.join_group = partial(_join, timeline)

    def start(self, store: dist.Store | None) -> None:
        began = now()
        try:
            super().start(store)
        finally:
            self._timeline.span(Kind.START, began)

    def _next(self) -> object:
        began = now()
        command = super()._next()
        if isinstance(command, StepPlan):
            self._timeline.span(Kind.RECEIVE, began, command.step)
        elif command is not None:
            self._timeline.span(Kind.ORDERED, began)
        elif self._track is not None:
            self._timeline.span(Kind.DEVICE_WAIT, began, self._running[0].number)
        return command

    def _launch(self, plan: StepPlan) -> None:
        if self._track is not None:
            self._track.begin(plan.step)
        began = now()
        try:
            super()._launch(plan)
        finally:
            numbers = plan.step, len(plan.rows), sum(plan.rows.count)
            self._timeline.span(Kind.LAUNCH, began, *numbers)
        step = self._running[-1]
        if self._track is not None and isinstance(step.output, LateOutput):
            output = TimedOutput(step.output, self._timeline, plan.step)
            self._running[-1] = step._replace(output=output)

    def _answer(self) -> None:
        began, step = now(), self._running[0].number
        super()._answer()
        self._timeline.span(Kind.ANSWER, began, step)
        if self._track is not None:
            self._track.take_finished()

    def _change_memory(self, order: Allocate | Release | LoadWeights) -> str:
        began = now()
        error = super()._change_memory(order)
        self._timeline.span(Kind.MEMORY, began)
        return error


class TimedOutput(LateOutput):
    """Notes how long the device is waited for."""

    def __init__(self, output: LateOutput, timeline: Timeline, step: int) -> None:
        self._output, self._timeline, self._step = output, timeline, step

    def is_ready(self) -> bool:
        return self._output.is_ready()

    @property
    def tokens(self) -> list[int]:
        began = now()
        tokens = self._output.tokens
        self._timeline.span(Kind.DEVICE_WAIT, began, self._step)
        return tokens

    @property
    def counts(self) -> list[int]:
        return self._output.counts


class TimedPool(GraphPool):
    """Notes captures, replays and eager runs, and where they lie on the device."""

    def __init__(self, timeline: Timeline, track: DeviceTrack | None, *parts: Any) -> None:
        super().__init__(*parts)
        self._timeline, self._track = timeline, track

    def run(self, piece: str, key: Hashable, body: Callable[[], T], eager: str = "") -> T:
        began, replays, captures = now(), self.num_replays, self.num_captures
        start = None if self._track is None else self._track.mark()
        output = super().run(piece, key, body, eager)
        # The device has nothing to do during a capture, which is no part of the piece.
        if self._track is not None and start is not None and self.num_captures == captures:
            self._track.note(piece, start)
        what = self._timeline.text(piece)
        if self.num_replays > replays:
            self._timeline.span(Kind.REPLAY, began, what)
        else:
            reason = self.off or eager or "first run"
            self._timeline.span(Kind.EAGER, began, what, self._timeline.text(reason))
        return output

    def _capture(self, name: tuple[str, Hashable], body: Callable[[], T]) -> Any:
        began = now()
        captured = super()._capture(name, body)
        self._timeline.span(Kind.CAPTURE, began, self._timeline.text(name[0]))
        return captured


class TimedGroup(Group):
    """Notes how long this rank is in each collective, waiting for the others included."""

    def __init__(self, timeline: Timeline, group: Group) -> None:
        super().__init__(group.rank, group.size, group._process_group, group._add_parts)
        self._timeline = timeline
        self._meets = Kind.ALL_REDUCE, 0

    def _guarded(self, collective: Callable[[], object]) -> None:
        began = now()
        try:
            super()._guarded(collective)
        finally:
            kind, elements = self._meets
            self._timeline.span(kind, began, elements)

    def _note(self, kind: str, numel: int) -> None:
        super()._note(kind, numel)
        self._meets = _COLLECTIVES[kind], numel


class _Piece(NamedTuple):
    kind: Kind
    step: int
    start: Event
    end: Event


class DeviceTrack:
    """Where the pieces of steps lay on the device, in the host's time.

    The device tells times between events only. So an event is recorded while nothing else is due,
    and the host's time read when it is over: that is the first anchor, and the end of each piece
    the next. `make` makes an event.
    """

    def __init__(self, timeline: Timeline, make: Callable[[], Event]) -> None:
        self._timeline, self._make = timeline, make
        self._step = 0
        self._pieces: deque[_Piece] = deque()
        self._anchor: tuple[Event, int] | None = None

    def begin(self, step: int) -> None:
        """The pieces that follow belong to `step`."""
        self._step = step
        if not self._pieces:
            event = self.mark()
            event.synchronize()
            self._anchor = event, now()

    def mark(self) -> Event:
        """An event at the present end of the device's work."""
        event = self._make()
        event.record()
        return event

    def note(self, piece: str, start: Event) -> None:
        """All that was launched since `start` is `piece` of the present step."""
        if self._anchor is not None:  # else the rank is still starting
            self._pieces.append(_Piece(_ON_DEVICE[piece], self._step, start, self.mark()))

    def take_finished(self) -> None:
        """Put the pieces that are over into the timeline."""
        while self._pieces and self._pieces[0].end.query():
            assert self._anchor is not None
            piece, (event, at) = self._pieces.popleft(), self._anchor
            begin = at + _ns(event.elapsed_time(piece.start))
            end = begin + _ns(piece.start.elapsed_time(piece.end))
            # What is over lies in the past: otherwise the clocks have drifted apart.
            late = max(end - now(), 0)
            begin = max(begin - late, at)
            end = max(end - late, begin)
            self._timeline.put(piece.kind, begin, end, piece.step)
            self._anchor = piece.end, end


def _join(timeline: Timeline, *place: Any) -> Group:
    group = join_group(*place)
    return group if group.size == 1 else TimedGroup(timeline, group)


def _timed_event() -> Event:
    return torch.cuda.Event(enable_timing=True)


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
