"""What a process did and when, for `--trace`: a ring of events in memory. Torch-free.

A ring is mapped from a file that the launcher makes in the engine's private directory. Noting an
event is a few stores and no call of the system, and whatever ends a process leaves what it noted:
the launcher reads all rings once the processes are gone (launcher/timed.py). All processes of a
host have one clock, CLOCK_MONOTONIC.

The file: eight int64 in native order (MAGIC, capacity, events so far, process id, bytes of texts,
and three of 0), TEXT_BYTES of texts that end with a line break each, then `capacity` events of six
int64: kind, begin, end, and its up to three numbers.
"""

from __future__ import annotations

import mmap
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from os import getpid
from pathlib import Path
from typing import BinaryIO, NamedTuple

MOST_EVENTS = 200_000
"""That a process keeps; older ones give way."""
TEXT_BYTES = 4096
MAGIC = 0x31454E494C4D5455
SPAN, MOMENT, COUNTS = "X", "i", "C"
"""The forms of an event in the file that is made of them: with a duration, without, and numbers."""
TEXTS = ("piece", "reason", "what")
"""Fields whose numbers stand for a text."""
_HEADER = 8 * 8
_COUNT, _TEXT_END = 2, 4
_EVENT = struct.Struct("@6q")

now = time.monotonic_ns


class Kind(IntEnum):
    """All that is noted: its name, its form, and what its numbers are."""

    label: str
    form: str
    fields: tuple[str, ...]

    def __new__(cls, label: str, form: str, *fields: str) -> Kind:
        kind = int.__new__(cls, len(cls.__members__))
        kind._value_, kind.label, kind.form, kind.fields = int(kind), label, form, fields
        return kind

    # The launcher.
    SUBMIT = "submit", SPAN, "request", "prompt_tokens"
    POLL = "take answers", SPAN, "events"
    FIRST_TOKEN = "first token", MOMENT, "request"
    FINISH = "finish", MOMENT, "request", "tokens", "reason"
    DETOKENIZE = "detokenise", SPAN, "tokens"
    ORDER = "order", MOMENT, "what"
    # The runtime.
    ARRIVE = "take request", SPAN, "request", "prompt_tokens"
    OBEY = "obey", SPAN, "what"
    PLAN = "plan", SPAN, "step", "rows", "tokens"
    SEND = "send", SPAN, "step"
    RESULT = "result", SPAN, "step"
    WAIT = "wait for ranks", SPAN, "step"
    APPLY = "apply", SPAN, "step", "tokens"
    LOAD = "load", COUNTS, "running", "waiting", "used"
    PREFIX_HIT = "prefix hit", MOMENT, "request", "tokens"
    PREEMPT = "pre-empt", MOMENT, "request", "tokens"
    # Launcher and runtime.
    ABORT = "abort", MOMENT, "request"
    # A rank.
    START = "start", SPAN
    MEMORY = "change memory", SPAN
    RECEIVE = "receive plan", SPAN, "step"
    ORDERED = "receive order", SPAN
    LAUNCH = "launch", SPAN, "step", "rows", "tokens"
    EAGER = "eager", SPAN, "piece", "reason"
    CAPTURE = "capture", SPAN, "piece"
    REPLAY = "replay", SPAN, "piece"
    ALL_REDUCE = "all_reduce", SPAN, "elements"
    MAX = "max", SPAN, "elements"
    GATHER = "gather", SPAN, "elements"
    DEVICE_WAIT = "wait for device", SPAN, "step"
    ANSWER = "send result", SPAN, "step"
    # The device of a rank.
    DEVICE_FORWARD = "forward", SPAN, "step"
    DEVICE_TAIL = "tail", SPAN, "step"


_KINDS = tuple(Kind)


def name_of(message: object) -> str:
    """What an order is called in a timeline: "sleep", "wake" or "reload"."""
    return type(message).__name__.lower()


class Noted(NamedTuple):
    """One event. `begin` and `end`: nanoseconds of the host's clock, equal of a moment."""

    kind: Kind
    begin: int
    end: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a process left, the oldest event first."""

    pid: int
    events: Sequence[Noted]
    texts: Sequence[str]
    num_dropped: int


class Timeline:
    """The ring of one process, for one thread at a time. `buffer` is `ring_bytes` of zeros."""

    def __init__(self, buffer: bytearray | mmap.mmap, capacity: int = MOST_EVENTS) -> None:
        self._buffer, self._capacity = buffer, capacity
        self._header = memoryview(buffer)[:_HEADER].cast("q")
        self._header[:4] = array("q", [MAGIC, capacity, 0, getpid()])
        self._num_events = 0
        self._texts: dict[str, int] = {}

    def span(self, kind: Kind, begin: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Note what began at `begin` and ends now, with its numbers."""
        self.put(kind, begin, now(), a, b, c)

    def moment(self, kind: Kind, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Note what happens now, or numbers as they are now."""
        at = now()
        self.put(kind, at, at, a, b, c)

    def put(self, kind: Kind, begin: int, end: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Note an event of any time."""
        place = self._num_events % self._capacity
        at = _HEADER + TEXT_BYTES + place * _EVENT.size
        _EVENT.pack_into(self._buffer, at, kind, begin, end, a, b, c)
        self._num_events += 1
        # Last, so that an event that is counted is whole.
        self._header[_COUNT] = self._num_events

    def text(self, text: str) -> int:
        """The number that stands for `text`, of which there are few; 0 once there is no room."""
        number = self._texts.get(text)
        return self._add_text(text) if number is None else number

    def recorded(self) -> Recorded:
        """What it holds."""
        found = decode(self._buffer)
        assert found is not None
        return found

    def _add_text(self, text: str) -> int:
        raw, end = text.replace("\n", " ").encode() + b"\n", self._header[_TEXT_END]
        number = 0
        if end + len(raw) <= TEXT_BYTES:
            self._buffer[_HEADER + end : _HEADER + end + len(raw)] = raw
            self._header[_TEXT_END] = end + len(raw)
            number = 1 + max(self._texts.values(), default=0)
        self._texts[text] = number
        return number


def ring_bytes(capacity: int) -> int:
    """Bytes of a ring of `capacity` events."""
    return _HEADER + TEXT_BYTES + capacity * _EVENT.size


def decode(raw: bytes | bytearray | mmap.mmap) -> Recorded | None:
    """Read a ring, also of a process that was killed; None: it was killed before it began."""
    if len(raw) < _HEADER + TEXT_BYTES:
        return None
    header = memoryview(raw)[:_HEADER].cast("q")
    magic, capacity, count, pid, text_end = header[:5]
    if magic != MAGIC or len(raw) < ring_bytes(capacity):
        return None
    # A process that was killed may have been writing over the oldest.
    first = max(0, count - capacity + 1)
    start = _HEADER + TEXT_BYTES
    body = bytes(memoryview(raw)[start : start + min(count, capacity) * _EVENT.size])
    entries = list(_EVENT.iter_unpack(body))
    events = [_noted(entries[i % capacity]) for i in range(first, count)]
    texts = bytes(memoryview(raw)[_HEADER : _HEADER + text_end]).decode(errors="replace")
    return Recorded(pid, events, ["", *texts.split("\n")[:-1]], first)


def make_ring(directory: Path, name: str) -> BinaryIO:
    """Make a file for the process called `name`; it stays readable when it is removed.

    Raises OSError.
    """
    file = _path_of(directory, name).open("xb+")
    try:
        # Written, not only sized: a store into a page that the disk has no room for is fatal.
        file.write(bytes(ring_bytes(MOST_EVENTS)))
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def open_ring(directory: str, name: str) -> Timeline | None:
    """Map the file that was made for the process called `name`; None: nobody wants one.

    Nor can a rank have one where the directory is on another host. Raises OSError.
    """
    path = _path_of(Path(directory), name)
    if not directory or not path.exists():
        return None
    with path.open("rb+") as file:
        return Timeline(mmap.mmap(file.fileno(), 0))


def _path_of(directory: Path, name: str) -> Path:
    return directory / f"{name.replace(' ', '-')}.timeline"


def _noted(entry: tuple[int, ...]) -> Noted:
    kind, begin, end, *numbers = entry
    return Noted(_KINDS[kind], begin, end, tuple(numbers))
