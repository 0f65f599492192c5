"""The file of --trace: its form, what stands in it, and where it may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher.timelines import check_form, read
from unisono.launcher.timeline_file import (
    DEVICE,
    DROPPED,
    FIRST_RANK,
    LAUNCHER,
    RUNTIME,
    Lane,
    write_trace,
)
from unisono.workers.timeline import MOMENT, Kind, Noted, Recorded

BASE = 13_000_000_000_000_123
"""Of a host that has been up for months: microseconds of it lose digits as a float."""


def noted(kind: Kind, begin: int, end: int, *numbers: int) -> Noted:
    """Nanoseconds after BASE."""
    end = begin if kind.form == MOMENT else end
    return Noted(kind, BASE + begin, BASE + end, (*numbers, *[0] * (3 - len(numbers))))


def lanes() -> list[Lane]:
    """Two ranks: two requests, one of which never ends, and two steps in flight together."""
    launcher = [
        noted(Kind.SUBMIT, 0, 1_500, 0, 17),
        noted(Kind.SUBMIT, 2_000, 2_500, 1, 3),
        noted(Kind.FIRST_TOKEN, 50_000, 0, 0),
        noted(Kind.DETOKENIZE, 51_000, 52_000, 1),
        noted(Kind.FINISH, 90_000, 0, 0, 8, 1),
    ]
    runtime: list[Noted] = []
    for step in (1, 2):
        at = 10_000 * step
        runtime += [
            noted(Kind.PLAN, at, at + 300, step, 2, 20),
            noted(Kind.LOAD, at + 300, at + 300, 2, 5, 30 + step),
            noted(Kind.SEND, at + 400, at + 700, step),
        ]
    for step in (1, 2):
        at = 60_000 + 10_000 * step
        runtime += [
            noted(Kind.WAIT, at + 10, at + 800, step),
            noted(Kind.APPLY, at + 900, at + 950, step, 2),
            noted(Kind.RESULT, at, at + 990, step),
        ]
    runtime.append(noted(Kind.PREEMPT, 85_000, 0, 1, 33))
    ranks = []
    for rank in (0, 1):
        events: list[Noted] = []
        for step in (1, 2):
            at = 10_000 * step + 1_000 + rank
            events += [
                noted(Kind.ALL_REDUCE, at + 50, at + 90, 64),
                noted(Kind.EAGER, at + 20, at + 100, 1, 2),
                noted(Kind.LAUNCH, at, at + 200, step, 2, 20),
                noted(Kind.DEVICE_FORWARD, at + 60, at + 9_000, step),
            ]
        ranks.append(events)
    return [
        Lane(LAUNCHER, "launcher", Recorded(10, launcher, ["", "length"], 0)),
        Lane(RUNTIME, "runtime", Recorded(11, runtime, [""], 0)),
        Lane(FIRST_RANK, "rank 0", Recorded(12, ranks[0], ["", "forward", "first run"], 0)),
        Lane(FIRST_RANK + 1, "rank 1", Recorded(13, ranks[1], ["", "forward", "first run"], 40)),
    ]


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    count = write_trace(path, lanes(), {"unisono": "1.2.3", "missing": {}})
    assert count == sum(len(lane.recorded.events) for lane in lanes())
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    return read(path)


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_the_form_is_right(written: dict[str, Any]) -> None:
    check_form(written)


def test_every_process_has_its_name_label_and_tracks(written: dict[str, Any]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in named(written, "process_name")}
    assert names == {1: "launcher", 2: "runtime", 3: "rank 0", 4: "rank 1"}
    labels = {event["pid"]: event["args"]["labels"] for event in named(written, "process_labels")}
    assert labels == {1: "pid 10", 2: "pid 11", 3: "pid 12", 4: f"pid 13, 40 {DROPPED}"}
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in named(written, "thread_name")
    }
    assert tracks == {**{(pid, 1): "host" for pid in names}, (3, 2): "device", (4, 2): "device"}
    assert {event["tid"] for event in named(written, "forward")} == {DEVICE}


def test_times_are_exact_microseconds_since_the_first_event(written: dict[str, Any]) -> None:
    [first, second] = named(written, "submit")
    assert (first["ts"], first["dur"], second["ts"]) == (0.0, 1.5, 2.0)
    launch = next(event for event in named(written, "launch") if event["pid"] == 4)
    assert (launch["ts"], launch["dur"]) == (11.001, 0.2)
    assert written["otherData"]["first_event_ns"] == BASE


def test_spans_that_begin_together_stand_from_the_outermost_in(tmp_path: Path) -> None:
    events = [noted(Kind.WAIT, 5, 6, 1), noted(Kind.APPLY, 7, 8, 1), noted(Kind.RESULT, 5, 9, 1)]
    lane = Lane(RUNTIME, "runtime", Recorded(11, events, [""], 0))
    write_trace(tmp_path / "t.json", [lane], {})
    names = [e["name"] for e in read(tmp_path / "t.json")["traceEvents"] if e["ph"] == "X"]
    assert names == ["result", "wait for ranks", "apply"]


def test_numbers_have_names_and_texts(written: dict[str, Any]) -> None:
    assert named(written, "finish")[0]["args"] == {"request": 0, "tokens": 8, "reason": "length"}
    assert named(written, "plan")[0]["args"] == {"step": 1, "rows": 2, "tokens": 20}
    assert named(written, "eager")[0]["args"] == {"piece": "forward", "reason": "first run"}
    assert named(written, "requests")[0]["args"] == {"running": 2, "waiting": 5}
    assert [event["args"]["used"] for event in named(written, "KV blocks")] == [31, 32]


def test_a_request_is_a_bar_from_its_submission_to_its_end(written: dict[str, Any]) -> None:
    edges = [(e["ph"], e["id"], e["ts"], e["args"].get("end")) for e in named(written, "request")]
    assert edges == [
        ("b", 0, 0.0, None),
        ("b", 1, 2.0, None),
        ("e", 0, 90.0, "finish"),
        ("e", 1, 90.0, "none: it was under way"),
    ]


def test_an_arrow_leads_from_each_plan_over_each_rank_to_its_result(
    written: dict[str, Any],
) -> None:
    arrows: dict[int, list[tuple[str, int, float]]] = {}
    for event in named(written, "step"):
        arrows.setdefault(event["id"], []).append((event["ph"], event["pid"], event["ts"]))
    assert len(arrows) == 4
    assert arrows[2] == [("s", 2, 10.4), ("t", 3, 11.0), ("f", 2, 70.9)]
    assert arrows[5] == [("s", 2, 20.4), ("t", 4, 21.001), ("f", 2, 80.9)]


def test_what_was_dropped_is_said_where_it_would_be(written: dict[str, Any]) -> None:
    [note] = named(written, DROPPED)
    assert (note["pid"], note["ts"], note["args"]) == (4, 11.001, {"events": 40})
    assert written["otherData"]["dropped_events"] == {"rank 1": 40}


def test_of_nothing_there_is_a_valid_file_too(tmp_path: Path) -> None:
    lane = Lane(LAUNCHER, "launcher", Recorded(10, [], [""], 0))
    assert write_trace(tmp_path / "t.json", [lane], {}) == 0
    check_form(read(tmp_path / "t.json"))


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unisono.launcher.timeline_file._write", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(path, lanes(), {})
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"trace.json": "old"}
