"""Reads a file of --trace and judges its form; tests of the file and of whole commands use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.launcher.timeline_file import BLOCKS, DROPPED, HOST, REQUEST, REQUESTS, STEP
from unisono.workers.timeline import COUNTS, Kind

NAMES = {
    *(kind.label for kind in Kind if kind.form != COUNTS),
    *(REQUEST, STEP, REQUESTS, BLOCKS, DROPPED),
    *("process_name", "process_labels", "process_sort_index", "thread_name"),
}
"""The closed set of what an event may be called."""
PHASES = set("MXiCbestf")


def read(path: Path) -> dict[str, Any]:
    trace = json.loads(path.read_text())
    assert isinstance(trace, dict)
    return trace


def spans(trace: dict[str, Any], pid: int, name: str, tid: int = HOST) -> list[dict[str, Any]]:
    """Spans of one name on one track, by time."""
    found = [
        event
        for event in trace["traceEvents"]
        if (event["ph"], event["pid"], event["tid"], event["name"]) == ("X", pid, tid, name)
    ]
    return sorted(found, key=lambda event: event["ts"])


def by_step(trace: dict[str, Any], pid: int, name: str) -> dict[int, tuple[float, float]]:
    """Begin and end of each step's span of a name."""
    return {
        event["args"]["step"]: (event["ts"], event["ts"] + event["dur"])
        for event in spans(trace, pid, name)
    }


def check_form(trace: dict[str, Any]) -> None:
    """Every event has what it must have, edges come in pairs, and spans of a track nest."""
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys(), event
        assert event["ph"] in PHASES, event
        assert event["name"] in NAMES, event
        assert event["ts"] >= 0, event
        assert type(event["pid"]) is type(event["tid"]) is int, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
    for begin, end in (("b", "e"), ("s", "f")):
        assert sorted(_ids(events, begin)) == sorted(_ids(events, end))
        assert len({*_ids(events, begin)}) == len([*_ids(events, begin)])
    for track in {(event["pid"], event["tid"]) for event in events}:
        mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]
        _check_nesting(mine)


def _ids(events: list[dict[str, Any]], phase: str) -> Iterator[int]:
    yield from (event["id"] for event in events if event["ph"] == phase)


def _check_nesting(found: list[dict[str, Any]]) -> None:
    """In nanoseconds, as they were noted: sums of microseconds are not exact."""
    times = [(round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000)) for e in found]
    stack: list[int] = []
    for begin, end in sorted(times, key=lambda time: (time[0], -time[1])):
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"{(begin, end)} leaves the span around it"
        stack.append(end)
