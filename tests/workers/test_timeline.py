"""The ring of events: order, bounds, texts, and what is left of a process that was killed."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import python_path
from unisono.workers.timeline import (
    COUNTS,
    MAGIC,
    MOMENT,
    MOST_EVENTS,
    SPAN,
    TEXT_BYTES,
    TEXTS,
    Kind,
    Recorded,
    Timeline,
    decode,
    make_ring,
    now,
    open_ring,
    ring_bytes,
)


def ring(capacity: int = 8) -> Timeline:
    return Timeline(bytearray(ring_bytes(capacity)), capacity)


def test_events_come_back_in_order_with_their_times_and_numbers() -> None:
    timeline, began = ring(), now()
    timeline.span(Kind.LAUNCH, began, 7, 3, -1)
    timeline.moment(Kind.ABORT, 1 << 40)
    timeline.put(Kind.DEVICE_TAIL, 5, 9, 7)
    found = timeline.recorded()
    launch, abort, tail = found.events
    assert (found.pid, found.num_dropped) == (os.getpid(), 0)
    assert (launch.kind, launch.begin, launch.numbers) == (Kind.LAUNCH, began, (7, 3, -1))
    assert began <= launch.end <= abort.begin == abort.end <= now()
    assert (abort.kind, abort.numbers) == (Kind.ABORT, (1 << 40, 0, 0))
    assert tail == (Kind.DEVICE_TAIL, 5, 9, (7, 0, 0))


def test_the_clock_is_the_one_of_the_whole_host() -> None:
    code = "from unisono.workers.timeline import now; print(now())"
    environ = {**os.environ, "PYTHONPATH": python_path()}
    before = now()
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert before < int(done.stdout) < now()


@pytest.mark.parametrize(("count", "dropped"), [(7, 0), (8, 1), (9, 2), (21, 14)])
def test_the_newest_events_stay(count: int, dropped: int) -> None:
    """Of a full ring the oldest is not told: its place may have been about to be written over."""
    timeline = ring(8)
    for number in range(count):
        timeline.moment(Kind.ABORT, number)
    found = timeline.recorded()
    assert found.num_dropped == dropped
    assert [event.numbers[0] for event in found.events] == list(range(dropped, count))


def test_texts_are_kept_once_and_few() -> None:
    timeline = ring()
    numbers = [timeline.text(text) for text in ("forward", "two\nlines", "forward", "größer")]
    assert numbers == [1, 2, 1, 3]
    assert timeline.text("x" * TEXT_BYTES) == timeline.text("x" * TEXT_BYTES) == 0
    assert timeline.text("last") == 4
    assert timeline.recorded().texts == ["", "forward", "two lines", "größer", "last"]


def test_every_kind_says_what_it_is() -> None:
    assert len({kind.label for kind in Kind}) == len(Kind)
    for kind in Kind:
        assert kind.form in (SPAN, MOMENT, COUNTS)
        assert len(kind.fields) <= 3
    assert {*TEXTS} <= {name for kind in Kind for name in kind.fields}


def test_a_ring_is_there_only_where_one_was_made(tmp_path: Path) -> None:
    assert open_ring("", "runtime") is None
    assert open_ring(str(tmp_path / "of another host"), "rank 0") is None
    assert open_ring(str(tmp_path), "rank 0") is None
    with make_ring(tmp_path, "rank 0") as file:
        assert [path.stat().st_size for path in tmp_path.iterdir()] == [ring_bytes(MOST_EVENTS)]
        timeline = open_ring(str(tmp_path), "rank 0")
        assert timeline is not None
        timeline.moment(Kind.ABORT, 5)
        file.seek(0)
        found = decode(file.read())
    assert found == timeline.recorded()


def test_a_process_that_is_killed_leaves_what_it_noted(tmp_path: Path) -> None:
    """Also where the directory is gone before it is read."""
    code = """
import sys
from unisono.workers.timeline import Kind, now, open_ring
ring = open_ring(sys.argv[1], "rank 1")
for number in range(10 ** 9):
    ring.span(Kind.LAUNCH, now(), number, number + 1, number + 2)
    if number == 1000: print(flush=True)
"""
    with make_ring(tmp_path, "rank 1") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        with process, process.stdout:
            process.stdout.readline()
            time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        for path in tmp_path.iterdir():
            path.unlink()
        file.seek(0)
        found = decode(file.read())
    assert isinstance(found, Recorded)
    assert found.pid == process.pid
    assert len(found.events) > 1000
    for number, event in enumerate(found.events, start=found.num_dropped):
        assert event.numbers == (number, number + 1, number + 2)
        assert 0 < event.begin <= event.end


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(ring_bytes(8)),
        struct.pack("@8q", MAGIC, 8, 0, 1, 0, 0, 0, 0),
        struct.pack("@8q", MAGIC, 9, 0, 1, 0, 0, 0, 0) + bytes(ring_bytes(8) - 64),
    ],
    ids=["empty", "not begun", "header alone", "too short"],
)
def test_what_is_no_ring_is_nothing(raw: bytes) -> None:
    assert decode(raw) is None
