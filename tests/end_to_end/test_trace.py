"""`--trace` through the front doors: what stands in the file, also of runs that end badly."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import json_lines, plant, refused, run, start
from tests.launcher.timelines import by_step, check_form, read, spans
from tests.tiny_tokenizers import long_model
from unisono import LLM, SamplingParams
from unisono.launcher.timeline_file import FIRST_RANK, LAUNCHER, RUNTIME
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError

ASKED = ("--raw", "--ignore-eos", "--max-tokens", "12", "--max-model-len", "400", "--json")
LONG = ("--raw", "--ignore-eos", "--max-tokens", "20000", "--max-model-len", "30000")
STEP = "unisono.workers.model_runner:ModelRunner.step"
RANKS = (FIRST_RANK, FIRST_RANK + 1)


@pytest.fixture(autouse=True)
def flights_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return long_model(tmp_path_factory.mktemp("model"))


def moments(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [e["args"] for e in trace["traceEvents"] if (e["ph"], e["name"]) == ("i", name)]


def check_steps(trace: dict[str, Any]) -> list[int]:
    """Every step is on every rank, in order, between its plan and its result; return them."""
    plans = by_step(trace, RUNTIME, "plan")
    sent, results = by_step(trace, RUNTIME, "send"), by_step(trace, RUNTIME, "result")
    steps = list(plans)
    assert steps == list(range(1, len(steps) + 1)) == list(sent)
    for rank in RANKS:
        received = by_step(trace, rank, "receive plan")
        launched, answered = by_step(trace, rank, "launch"), by_step(trace, rank, "send result")
        assert list(received) == list(launched) == list(answered) == steps
        for step in steps:
            # A plan may be received while it is still being sent to the other rank.
            assert plans[step][1] <= sent[step][0] <= received[step][1] <= launched[step][0]
            assert launched[step][0] <= launched[step][1] <= answered[step][0]
            if step in results:
                assert answered[step][0] <= results[step][1]
    return steps


def test_two_ranks_through_the_command_line(model: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    asked = ("generate", model, "hello", "good day", *ASKED, "--tp", "2")
    plain, _ = run(*asked)
    out, err = run(*asked, "--trace", str(file))
    # How many steps had been run by the end of an answer is a matter of time, too.
    of_time = {"timing": None, "graphs": None}
    answers = [{**each, **of_time} for each in json_lines(out)]
    assert answers == [{**each, **of_time} for each in json_lines(plain)]
    assert "WARNING" not in err
    trace = read(file)
    check_form(trace)
    steps = check_steps(trace)
    assert len(steps) >= 12
    assert [e["args"]["request"] for e in spans(trace, LAUNCHER, "submit")] == [0, 1]
    assert moments(trace, "first token") == [{"request": 0}, {"request": 1}]
    ends = [{"request": n, "tokens": 12, "reason": "length"} for n in (0, 1)]
    assert moments(trace, "finish") == ends
    tokens = sum(e["args"]["tokens"] for e in spans(trace, LAUNCHER, "detokenise"))
    assert tokens == 24
    for rank in RANKS:
        check_rank(trace, rank, steps)
    arrows = [e["id"] for e in trace["traceEvents"] if e["ph"] == "f"]
    assert len({*arrows}) == len(arrows) == 2 * len(steps)
    facts = trace["otherData"]
    assert (facts["ranks"], facts["device"], facts["model"]) == (2, "cpu", Path(model).name)
    assert (facts["missing"], facts["failed"], facts["dropped_events"]) == ({}, "", {})


def check_rank(trace: dict[str, Any], rank: int, steps: list[int]) -> None:
    """Pieces and collectives lie inside the launch of a step, and every step has its own."""
    launches = by_step(trace, rank, "launch")
    [start] = spans(trace, rank, "start")
    served = [e for e in spans(trace, rank, "eager") if e["ts"] > start["ts"] + start["dur"]]
    pieces = [(e["args"]["piece"], e["args"]["reason"]) for e in served]
    assert pieces == [("forward", "cpu has no graphs"), ("tail", "cpu has no graphs")] * len(steps)
    sums = [e for e in spans(trace, rank, "all_reduce") if e["ts"] > start["ts"] + start["dur"]]
    assert len(sums) % len(steps) == 0
    assert len(sums) > 2 * len(steps)
    for number, event in enumerate(sums):
        begin, end = launches[steps[number * len(steps) // len(sums)]]
        assert begin <= event["ts"] <= event["ts"] + event["dur"] <= end


def test_of_a_rank_that_is_killed_all_is_there_that_it_noted(model: str, tmp_path: Path) -> None:
    env = plant(
        tmp_path,
        1,
        {
            STEP: "import os\n"
            "def planted(original, self, plan):\n"
            "    if plan.step == 5: os.kill(os.getpid(), 9)\n"
            "    return original(self, plan)"
        },
    )
    file = tmp_path / "trace.json"
    asked = ("generate", model, "hello", "--tp", "2", *LONG, "--trace", str(file))
    _, err = run(*asked, env=env, code=1)
    assert "died in phase 'step' by signal 9 (SIGKILL)" in err.strip().splitlines()[-1]
    trace = read(file)
    check_form(trace)
    assert trace["otherData"]["failed"].startswith("rank 1 (pid ")
    assert list(by_step(trace, RANKS[0], "launch"))[:4] == [1, 2, 3, 4]
    assert list(by_step(trace, RANKS[1], "launch")) == [1, 2, 3, 4]
    assert list(by_step(trace, RANKS[1], "receive plan")) == [1, 2, 3, 4, 5]
    assert list(by_step(trace, RUNTIME, "result"))[:3] == [1, 2, 3]


def test_an_exception_in_a_step_shows_its_launch(model: str, tmp_path: Path) -> None:
    env = plant(
        tmp_path,
        0,
        {
            STEP: "def planted(original, self, plan):\n"
            "    if plan.step == 3: raise ValueError('planted')\n"
            "    return original(self, plan)"
        },
    )
    file = tmp_path / "trace.json"
    run("generate", model, "hello", *LONG, "--trace", str(file), env=env, code=1)
    trace = read(file)
    check_form(trace)
    assert list(by_step(trace, FIRST_RANK, "launch")) == [1, 2, 3]
    assert list(by_step(trace, FIRST_RANK, "send result")) == [1, 2]


def test_an_interrupted_run_leaves_a_valid_file(model: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    process = start("generate", model, "hello", "--tp", "2", *LONG, "--trace", str(file))
    assert process.stdout is not None
    assert process.stdout.read(1), "ended before its first character"
    assert not file.exists()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    trace = read(file)
    check_form(trace)
    assert len(check_steps_so_far(trace)) > 1
    assert moments(trace, "abort") in ([{"request": 0}] * 2, [{"request": 0}])
    assert [each.name for each in tmp_path.glob("*.part")] == []


def check_steps_so_far(trace: dict[str, Any]) -> list[int]:
    """Steps that both ranks have launched, each after its plan."""
    plans = by_step(trace, RUNTIME, "plan")
    found: list[int] = []
    launches = [by_step(trace, rank, "launch") for rank in RANKS]
    for step in launches[0].keys() & launches[1].keys():
        assert all(plans[step][1] <= each[step][0] for each in launches)
        found.append(step)
    return found


def test_a_start_that_fails_is_told_too(model: str, tmp_path: Path) -> None:
    """In the file, and by the last line."""
    env = plant(
        tmp_path,
        1,
        {
            "unisono.models.ledger:fill_weights": "def planted(original, *args):\n"
            "    raise ValueError('planted while loading')"
        },
    )
    file = tmp_path / "trace.json"
    asked = ("generate", model, "hello", "--tp", "2", "--trace", str(file))
    _, err = run(*asked, env=env, code=1)
    fault = "rank 1 failed in phase 'load weights': ValueError: planted while loading"
    assert err.strip().splitlines()[-1] == f"unisono: {fault}"
    trace = read(file)
    check_form(trace)
    assert trace["otherData"]["failed"] == fault
    assert spans(trace, LAUNCHER, "start")
    assert spans(trace, RANKS[1], "start")


@pytest.mark.parametrize("command", [("generate",), ("bench", "step"), ("bench", "offline")])
def test_a_path_that_cannot_be_written_is_refused(
    model: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(capsys, *command, model, "--trace", "/nowhere/t.json", *_prompt(command))
    assert err == (
        "unisono: error: --trace /nowhere/t.json: cannot be written (No such file or directory); "
        "choose a file in a directory that you may write to\n"
    )
    with pytest.raises(ConfigError, match=r"--trace /nowhere/t\.json: cannot be written"):
        LLM(model, trace="/nowhere/t.json")


def _prompt(command: tuple[str, ...]) -> Iterator[str]:
    if command == ("generate",):
        yield "hello"


def test_no_room_for_the_rings_is_refused_before_a_worker_starts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unisono.launcher.timed.make_ring", full)
    file = tmp_path / "trace.json"
    file.write_text("old")
    llm = LLM(model, trace=str(file))
    with pytest.raises(ConfigError, match=r"needs 19 MB in .* \(No space left .* set TMPDIR"):
        llm.generate("hello")
    assert file.read_text() == "old", "nothing was started"


def test_the_library_writes_the_file_when_it_closes(model: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with LLM(model, max_model_len=400, trace=str(file)) as llm:
        for _ in range(2):
            llm.generate("a prompt that is longer than one block of sixty-four tokens " * 3, params)
        with llm.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True)) as stream:
            next(stream)
            llm.sleep()
            llm.wake()
        assert not file.exists()
    trace = read(file)
    check_form(trace)
    assert moments(trace, "finish")[:2] == [
        {"request": n, "tokens": 5, "reason": "length"} for n in (0, 1)
    ]
    assert moments(trace, "order") == [{"what": "sleep"}, {"what": "wake"}]
    assert [each["args"] for each in spans(trace, RUNTIME, "obey")] == moments(trace, "order")
    assert moments(trace, "pre-empt") == [], "a pause takes nobody's place"
    [hit] = moments(trace, "prefix hit")
    assert hit["request"] == 1
    assert hit["tokens"] % 64 == 0


def test_the_library_says_that_the_file_could_not_be_written(model: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    llm = LLM(model, max_model_len=400, trace=str(place / "trace.json"))
    llm.generate("hello", SamplingParams(max_tokens=2))
    place.rmdir()
    with pytest.raises(EngineError, match=r"the trace .*trace.json cannot be written: No such"):
        llm.close()
    llm.close()


@pytest.mark.timeout(100)
def test_a_bench_tells_every_round_of_every_batch(model: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sizes = ("--batch", "1,2", "--context", "70", "--steps", "4", "--rounds", "2", "--tp", "2")
    out, _ = run("bench", "step", model, *sizes, "--device", "cpu", "--trace", str(file))
    found = json.loads(out.splitlines()[-1])
    assert found["traced"] is True
    trace = read(file)
    check_form(trace)
    assert trace["otherData"]["dropped_events"] == {}
    check_steps(trace)
    # Two rounds of one request, then two of two.
    assert len(spans(trace, LAUNCHER, "submit")) == 2 * 1 + 2 * 2
    rows = [event["args"]["rows"] for event in spans(trace, RUNTIME, "plan")]
    assert {1, 2} <= {*rows}
    kinds = {"requests", "KV blocks"}
    assert kinds <= {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"}


def test_a_bench_of_many_requests_is_told(model: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    asked = ("--grid", "3x20x6", "--device", "cpu", "--trace", str(file), "--repeats", "2")
    run("bench", "offline", model, *asked)
    trace = read(file)
    check_form(trace)
    ends = moments(trace, "finish")
    assert [each["tokens"] for each in ends] == [6] * 6
