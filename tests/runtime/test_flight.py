"""The flight recorder: what it costs, what it folds, and a file that no end of us can cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launcher.fakes import tiny_model
from tests.paths import python_path
from tests.runtime.fakes import orders_of
from unisono.launcher.flight_file import read_flight
from unisono.models.config import ConfigError
from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.flight import NUM_KEPT, SUFFIX, VERSION, FlightRecorder
from unisono.runtime.protocol import (
    ENGINE_EVENTS,
    EngineReady,
    Failed,
    SamplingParams,
    Submit,
)
from unisono.workers.channel import Peer
from unisono.workers.config import WorkerConfig
from unisono.workers.orders import orders_line
from unisono.workers.protocol import (
    WORKER_COMMANDS,
    Allocate,
    Fault,
    Hello,
    Loaded,
    Phase,
    Ready,
    Rows,
    SlotSampling,
    StepPlan,
    StepResult,
    int32s,
    pack_sampling,
)

WORKER = WorkerConfig(model_path="m", model=tiny_model(), device="cpu", max_model_len=100)
TAKEN = Allocate(num_blocks=8, num_states=5)
FAILED = Failed(rank=1, phase="step", step=9, error="E", message="line\nbreak", traceback="t")


def opening(step: int, slots: list[int], length: int = 3) -> StepPlan:
    count = len(slots)
    return StepPlan(
        step=step,
        rows=rows(slots, 0, length, Phase.PROMPT),
        open_slot=int32s(slots),
        open_length=int32s([length] * count),
        open_tokens=int32s(range(length * count)),
        open_sampling=pack_sampling([SlotSampling(seed=slot, top_k=2) for slot in slots]),
        num_shared=int32s([0] * count),
        block_slot=int32s(slots),
        block_id=int32s(slots),
    )


def rows(slots: list[int], start: int, count: int, phase: Phase) -> Rows:
    many = len(slots)
    return Rows(
        slot=int32s(slots),
        start=int32s([start] * many),
        count=int32s([count] * many),
        phase=int32s([phase] * many),
    )


def result(step: int, tokens: list[int], rank: int = 0) -> StepResult:
    return StepResult(rank=rank, step=step, tokens=int32s(tokens), digest=7, seconds=0.5)


def recorded(num_steps: int, window: int = 512, slots: tuple[int, ...] = (1, 2)) -> FlightRecorder:
    recorder = FlightRecorder(window)
    for step in range(1, num_steps + 1):
        decode = StepPlan(step=step, rows=rows([*slots], step + 1, 1, Phase.DECODE))
        recorder.plan(opening(1, [*slots]) if step == 1 else decode)
        recorder.result(result(step, [100 * slot + step for slot in slots]))
    return recorder


def write(recorder: FlightRecorder, path: Path) -> Path:
    assert recorder.write(path, orders_of(WORKER), TAKEN, FAILED)
    return path


def test_a_step_costs_little() -> None:
    """20 us at 256 rows on a quiet machine; the limit leaves room for a crowded one."""
    slots = list(range(1, 257))
    recorder = recorded(600, slots=tuple(slots))
    seconds = []
    for step in range(601, 801):
        plan = StepPlan(step=step, rows=rows(slots, step, 1, Phase.DECODE))
        answer = result(step, slots)
        began = time.perf_counter()
        recorder.plan(plan)
        recorder.result(answer)
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[50] < 60e-6


def test_steps_before_the_window_are_folded(tmp_path: Path) -> None:
    whole = read_flight(write(recorded(30), tmp_path / "whole"))
    cut = read_flight(write(recorded(30, window=4), tmp_path / "cut"))
    assert [step.plan.step for step in cut.steps] == [27, 28, 29, 30]
    assert not whole.slots
    for step in (27, 30):
        assert cut.slots_before(step) == whole.slots_before(step)
        assert cut.find(step) == whole.find(step)
    slot = cut.slots[2]
    assert slot.tokens == int32s([3, 4, 5, *range(201, 227)])
    assert (slot.sampling, slot.blocks) == (SlotSampling(seed=2, top_k=2), int32s([2]))


def test_results_may_come_a_step_late_and_from_every_rank(tmp_path: Path) -> None:
    recorder = recorded(2)
    recorder.plan(StepPlan(step=3, rows=rows([1, 2], 4, 1, Phase.DECODE)))
    recorder.result(result(2, [8, 9], rank=1))
    recorder.result(result(3, [5, 6], rank=1))
    recorder.result(result(3, [5, 7], rank=0))
    flight = read_flight(write(recorder, tmp_path / "f"))
    assert [[each.rank for each in step.results] for step in flight.steps] == [[0], [0, 1], [1, 0]]


def test_a_chunk_adds_no_token(tmp_path: Path) -> None:
    recorder = recorded(2)
    mixed = rows([1, 2], 4, 1, Phase.DECODE)
    mixed.phase[0] = Phase.CHUNK
    recorder.plan(StepPlan(step=3, rows=mixed))
    recorder.result(result(3, [55]))
    recorder.plan(StepPlan(step=4, rows=rows([2], 5, 1, Phase.DECODE)))
    slots = read_flight(write(recorder, tmp_path / "f")).slots_before(4)
    assert (slots[1].tokens[-1], slots[2].tokens[-1]) == (102, 55)


def test_the_header_says_what_is_needed(tmp_path: Path) -> None:
    path = write(recorded(3), tmp_path / "new" / "f.flight")
    header = read_flight(path).header
    assert (header.worker, header.num_blocks, header.failed) == (WORKER, 8, FAILED)
    assert header.num_states == 5
    assert header.unisono == "0.0.7"
    assert header.torch
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_bytes().partition(b"\n")[0])["failed"]["step"] == 9


def test_nothing_is_written_of_an_engine_without_a_step(tmp_path: Path) -> None:
    assert not FlightRecorder().write(tmp_path / "f", orders_of(WORKER), TAKEN, FAILED)
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    other, stale = tmp_path / "notes.txt", tmp_path / f".old{SUFFIX}.part"
    for path in (other, stale):
        path.touch()
    os.utime(stale, (0, 0))
    for number in range(NUM_KEPT + 3):
        path = write(recorded(1), tmp_path / f"{number:02}{SUFFIX}")
        os.utime(path, (number, number))
    write(recorded(1), tmp_path / f"last{SUFFIX}")
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"notes.txt", f"last{SUFFIX}", *(f"{n:02}{SUFFIX}" for n in range(4, 13))}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(OSError, match="directory"):
        write(recorded(1), tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_every_truncation_and_every_flipped_byte_is_found(tmp_path: Path) -> None:
    content = write(recorded(3), tmp_path / "f").read_bytes()
    header = content.index(b"\n") + 1
    for length in [*range(0, header, 97), *range(header, len(content), 13), len(content) - 1]:
        (tmp_path / "f").write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"is damaged or not complete|is not a flight"):
            read_flight(tmp_path / "f")
    for place in range(header, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        (tmp_path / "f").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged or not complete") as caught:
            read_flight(tmp_path / "f")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: b"", "is not a flight of unisono"),
        (lambda text: b"\x00\xff" + text, "is not a flight of unisono"),
        (lambda text: b"[1]\n", "is not a flight of unisono"),
        (lambda text: b'{"format": "other"}\n', "is not a flight of unisono"),
        (
            lambda text: text.replace(b'"version":3', b'"version":99', 1),
            f"is a flight of version 99, written by unisono 0.0.7; this one reads "
            f"version {VERSION}",
        ),
        (
            lambda text: text.replace(b'"tp":1', b'"tp_size":1', 1),
            "was written by another unisono, 0.0.7: FlightHeader.worker: ",
        ),
    ],
)
def test_foreign_files_are_refused_by_name(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = write(recorded(3), tmp_path / "f")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        read_flight(path)
    assert f"{path} {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_flight(tmp_path / "gone")


def failing_runtime(directory: Path, delay_s: float) -> tuple[int, Path]:
    """Start a real runtime, let its only rank fail, and abort it `delay_s` later as a launcher
    does: SIGTERM, and the end of its stdin. Returns its exit code and the flight."""
    session = "0" * 32
    directory.mkdir()
    ends = [f"ipc://{directory}/{name}" for name in ("c", "w")]
    flight = directory.parent / f"f-{directory.name}" / f"f{SUFFIX}"
    orders = RuntimeOrders(
        config=RuntimeConfig(worker=WORKER),
        client_endpoint=ends[0],
        worker_endpoint=ends[1],
        session=session,
        private_dir=str(directory),
        flight_file=str(flight),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", "from unisono.runtime.entry import main; main()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.stdin is not None
    process.stdin.write(orders_line(orders, os.getpid()))
    process.stdin.flush()
    with (
        Peer(ends[0], "launcher", ENGINE_EVENTS, session) as client,
        Peer(ends[1], "rank 0", WORKER_COMMANDS, session) as rank,
    ):
        rank.send(Hello(rank=0, pid=1, host="h", config_digest="d"))
        rank.send(
            Loaded(
                rank=0,
                num_blocks=8,
                device="cpu",
                dtype="float32",
                weight_bytes=0,
                activation_bytes=0,
                block_bytes=0,
            )
        )
        assert rank.receive(20) is not None
        rank.send(Ready(rank=0))
        assert isinstance(client.receive(20), EngineReady)
        params = SamplingParams(max_tokens=9)
        client.send(Submit(request_id=0, prompt_ids=int32s([1, 2]), params=params))
        plan = rank.receive(20)
        assert isinstance(plan, StepPlan)
        fault = {"phase": "step", "step": plan.step, "error": "E", "message": "m", "traceback": ""}
        rank.send(Fault(rank=0, **fault))
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        process.stdin.close()
        code = process.wait(20)
    return code, flight


@pytest.mark.chaos
def test_the_end_of_the_launcher_never_cuts_a_flight() -> None:
    place = Path(os.environ["TMPDIR"])  # short: a socket's path has a limit
    delays = [*(0.003 * i for i in range(21)), *[0.3] * 4]
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(failing_runtime, [place / f"r{i}" for i in range(25)], delays))
    for code, flight in ends:
        if code == -signal.SIGTERM:
            assert not flight.parent.exists(), "it ended before it knew of the fault"
        else:
            assert code == 1
            assert read_flight(flight).header.failed.error == "E"
            assert list(flight.parent.iterdir()) == [flight]
            shutil.rmtree(flight.parent)
    assert sum(code == 1 for code, _ in ends) >= 4
