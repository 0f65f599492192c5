"""Parts of a rank that note what they do: the same work, and the right events of it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from unisono.ops.comm import Group, PeerLost, solo_group
from unisono.workers.graph_pool import GraphPool
from unisono.workers.model_runner import LateOutput
from unisono.workers.timed import DeviceTrack, TimedGroup, TimedOutput, TimedPool
from unisono.workers.timeline import Kind, Noted, Timeline, now, ring_bytes

MS = 1_000_000


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(bytearray(ring_bytes(64)), 64)


def noted(timeline: Timeline) -> list[tuple[str, ...]]:
    """Labels of all events, each with its texts."""
    found = timeline.recorded()
    return [
        (event.kind.label, *(found.texts[number] for number in event.numbers if number))
        for event in found.events
    ]


@pytest.mark.parametrize("off", ["", "--no-graphs"])
def test_eager_runs_are_noted_with_the_reason_that_is_counted(timeline: Timeline, off: str) -> None:
    pool = TimedPool(timeline, None, torch.device("cuda"), solo_group(), [], off)
    plain = GraphPool(torch.device("cuda"), solo_group(), [], off)
    for each in (pool, plain):
        assert each.run("forward", 1, lambda: 5) == 5
        assert each.run("tail", 1, lambda: 6, "sampling") == 6
    assert pool.eager_runs == plain.eager_runs
    reasons = [off or "first run", off or "sampling"]
    assert noted(timeline) == [("eager", "forward", reasons[0]), ("eager", "tail", reasons[1])]


def test_a_capture_and_its_replay_are_noted(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Captured:
        graph = cast(Any, type("Graph", (), {"replay": lambda self: None}))()
        output, generations, collectives = 9, (), ()

    def capture(self: GraphPool, name: Any, body: Any) -> Any:
        self._graphs[name] = cast(Any, Captured())
        self.num_captures += 1
        return self._graphs[name]

    monkeypatch.setattr(GraphPool, "_capture", capture)
    clock = Clock()
    track = DeviceTrack(timeline, clock.event)
    pool = TimedPool(timeline, track, torch.device("cuda"), solo_group(), [])
    track.begin(4)
    assert [pool.run("forward", 1, lambda: 9) for _ in range(3)] == [9, 9, 9]
    capture_and_replay = [("capture", "forward"), ("replay", "forward")]
    eager = [("eager", "forward", "first run")]
    assert noted(timeline) == [*eager, *capture_and_replay, ("replay", "forward")]
    capture_event, replay_event = timeline.recorded().events[1:3]
    assert replay_event.begin <= capture_event.begin <= capture_event.end <= replay_event.end
    clock.finish()
    track.take_finished()
    found = [event.kind for event in timeline.recorded().events]
    assert found.count(Kind.DEVICE_FORWARD) == 2, "a capture is nothing of the device's"


def test_collectives_are_noted_by_name_and_size(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(self: Group, x: Tensor) -> Tensor:
        """Two ranks, of which the other says the same."""
        parts: list[Tensor] = []
        self._guarded(lambda: parts.append(torch.stack([x, x])))
        return parts[0]

    monkeypatch.setattr(Group, "_gather", gather)
    plain = Group(0, 2, None)
    group = TimedGroup(timeline, plain)
    for each in (group, plain):
        assert each.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        assert each.max(torch.ones(2, dtype=torch.int64)).tolist() == [1, 1]
        assert each.gather(torch.ones(2, 3), [3, 3]).shape == (2, 6)
    sizes = [(event.kind.label, event.numbers[0]) for event in timeline.recorded().events]
    assert sizes == [("all_reduce", 3), ("max", 2), ("gather", 6)]
    assert (group.digest, group.num_met) == (plain.digest, 3)


def test_a_collective_that_breaks_is_noted_too(timeline: Timeline) -> None:
    def breaks() -> None:
        raise RuntimeError("gone")

    group = TimedGroup(timeline, Group(0, 2, None))
    group._note("max", 8)
    with pytest.raises(PeerLost, match="gone"):
        group._guarded(breaks)
    assert [event.kind for event in timeline.recorded().events] == [Kind.MAX]


def test_the_wait_for_the_device_is_noted(timeline: Timeline) -> None:
    class Late(LateOutput):
        def __init__(self) -> None:
            pass

        def is_ready(self) -> bool:
            return False

        @property
        def tokens(self) -> list[int]:
            return [4, 5]

        @property
        def counts(self) -> list[int]:
            return [2]

    output = TimedOutput(Late(), timeline, 17)
    assert (output.is_ready(), output.tokens) == (False, [4, 5])
    assert (output.logprobs, output.checksums, output.counts) == (None, None, [2])
    [wait] = timeline.recorded().events
    assert (wait.kind, wait.numbers[0]) == (Kind.DEVICE_WAIT, 17)


class Clock:
    """A device whose time is `ms`, and whose events are over when they are told to be."""

    def __init__(self) -> None:
        self.ms = 1000.0
        self.made: list[FakeEvent] = []
        self.num_waits = 0

    def event(self) -> FakeEvent:
        self.made.append(FakeEvent(self))
        return self.made[-1]

    def finish(self) -> None:
        for event in self.made:
            event.is_over = True


class FakeEvent:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at, self.is_over = clock, -1.0, False

    def record(self) -> None:
        self.at = self.clock.ms

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over, self.clock.num_waits = True, self.clock.num_waits + 1

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert (self.is_over, end_event.is_over) == (True, True), "CUDA refuses others"
        assert end_event.at >= self.at >= 0
        return end_event.at - self.at


def pieces(timeline: Timeline) -> list[Noted]:
    return list(timeline.recorded().events)


def launch(track: DeviceTrack, clock: Clock, step: int, idle_ms: float = 0.0) -> None:
    """A step whose forward takes 3 ms and whose tail takes 1."""
    track.begin(step)
    clock.ms += idle_ms
    for piece, milliseconds in (("forward", 3.0), ("tail", 1.0)):
        start = track.mark()
        clock.ms += milliseconds
        track.note(piece, start)


def test_pieces_lie_where_the_device_had_them(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps in flight: the second follows the first's end, as on the device, not the host."""
    clock = Clock()
    track = DeviceTrack(timeline, clock.event)
    began = now()
    launch(track, clock, 1)
    launch(track, clock, 2, idle_ms=0.5)
    track.take_finished()
    assert pieces(timeline) == [], "nothing is over"
    assert clock.num_waits == 1, "only an idle device is waited for"
    # The host is far behind the device's work: nothing is moved.
    monkeypatch.setattr("unisono.workers.timed.now", lambda: began + 100 * MS)
    clock.finish()
    track.take_finished()
    found = pieces(timeline)
    assert [(each.kind.label, each.numbers[0]) for each in found] == [
        ("forward", 1),
        ("tail", 1),
        ("forward", 2),
        ("tail", 2),
    ]
    first = found[0].begin
    assert began <= first
    offsets = [((each.begin - first) / MS, (each.end - first) / MS) for each in found]
    assert offsets == [(0.0, 3.0), (3.0, 4.0), (4.5, 7.5), (7.5, 8.5)]


def test_no_piece_ends_in_the_future(timeline: Timeline) -> None:
    """Here the host reads 8 ms of the device's work at once: it must lie before that."""
    clock = Clock()
    track = DeviceTrack(timeline, clock.event)
    launch(track, clock, 1)
    launch(track, clock, 2)
    clock.finish()
    track.take_finished()
    found = pieces(timeline)
    assert found[-1].end <= now()
    assert len(found) == 4
    times = [time for each in found for time in (each.begin, each.end)]
    assert times == sorted(times)


def test_what_runs_before_the_first_step_is_not_on_the_track(timeline: Timeline) -> None:
    clock = Clock()
    track = DeviceTrack(timeline, clock.event)
    track.note("forward", track.mark())
    clock.finish()
    track.take_finished()
    assert pieces(timeline) == []
