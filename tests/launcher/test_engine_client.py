"""The whole control plane with fake ranks: start, serve, fail and end, and nothing left behind."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launcher.fake_processes import FAULT, config, fake_table
from tests.paths import ROOT, python_path
from unisono.launcher.cluster import ClusterFacts
from unisono.launcher.diagnosis import diagnose, too_late
from unisono.launcher.engine_client import Engine
from unisono.launcher.private_directory import sweep
from unisono.launcher.supervisor import Exit
from unisono.models.config import ConfigError
from unisono.runtime.protocol import (
    Delta,
    Failed,
    Finished,
    RequestRejected,
    Reschedule,
    SamplingParams,
    Sleep,
    Wake,
    WorkerLost,
)
from unisono.workers.protocol import int32s

MARK = "UNISONO_TEST_ENGINE"
PARAMS = SamplingParams()


@pytest.fixture(autouse=True)
def mark(monkeypatch) -> str:
    """Every process of one test carries it, whoever its parent is."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    monkeypatch.setenv("PYTHONPATH", python_path())
    return value


@contextmanager
def engine(fault: str = "", tp: int = 2, **options: object) -> Iterator[Engine]:
    os.environ[FAULT] = fault
    try:
        with Engine(config(tp, **options), table=fake_table) as running:
            yield running
    finally:
        del os.environ[FAULT]


def test_a_request_is_answered_and_nothing_is_left(mark):
    news = []
    with engine() as running:
        ready = running.start(news.append)
        assert (ready.num_blocks, ready.device) == (8, "cpu")
        assert {(item.rank, item.phase) for item in news} == {
            (rank, phase) for rank in (0, 1) for phase in ("join the group", "load weights")
        }
        assert (len(_directories()), len(_processes(mark))) == (1, 3)
        first, second = (running.submit(ids, PARAMS) for ids in ([1, 2], [3]))
        assert first != second
        events = _poll(running, 4)
        assert [event.token_ids for event in events if isinstance(event, Delta)] == [
            int32s([1, 2]),
            int32s([3]),
        ]
        assert [e.request_id for e in events if isinstance(e, Finished)] == [first, second]
        running.reschedule(Reschedule(num_blocks=4, max_step_tokens=64, prefix_cache=False))
        running.abort(first)
        begin = time.monotonic()
        assert running.poll(0.2) == []
        assert 0.2 <= time.monotonic() - begin < 2.0
    assert (_directories(), _processes(mark)) == ([], [])
    running.close()


def test_leaving_before_starting_is_nothing():
    with engine() as running:
        running.close()
    assert _directories() == []


def test_token_ids_that_are_no_numbers_are_rejected():
    with engine(tp=1) as running:
        running.start()
        for prompt in ([2**31], ["a"], [1.5]):
            with pytest.raises(RequestRejected, match="32-bit whole numbers"):
                running.submit(prompt, PARAMS)


@pytest.mark.parametrize(
    ("fault", "line", "rank"),
    [
        (
            "rank 1: load weights: raise",
            r"rank 1 failed in phase 'load weights': ValueError: no such tensor",
            1,
        ),
        (
            "rank 0: join the group: see a peer go;rank 1: load weights: raise",
            r"rank 1 failed in phase 'load weights': ValueError: no such tensor",
            1,
        ),
        (
            "rank 0: load weights: see a peer go;rank 1: load weights: signal 9",
            r"rank 1 \(pid \d+\) died in phase 'load weights' by signal 9 \(SIGKILL\)",
            1,
        ),
        (
            "rank 1: join the group: signal 6",
            r"rank 1 \(pid \d+\) died in phase 'join the group' by signal 6 \(SIGABRT\)",
            1,
        ),
        (
            "rank 0: load weights: exit 3",
            r"rank 0 \(pid \d+\) died in phase 'load weights' with exit code 3",
            0,
        ),
        (
            "runtime: start: exit 4",
            r"runtime \(pid \d+\) died in phase 'start' with exit code 4",
            -1,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and ": " in value else "",
)
def test_a_failing_start_names_process_phase_and_cause(mark, fault, line, rank):
    with engine(fault) as running:
        begin = time.monotonic()
        with pytest.raises(WorkerLost, match=f"^{line}$") as error:
            running.start()
        assert time.monotonic() - begin < 6.0
        assert error.value.rank == rank
        assert ("no\nsuch  tensor" in error.value.traceback) == ("ValueError" in line)
    assert (_directories(), _processes(mark)) == ([], [])


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            "rank 1: step: raise",
            r"rank 1 failed in phase 'step' \(step 17\): ValueError: no such.*",
        ),
        ("rank 1: step: signal 9", r"rank 1 \(pid \d+\) died in phase 'step' by signal 9.*"),
    ],
)
def test_a_rank_lost_while_serving_is_named_by_every_poll(fault, line):
    with engine(fault) as running:
        with pytest.raises(WorkerLost, match=f"^{line}$"):  # noqa: PT012
            running.start()
            running.abort(0)
            for _ in range(50):
                running.poll(0.2)
        told = []
        for _ in range(2):
            with pytest.raises(WorkerLost, match=f"^{line}$") as caught:
                running.poll(0.0)
            told.append(caught.value)
        assert told[0] is not told[1], "its traceback would grow"
        assert (told[0].rank, told[0].phase) == (1, "step")
        running.abort(0)


def test_a_killed_rank_is_noticed_within_2_seconds(mark):
    with engine("rank 1: load weights: hang;rank 0: load weights: hang") as running:
        killed_s = []

        def kill(news):
            if (news.rank, news.phase) == (1, "load weights"):
                [victim] = [p for p in _processes(mark) if p.environ().get("RANK") == "1"]
                victim.kill()
                killed_s.append(time.monotonic())

        with pytest.raises(WorkerLost, match=r"^rank 1 .* by signal 9 \(SIGKILL\)$"):
            running.start(kill)
        assert time.monotonic() - killed_s[0] < 2.0


def test_an_order_that_is_not_obeyed_in_time_is_told_with_the_phase():
    """The runtime here obeys none."""
    with engine(start_timeout_s=3.0) as running:
        running.start()
        running.order(Sleep(level=1))
        running.order(Wake())
        begin = time.monotonic()
        line = (
            "what was ordered took more than 3 s: rank 0 is in phase 'wake up', "
            "rank 1 is in phase 'wake up'"
        )
        with pytest.raises(WorkerLost, match=f"^{line}$"):
            running.poll(6.0)
        assert 2.9 <= time.monotonic() - begin < 5.0


def test_a_late_rank_is_named():
    with engine("rank 1: join the group: hang", start_timeout_s=3.0) as running:
        line = (
            "start-up took more than 3 s: rank 0 is in phase 'load weights', "
            "rank 1 is in phase 'join the group'"
        )
        with pytest.raises(WorkerLost, match=f"^{line}$"):
            running.start()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(mark):
    with engine("rank 1: step: hang deaf", stop_grace_s=0.5) as running:
        running.start()
        running.abort(0)
        begin = time.monotonic()
    assert time.monotonic() - begin < 0.5 + 5.0
    assert (_directories(), _processes(mark)) == ([], [])


def test_a_rank_that_waits_for_a_lost_one_is_ended_before_the_engine_is_closed(mark):
    """On a GPU it would wait in a kernel, deaf to all but SIGKILL, for minutes."""
    fault = "rank 0: step: hang deaf;rank 1: step: signal 9"
    with engine(fault, stop_grace_s=0.5) as running:
        running.start()
        running.abort(0)
        begin = time.monotonic()
        with pytest.raises(WorkerLost, match=r"^rank 1 "):  # noqa: PT012
            while True:
                running.poll(0.2)
        while _processes(mark) and time.monotonic() - begin < 10:
            time.sleep(0.05)
        assert _processes(mark) == []
        with pytest.raises(WorkerLost, match=r"^rank 1 "):
            running.poll(0.0)


def test_the_traceback_is_logged_at_info(caplog):
    caplog.set_level(logging.INFO)
    with engine("rank 1: load weights: raise") as running, pytest.raises(WorkerLost):
        running.start()
    assert "Traceback (most recent call last)" in caplog.text


def test_an_exception_of_the_progress_bar_stops_everything(mark):
    with pytest.raises(ZeroDivisionError), engine() as running:
        running.start(lambda news: 1 / 0)
    assert (_directories(), _processes(mark)) == ([], [])


def test_a_cluster_of_another_size_is_refused_before_anything_starts():
    facts = ClusterFacts(
        launcher="srun",
        rank=0,
        world_size=4,
        local_rank=0,
        local_world_size=4,
        master_addr="localhost",
        master_port=1,
    )
    running = Engine(config(2), facts, table=fake_table)
    with running, pytest.raises(ConfigError, match="tp=2: srun started 4 ranks"):
        running.start()


@pytest.mark.parametrize("local_world_size", [1, 2], ids=["several hosts", "one host"])
def test_under_a_cluster_launcher_rank_0_reports_over_its_own_wire(
    mark, monkeypatch, local_world_size
):
    """Over ipc where all ranks are on one host, over tcp with keys where not."""
    facts = ClusterFacts(
        launcher="torchrun",
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=local_world_size,
        master_addr="127.0.0.1",
        master_port=1,
    )
    monkeypatch.setenv(FAULT, "rank 0: load weights: raise")
    running = Engine(config(2), facts, table=fake_table)
    with running, pytest.raises(WorkerLost, match="rank 0 failed in phase 'load weights'"):
        running.start()
    assert (_directories(), _processes(mark)) == ([], [])


@pytest.mark.parametrize("moment", ["starting", "join the group", "load weights", "ready"])
def test_kill_9_of_the_launcher_leaves_nothing(mark, moment):
    faults = "" if moment == "ready" else "rank 0: load weights: hang;rank 1: load weights: hang"
    with _launcher(faults) as launcher:
        _read_until(launcher, moment)
        launcher.kill()
        launcher.wait()
        assert _until(lambda: not _processes(mark), 5.0), _processes(mark)
    if moment == "starting":
        # Killed in the few milliseconds before the runtime had its orders, it left the tidying to
        # the next launcher.
        sweep(Path(tempfile.gettempdir()))
    assert _until(lambda: not _directories(), 2.0)


def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(mark):
    moments = random.Random(7)
    for _ in range(6):
        with _launcher() as launcher:
            _read_until(launcher, "starting")
            time.sleep(moments.uniform(0.0, 0.8))
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(8) == 130
        assert (_directories(), _processes(mark)) == ([], [])


def test_the_line_of_a_lost_rank_is_the_last_on_stderr():
    with _launcher("rank 1: load weights: raise") as launcher:
        _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    last = stderr.decode().splitlines()[-1]
    assert last == "rank 1 failed in phase 'load weights': ValueError: no such tensor"


FAILED = Failed(
    rank=1, phase="step", step=3, error="ValueError", message="bad", traceback="Traceback 1"
)
SECONDARY = dataclasses.replace(FAILED, rank=0, error="PeerLost", secondary=True)
COMPLAINT = dataclasses.replace(FAILED, rank=-1, error="ProtocolError")
PHASES = {"runtime": "step", "rank 0": "step", "rank 1": "load"}


def end(name: str, code: int = 0, by: int = 0) -> Exit:
    return Exit(name=name, pid=5, code=code, signal=by)


@pytest.mark.parametrize(
    ("failures", "exits", "line"),
    [
        ([SECONDARY, FAILED], [], "rank 1 failed in phase 'step' (step 3): ValueError: bad"),
        (
            [FAILED],
            [end("rank 1", by=11)],
            "rank 1 failed in phase 'step' (step 3): ValueError: bad",
        ),
        (
            [FAILED],
            [end("rank 0", by=6)],
            "rank 1 failed in phase 'step' (step 3): ValueError: bad",
        ),
        (
            [FAILED],
            [end("rank 0", by=9)],
            "rank 0 (pid 5) died in phase 'step' by signal 9 (SIGKILL)",
        ),
        (
            [SECONDARY],
            [end("rank 0", 1), end("runtime", 1), end("rank 1", by=7)],
            "rank 1 (pid 5) died in phase 'load' by signal 7 (SIGBUS)",
        ),
        (
            [SECONDARY],
            [end("runtime", 1), end("rank 0", 1)],
            "rank 0 failed in phase 'step' (step 3): PeerLost: bad",
        ),
        (
            [COMPLAINT, SECONDARY],
            [end("runtime", 1)],
            "rank 0 failed in phase 'step' (step 3): PeerLost: bad",
        ),
        (
            [COMPLAINT],
            [end("runtime", 1), end("rank 1", 0)],
            "rank 1 (pid 5) died in phase 'load' with exit code 0",
        ),
        (
            [COMPLAINT],
            [end("runtime", 1)],
            "runtime failed in phase 'step' (step 3): ProtocolError: bad",
        ),
        ([], [end("rank 9", 2)], "rank 9 (pid 5) died in phase 'start' with exit code 2"),
        ([], [end("rank 1", by=99)], "rank 1 (pid 5) died in phase 'load' by signal 99 (unknown)"),
    ],
)
def test_the_cause_is_told_from_its_consequences(failures, exits, line):
    assert str(diagnose(failures, exits, PHASES)) == line


def test_a_long_message_of_many_lines_becomes_one():
    failed = dataclasses.replace(FAILED, step=-1, message="a\n" * 1000)
    line = str(diagnose([failed], [], {}))
    assert line.startswith("rank 1 failed in phase 'step': ValueError: a a a")
    assert line.endswith(" ...")
    assert len(line) < 600
    assert str(diagnose([dataclasses.replace(failed, message="")], [], {})).endswith(": ValueError")


@pytest.mark.parametrize(
    ("speculate", "end"), [("off", ""), ("2", ", or those of their drafts, which --speculate off ")]
)
def test_a_nan_may_be_the_drafts_where_there_are_any(speculate, end):
    launch = config(2)
    worker = dataclasses.replace(launch.runtime.worker, speculate=speculate)
    launch = dataclasses.replace(launch, runtime=dataclasses.replace(launch.runtime, worker=worker))
    said = "the logits of sampling rows [0] hold NaN"  # ops/transfer.py
    nan = dataclasses.replace(FAILED, error="FloatingPointError", message=said)
    line = f"rank 1 failed in phase 'step' (step 3): FloatingPointError: {said}{end}"
    assert str(diagnose([nan], [], PHASES, launch)).removesuffix("does without") == line
    assert str(diagnose([FAILED], [], PHASES, launch)).endswith("ValueError: bad")


def test_lateness_tells_where_every_rank_is():
    assert str(too_late(PHASES, 2.5)) == (
        "start-up took more than 2.5 s: rank 0 is in phase 'step', rank 1 is in phase 'load'"
    )


def _poll(running: Engine, count: int) -> list[object]:
    events: list[object] = []
    deadline = time.monotonic() + 10
    while len(events) < count and time.monotonic() < deadline:
        events += running.poll(1.0)
    return events


def _launcher(fault: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launcher.fake_launcher"],
        cwd=ROOT,
        env=os.environ | {FAULT: fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _read_until(launcher: subprocess.Popen[bytes], moment: str) -> None:
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.decode().strip() == moment:
            return
    assert launcher.stderr is not None
    pytest.fail(f"the launcher ended before {moment!r}: {launcher.stderr.read().decode()}")


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_the_engine_is_told_whose_drafts_may_be_rejected(monkeypatch, accept):
    launch = config()
    worker = dataclasses.replace(launch.runtime.worker, accept=accept)
    runtime = dataclasses.replace(launch.runtime, worker=worker)
    running = Engine(dataclasses.replace(launch, runtime=runtime))
    sent = []
    monkeypatch.setattr(running, "_send", sent.append)
    for options in ({}, {"temperature": 0.5}, {"temperature": 0.5, "seed": 0}):
        running.submit([1], SamplingParams(**options))
    assert [message.rejects for message in sent] == [False, accept == "rejection", False]
    assert [message.params.seed is None for message in sent] == [True, False, False]


def _directories() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("unisono-*"))


def _processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
