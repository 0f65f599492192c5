"""The launcher's parts that note what they do, with processes that note nothing."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.fake_processes import config, fake_table
from tests.launcher.fakes import FakeTokenizer
from tests.launcher.test_process_table import facts
from tests.launcher.timelines import check_form, read, spans
from tests.paths import python_path
from unisono.launcher.engine_client import Engine
from unisono.launcher.timed import TimedEngine, text_for
from unisono.launcher.timeline_file import LAUNCHER, RUNTIME, Lane
from unisono.runtime.protocol import Delta, Finished, Rejected, SamplingParams, Tokens
from unisono.workers.timeline import Kind, Recorded


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake processes are of the tests."""
    monkeypatch.setenv("PYTHONPATH", python_path())


def engine(file: Path, **options: Any) -> TimedEngine:
    return TimedEngine(config(2, trace=str(file)), **options)


def labels(timed: TimedEngine) -> list[tuple[str, tuple[int, ...]]]:
    return [(event.kind.label, event.numbers) for event in timed.timeline.recorded().events]


def delta(number: int, count: int = 1) -> Delta:
    return Delta(request_id=number, token_ids=array("i", range(count)))


def tokens(*numbers: int) -> Tokens:
    return Tokens(request_ids=array("q", numbers), token_ids=array("i", numbers))


def finished(number: int, reason: str = "stop") -> Finished:
    return Finished(
        request_id=number,
        reason=reason,
        num_prompt_tokens=1,
        num_tokens=1,
        first_token_s=0.0,
        total_s=0.0,
    )


def test_a_session_is_written_once_with_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trace.json"
    with engine(file, table=fake_table) as timed:
        timed.start()
        number = timed.submit([5, 6, 7], SamplingParams())
        events: list[object] = []
        while len(events) < 2:
            events += timed.poll(5.0)
        assert not file.exists()
    trace = read(file)
    check_form(trace)
    why = "ended before it noted anything"
    names = ("runtime", "rank 0", "rank 1")
    assert trace["otherData"]["missing"] == dict.fromkeys(names, why)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: nothing of {name}: {why}" for name in names
    ]
    assert spans(trace, LAUNCHER, "submit")[0]["args"] == {"request": number, "prompt_tokens": 3}
    assert {event["pid"] for event in trace["traceEvents"]} == {LAUNCHER}
    file.unlink()
    timed.close()
    assert not file.exists()


def test_an_engine_that_was_not_started_writes_nothing(tmp_path: Path) -> None:
    with engine(tmp_path / "trace.json"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_first_tokens_ends_and_aborts_are_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that come after an abort are those of nobody."""
    news = [
        [delta(0, 2), delta(1), delta(2)],
        [],
        [tokens(0), finished(0, "length"), Rejected(request_id=1, message="")],
        [tokens(2, 0), finished(2)],
    ]
    numbers = iter(range(3))
    monkeypatch.setattr(Engine, "poll", lambda self, timeout_s: news.pop(0))
    monkeypatch.setattr(Engine, "submit", lambda self, *asked, **how: next(numbers))
    monkeypatch.setattr(Engine, "abort", lambda self, number: None)
    timed = engine(tmp_path / "trace.json")
    assert [timed.submit([1] * n, SamplingParams()) for n in (3, 4, 5)] == [0, 1, 2]
    for _ in range(3):
        timed.poll(0.0)
    timed.abort(2)
    assert timed.poll(0.0) == [tokens(2, 0), finished(2)]
    assert labels(timed) == [
        ("submit", (0, 3, 0)),
        ("submit", (1, 4, 0)),
        ("submit", (2, 5, 0)),
        ("take answers", (3, 0, 0)),
        *(("first token", (number, 0, 0)) for number in range(3)),
        ("take answers", (3, 0, 0)),
        ("finish", (0, 3, 1)),
        ("finish", (1, 1, 2)),
        ("abort", (2, 0, 0)),
        ("take answers", (2, 0, 0)),
    ]
    assert timed.timeline.recorded().texts == ["", "length", "rejected"]


def test_what_is_not_in_the_file_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster = facts(local_world_size=1, master_addr="node-a")
    timed = engine(tmp_path / "t.json", cluster=cluster)
    why = timed._why_missing()
    assert why == "on another host, which has another clock"
    lane = Lane(RUNTIME, "runtime", Recorded(1, [], [""], 12))
    timed._tell(9, [lane], {"rank 1": why})
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [
        ("INFO", f"{tmp_path / 't.json'}: 9 events of 1 processes"),
        ("WARNING", f"{tmp_path / 't.json'}: nothing of rank 1: {why}"),
        (
            "WARNING",
            f"{tmp_path / 't.json'}: of runtime the last 0 events, 12 older ones were dropped",
        ),
    ]


def test_text_is_the_tokenizers_and_its_making_is_noted(tmp_path: Path) -> None:
    tokenizer, timed = FakeTokenizer(), engine(tmp_path / "t.json")
    assert text_for(Engine(config(2)), tokenizer) is tokenizer
    text = text_for(timed, tokenizer)
    words, ids = text.stream(), "grün".encode()
    given: list[Iterable[int]] = [ids[:3], iter(ids[3:])]
    assert [words.push(each) for each in given] + [words.flush()] == ["gr", "ün", ""]
    assert text.token_bytes(65) == b"A"
    made = [(label, numbers[0]) for label, numbers in labels(timed)]
    assert made == [(Kind.DETOKENIZE.label, count) for count in (3, 2, 0)]
