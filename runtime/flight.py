"""The flight recorder: the last steps of an engine, and the file they are written to on a crash.

A step costs the recorder two references, and one that leaves the window a few microseconds: it is
folded into what each slot was opened with, its blocks and the tokens it got since. So any step of
the window can be run again: launcher/replay.py opens its rows with all tokens so far.

The file is a line of JSON (`FlightHeader`), then messages in the form of the wire, each as
[number of frames][length, bytes][length, bytes]...: a `RecordedSlot` per slot at the start of the
window, then every step's `StepPlan` and `StepResult`s; last [0][number of messages][crc32].
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import repeat
from pathlib import Path
from zlib import crc32

from unisono.runtime.config import RuntimeOrders
from unisono.runtime.protocol import Failed
from unisono.workers.channel import encode_message, to_json
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import (
    Allocate,
    Phase,
    SlotSampling,
    StepPlan,
    StepResult,
    int32s,
    pack_sampling,
    unpack_sampling,
)

FORMAT, VERSION = "unisono flight", 3
SUFFIX = ".flight"
WINDOW = 512
"""Steps that can be replayed."""
NUM_KEPT = 10
"""Files in the directory of flights; older ones are removed when a new one is written."""
_STALE_S = 3600.0
NUMBER = struct.Struct("<I")
END = struct.Struct("<III")
_CHUNK = int(Phase.CHUNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightHeader:
    """What the ranks were and what went wrong."""

    format: str = FORMAT
    version: int = VERSION
    unisono: str
    torch: str
    python: str = platform.python_version()
    session: str
    worker: WorkerConfig
    num_blocks: int
    num_states: int
    failed: Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSlot:
    """A slot at the start of the window: all its tokens so far, its recipe, blocks and state."""

    slot: int
    tokens: array[int]
    sampling: array[int]
    """`pack_sampling` of its one recipe."""
    blocks: array[int]
    state: int


@dataclass(slots=True)
class OpenSlot:
    """`RecordedSlot` on its way through the steps."""

    tokens: array[int]
    sampling: SlotSampling
    blocks: array[int] = field(default_factory=int32s)
    state: int = 0
    """Its recurrent state; 0: the model has none."""


@dataclass(slots=True)
class Step:
    """One step and what the ranks answered, as far as they have."""

    plan: StepPlan
    results: list[StepResult] = field(default_factory=list)


Slots = dict[int, OpenSlot]


class FlightRecorder:
    """Keeps the last `window` steps."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._slots: Slots = {}
        self._steps: deque[Step] = deque()

    def plan(self, plan: StepPlan) -> None:
        """A step is sent; the plan must not change any more."""
        self._steps.append(Step(plan))
        if len(self._steps) > self._window:
            oldest = self._steps.popleft()
            fold(self._slots, oldest.plan, oldest.results[0])

    def result(self, result: StepResult) -> None:
        """A rank has answered one of the last steps."""
        self._steps[result.step - self._steps[-1].plan.step - 1].results.append(result)

    def write(self, path: Path, orders: RuntimeOrders, allocated: Allocate, failed: Failed) -> bool:
        """Write the file, whole or not at all; False if there is no step. Raises OSError."""
        if not self._steps:
            return False
        header = FlightHeader(
            unisono=orders.version,
            torch=metadata.version("torch"),
            session=orders.session,
            worker=orders.config.worker,
            num_blocks=allocated.num_blocks,
            num_states=allocated.num_states,
            failed=failed,
        )
        _write_whole(path, _encode(header, self._slots, self._steps))
        with contextlib.suppress(OSError):
            _remove_old(path.parent)
        return True


def fold(slots: Slots, plan: StepPlan, result: StepResult | None) -> None:
    """Let `slots` go through a step that gave `result`; without one only its changes apply."""
    if plan.open_slot:
        recipes = unpack_sampling(plan.open_sampling) or [SlotSampling()] * len(plan.open_slot)
        states = plan.open_state or [0] * len(plan.open_slot)
        opened = zip(plan.open_slot, plan.open_length, recipes, states, strict=True)
        start = 0
        for slot, length, recipe, state in opened:
            given = plan.open_tokens[start : start + length]
            slots[slot] = OpenSlot(given, recipe, state=state)
            start += length
    for slot, block in zip(plan.block_slot, plan.block_id, strict=True):
        slots[slot].blocks.append(block)
    if result is None:
        return
    rows = plan.rows
    sampling: Sequence[int] = rows.slot
    if _CHUNK in rows.phase:
        pairs = zip(rows.slot, rows.phase, strict=True)
        sampling = [slot for slot, phase in pairs if phase != _CHUNK]
    stop = 0
    for slot, count in zip(sampling, result.counts or repeat(1, len(sampling)), strict=True):
        slots[slot].tokens += result.tokens[stop : stop + count]
        stop += count


def _encode(header: FlightHeader, slots: Slots, steps: Iterable[Step]) -> bytes:
    messages: list[object] = [
        RecordedSlot(
            slot=number,
            tokens=slot.tokens,
            sampling=pack_sampling([slot.sampling]),
            blocks=slot.blocks,
            state=slot.state,
        )
        for number, slot in slots.items()
    ]
    for step in steps:
        messages += [step.plan, *step.results]
    raw = bytearray()
    for number, message in enumerate(messages):
        frames = encode_message(message, header.session, number)
        raw += NUMBER.pack(len(frames))
        for frame in frames:
            raw += NUMBER.pack(len(frame)) + frame
    return to_json(header).encode() + b"\n" + raw + END.pack(0, len(messages), crc32(raw))


def _write_whole(path: Path, content: bytes) -> None:
    """No reader sees a part, and after a crash of the machine the file is whole or not there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_old(directory: Path) -> None:
    flights = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    parts = directory.glob(f".*{SUFFIX}.part")
    stale = [path for path in parts if path.stat().st_mtime < time.time() - _STALE_S]
    for path in [*flights[:-NUM_KEPT], *stale]:
        path.unlink(missing_ok=True)
