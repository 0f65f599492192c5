"""The file of `--trace`: what all processes of an engine noted, as one timeline.

It is JSON in the Trace Event Format of Chromium ("JSON Object Format"), which ui.perfetto.dev and
chrome://tracing open: a process for the launcher, the runtime and each rank, in each a track of
its thread and, of a rank on a GPU, one of the device. Requests are asynchronous events; arrows
lead from the plan of a step to its launch on each rank and to where its result is applied. Times
are microseconds since the first event.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from unisono.workers.timeline import COUNTS, MOMENT, TEXTS, Kind, Noted, Recorded

LAUNCHER, RUNTIME, FIRST_RANK = 1, 2, 3
"""Process ids in the file; a rank's are FIRST_RANK + rank. The real ones are labels."""
HOST, DEVICE = 1, 2
"""Thread ids in the file."""
REQUEST, STEP = "request", "step"
"""Names, and categories, of requests and arrows."""
REQUESTS, BLOCKS = "requests", "KV blocks"
"""Names of counters."""
DROPPED = "older events were dropped"
_ON_DEVICE = {Kind.DEVICE_FORWARD, Kind.DEVICE_TAIL}

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lane:
    """What one process left. `number`: its id in the file."""

    number: int
    name: str
    recorded: Recorded


def write_trace(path: Path, lanes: Sequence[Lane], facts: Mapping[str, object]) -> int:
    """Write the file, whole or not at all; return its number of noted events. Raises OSError.

    `facts` say what was run; how the times are meant, and what is not there, is added.
    """
    begins = [event.begin for lane in lanes for event in lane.recorded.events]
    base = min(begins, default=0)
    dropped = {lane.name: lane.recorded.num_dropped for lane in lanes}
    other = {
        **facts,
        "clock": "CLOCK_MONOTONIC of the launcher's host",
        "first_event_ns": base,
        "dropped_events": {name: count for name, count in dropped.items() if count},
    }
    part = path.with_name(f".{path.name[:40]}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            _write(file, entries(lanes, base), other)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    return len(begins)


def entries(lanes: Sequence[Lane], base: int) -> Iterator[Entry]:
    """Every event of the file; `base` is time 0, in nanoseconds."""
    for lane in lanes:
        yield from _names_of(lane)
        # A span is noted when it ends; of two that begin together the outer one stands first.
        for event in sorted(lane.recorded.events, key=lambda event: (event.begin, -event.end)):
            yield from _entries_of(event, lane, base)
        if lane.recorded.num_dropped and lane.recorded.events:
            first = min(event.begin for event in lane.recorded.events)
            args = {"events": lane.recorded.num_dropped}
            yield _entry("i", DROPPED, first - base, lane.number, HOST, s="p", args=args)
        if lane.number == LAUNCHER:
            yield from _requests_of(lane, base)
    yield from _arrows(lanes, base)


def _write(file: TextIO, events: Iterable[Entry], other: Mapping[str, object]) -> None:
    head = json.dumps({"displayTimeUnit": "ms", "otherData": other})
    file.write(head[:-1] + ', "traceEvents": [\n')
    encode, separator = json.JSONEncoder(separators=(",", ":")).encode, ""
    for event in events:
        file.write(separator + encode(event))
        separator = ",\n"
    file.write("\n]}\n")


def _names_of(lane: Lane) -> Iterator[Entry]:
    label = f"pid {lane.recorded.pid}"
    if lane.recorded.num_dropped:
        label += f", {lane.recorded.num_dropped:,} {DROPPED}"
    for name, args in (
        ("process_name", {"name": lane.name}),
        ("process_labels", {"labels": label}),
        ("process_sort_index", {"sort_index": lane.number}),
        ("thread_name", {"name": "host"}),
    ):
        yield _entry("M", name, 0, lane.number, HOST, args=args)
    if any(event.kind in _ON_DEVICE for event in lane.recorded.events):
        yield _entry("M", "thread_name", 0, lane.number, DEVICE, args={"name": "device"})


def _entries_of(event: Noted, lane: Lane, base: int) -> Iterator[Entry]:
    kind, begin = event.kind, event.begin - base
    args = dict(zip(kind.fields, event.numbers, strict=False))
    if kind.form == COUNTS:
        used = {"used": args.pop("used")}
        yield _entry("C", REQUESTS, begin, lane.number, HOST, args=args)
        yield _entry("C", BLOCKS, begin, lane.number, HOST, args=used)
        return
    shown = {name: lane.recorded.texts[n] if name in TEXTS else n for name, n in args.items()}
    thread = DEVICE if kind in _ON_DEVICE else HOST
    form = {"s": "t"} if kind.form == MOMENT else {"dur": _us(event.end - event.begin)}
    yield _entry(kind.form, kind.label, begin, lane.number, thread, **form, args=shown)


def _requests_of(lane: Lane, base: int) -> Iterator[Entry]:
    """A bar for each request from its submission to its end, or to the end of all."""
    begun: dict[int, int] = {}
    last = max((event.end for event in lane.recorded.events), default=base)
    ends = {Kind.FINISH: "finish", Kind.ABORT: "abort"}

    def edge(form: str, number: int, at: int, **args: object) -> Entry:
        more = {"cat": REQUEST, "id": number, "args": args}
        return _entry(form, REQUEST, at - base, LAUNCHER, HOST, **more)

    for event in lane.recorded.events:
        number = event.numbers[0]
        if event.kind is Kind.SUBMIT:
            begun[number] = event.begin
            yield edge("b", number, event.begin, request=number)
        elif event.kind in ends and number in begun:
            del begun[number]
            yield edge("e", number, event.begin, end=ends[event.kind])
    for number in begun:
        yield edge("e", number, last, end="none: it was under way")


def _arrows(lanes: Sequence[Lane], base: int) -> Iterator[Entry]:
    """From where a plan is sent to its launch, by rank, and on to where its result is applied."""
    of_runtime = [event for lane in lanes if lane.number == RUNTIME for event in _events(lane)]
    sent = {event.numbers[0]: event.begin for event in of_runtime if event.kind is Kind.SEND}
    applied = {event.numbers[0]: event.begin for event in of_runtime if event.kind is Kind.APPLY}
    ranks = [lane for lane in lanes if lane.number >= FIRST_RANK]
    for lane in ranks:
        for event in _events(lane):
            step = event.numbers[0]
            if event.kind is not Kind.LAUNCH or step not in sent or step not in applied:
                continue
            ident = step * len(ranks) + lane.number - FIRST_RANK
            for form, at, number in (
                ("s", sent[step], RUNTIME),
                ("t", event.begin, lane.number),
                ("f", applied[step], RUNTIME),
            ):
                # An arrow belongs to the span that it lies in, not to the next one.
                more = {"cat": STEP, "id": ident, "bp": "e", "args": {"step": step}}
                yield _entry(form, STEP, at - base, number, HOST, **more)


def _events(lane: Lane) -> Sequence[Noted]:
    return lane.recorded.events


def _entry(form: str, name: str, at: int, process: int, thread: int, **more: object) -> Entry:
    return {"ph": form, "name": name, "ts": _us(at), "pid": process, "tid": thread, **more}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
