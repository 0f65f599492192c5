"""Reads what the flight recorder wrote (runtime/flight.py), and plans a step of it anew.

Each row's request is opened with all its tokens so far, and what lies before the row is computed
anew, as after a pre-emption: that gives the bits of KV and of recurrent states that the ranks had.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from unisono.models.config import ConfigError
from unisono.runtime.flight import (
    END,
    FORMAT,
    NUMBER,
    VERSION,
    FlightHeader,
    OpenSlot,
    RecordedSlot,
    Slots,
    Step,
    fold,
)
from unisono.workers.channel import (
    ProtocolError,
    decode_header,
    decode_message,
    from_plain,
)
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import (
    Phase,
    Rows,
    StepPlan,
    StepResult,
    int32s,
    pack_sampling,
    unpack_sampling,
)

_LONGEST_HEADER = 1 << 22
_SETUP_TOKENS = 2048
"""Most tokens of a step that rebuilds the state; a multiple of the block size."""
_MESSAGES = {cls.__name__: cls for cls in (RecordedSlot, StepPlan, StepResult)}


@dataclass(frozen=True, slots=True)
class Flight:
    """What a file holds."""

    header: FlightHeader
    slots: Slots
    steps: Sequence[Step]

    def find(self, step: int | None) -> Step:
        """The step of this number; None: the one that failed.

        Where that is not known, it is the first that a rank has not answered (later ones were
        sent ahead), or else the last. Raises ConfigError if it is not in the file.
        """
        by_number = {each.plan.step: each for each in self.steps}
        if step is None:
            num_ranks = self.header.worker.tp
            unanswered = (each for each in self.steps if len(each.results) < num_ranks)
            likely = next(unanswered, self.steps[-1])
            return by_number.get(self.header.failed.step, likely)
        if step not in by_number:
            raise ConfigError(
                f"--step {step}: the file holds steps {min(by_number)} to {max(by_number)}"
            )
        return by_number[step]

    def slots_before(self, step: int) -> Slots:
        """The slots as `step` found them. Raises ConfigError if a result before it is missing."""
        slots = {
            number: OpenSlot(slot.tokens[:], slot.sampling, slot.blocks[:], slot.state)
            for number, slot in self.slots.items()
        }
        for each in self.steps:
            if each.plan.step >= step:
                break
            if not each.results:
                raise ConfigError(
                    f"--step {step}: no rank had answered step {each.plan.step} before; "
                    f"choose a step up to {each.plan.step}"
                )
            fold(slots, each.plan, each.results[0])
        return slots

    def left_to_chance(self, step: int) -> set[int]:
        """Slots whose token of `step` hangs on drafts, which nobody recorded: those that may be
        rejected. Raises ConfigError as `slots_before`."""
        rows, slots = self.find(step).plan.rows, self.slots_before(step)
        drafting = {slot for slot, drafts in zip(rows.slot, rows.drafts, strict=False) if drafts}
        return {slot for slot in drafting if slots[slot].sampling.rejects}


def read_flight(path: Path) -> Flight:
    """Read a file. Raises ConfigError, one line, if it is none, damaged or of another version."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_HEADER)
            body = file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    header = _read_header(path, line)
    try:
        messages = list(_decode(body))
    except (ProtocolError, struct.error, TypeError) as error:
        raise ConfigError(f"{path} is damaged or not complete: {error}") from None
    slots, steps = {}, []
    for message in messages:
        match message:
            case RecordedSlot():
                [recipe] = unpack_sampling(message.sampling)
                slots[message.slot] = OpenSlot(
                    message.tokens, recipe, message.blocks, message.state
                )
            case StepPlan():
                steps.append(Step(message))
            case StepResult():
                steps[message.step - steps[-1].plan.step - 1].results.append(message)
    return Flight(header, slots, steps)


def _read_header(path: Path, line: bytes) -> FlightHeader:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a flight of unisono")
    if facts.get("version") != VERSION:
        raise ConfigError(
            f"{path} is a flight of version {facts.get('version')}, written by unisono "
            f"{facts.get('unisono')}; this one reads version {VERSION}"
        )
    try:
        return from_plain(FlightHeader, facts)
    except ProtocolError as error:
        raise ConfigError(
            f"{path} was written by another unisono, {facts.get('unisono')}: {error}"
        ) from None


def replay_plans(flight: Flight, step: int) -> list[StepPlan]:
    """Plans that bring fresh ranks to where `step` began, and last its own.

    That is unchanged but for drafts, which nobody recorded: each row gives its first token. The
    numbers end with 0, so that none is that of a recorded step. Raises ConfigError.
    """
    plan = flight.find(step).plan
    before, after = flight.slots_before(step), flight.slots_before(step)
    fold(after, plan, None)
    plan = _without_drafts(plan, before)
    is_hybrid = flight.header.worker.model.is_hybrid
    opened = dict(zip(plan.open_slot, plan.open_restore or [0] * len(plan.open_slot), strict=True))
    starts = dict(zip(plan.rows.slot, plan.rows.start, strict=True))
    slots: Slots = {}
    for slot, start in list(starts.items()):
        if slot not in opened:
            slots[slot] = before[slot]
        elif opened[slot] and opened[slot] in (each.state for each in slots.values()):
            del starts[slot]  # one that is opened beside it brings back all that they share
        else:
            slots[slot] = _shared_part(after[slot], start, opened[slot])
    setup = list(_setup_rows(starts))
    first = StepPlan(step=1 - len(setup), rows=setup[0], **_open_arrays(slots, is_hybrid))
    rest = [StepPlan(step=i - len(setup), rows=rows) for i, rows in enumerate(setup[1:], start=2)]
    return [first, *rest, plan]


def _without_drafts(plan: StepPlan, before: Slots) -> StepPlan:
    """The plan with rows that begin where they did: where drafts are in flight it did not know."""
    if not plan.num_proposals and not plan.rows.drafts:
        return plan
    start = plan.rows.start[:]
    for row, (slot, phase) in enumerate(zip(plan.rows.slot, plan.rows.phase, strict=True)):
        if phase == Phase.DECODE:
            start[row] = len(before[slot].tokens) - 1
    return replace(plan, rows=replace(plan.rows, start=start, drafts=int32s()), num_proposals=0)


def _shared_part(slot: OpenSlot, start: int, snapshot: int) -> OpenSlot:
    """Of a slot that the step itself opens: the blocks that it finds filled, up to `start`.

    Its state takes the place of the snapshot that the step copies.
    """
    return OpenSlot(slot.tokens, slot.sampling, slot.blocks[: start // BLOCK_SIZE], snapshot)


def _setup_rows(starts: Mapping[int, int]) -> Iterator[Rows]:
    """Rows of the steps that compute the first starts[slot] tokens of each slot; at least one.

    Slot 0 is scratch, and its row keeps a step from being empty.
    """
    done = dict.fromkeys(starts, 0)
    while True:
        rows, budget = Rows(), _SETUP_TOKENS
        for slot, start in starts.items():
            count = min(start - done[slot], budget)
            if done[slot] + count < start:
                count -= count % BLOCK_SIZE
            if count:
                _add_row(rows, slot, done[slot], count)
                done[slot] += count
                budget -= count
        if not len(rows):
            _add_row(rows, 0, 0, 1)
        yield rows
        if done == starts:
            return


def _add_row(rows: Rows, slot: int, start: int, count: int) -> None:
    rows.slot.append(slot)
    rows.start.append(start)
    rows.count.append(count)
    rows.phase.append(Phase.CHUNK)


def _open_arrays(slots: Slots, is_hybrid: bool) -> dict[str, Any]:
    """What a plan says that opens `slots` with all their tokens, and every block to be filled."""
    tokens, block_slot, block_id = int32s(), int32s(), int32s()
    states = int32s(slot.state for slot in slots.values() if is_hybrid)
    for number, slot in slots.items():
        tokens.extend(slot.tokens)
        block_slot.extend([number] * len(slot.blocks))
        block_id.extend(slot.blocks)
    return {
        "open_slot": int32s(slots),
        "open_length": int32s(len(slot.tokens) for slot in slots.values()),
        "open_tokens": tokens,
        "open_sampling": pack_sampling(slot.sampling for slot in slots.values()),
        "num_shared": int32s([0] * len(slots)),
        "block_slot": block_slot,
        "block_id": block_id,
        "open_state": states,
        "open_restore": int32s([0] * len(states)),
    }


def _decode(body: bytes) -> Iterator[Any]:
    if len(body) < END.size or END.unpack(body[-END.size :])[0] != 0:
        raise ProtocolError("its end is missing")
    raw, (_, count, checksum) = body[: -END.size], END.unpack(body[-END.size :])
    if crc32(raw) != checksum:
        raise ProtocolError("its checksum does not fit")
    stream = io.BytesIO(raw)
    for _ in range(count):
        frames = [stream.read(_read_number(stream)) for _ in range(_read_number(stream))]
        header = decode_header(frames)
        if header.type_name not in _MESSAGES:
            raise ProtocolError(f"type {header.type_name[:60]!r} is none of {', '.join(_MESSAGES)}")
        yield decode_message(header, frames, _MESSAGES[header.type_name])


def _read_number(stream: io.BytesIO) -> int:
    number: int = NUMBER.unpack(stream.read(NUMBER.size))[0]
    return number
