"""From everything that went wrong at once to the one line that says why. Pure.

When a rank fails, its peers see broken collectives and the processes end one after the other. The
cause is the rank's own exception; or, if there is none, the process that died first.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping, Sequence

from unisono.launcher.config import LaunchConfig
from unisono.launcher.process_table import process_name
from unisono.launcher.supervisor import Exit
from unisono.runtime.protocol import Failed, WorkerLost

START_PHASE = "start"
"""Of a process that has said nothing yet."""
STEP_PHASE = "step"
"""Of every process once the engine is ready."""
LONGEST_MESSAGE = 500
"""Characters of an exception's message in the line; the traceback has all of it."""

OUT_OF_MEMORY = "OutOfMemory"
"""The error by which a rank says so (workers/memory.py, which needs torch)."""


def is_certain(failures: Sequence[Failed], exits: Sequence[Exit]) -> bool:
    """Whether the cause is among these, so that nobody need wait for more reports."""
    return bool(_own(failures)) or bool(_killed(failures, exits))


def diagnose(
    failures: Sequence[Failed],
    exits: Sequence[Exit],
    phases: Mapping[str, str],
    launch: LaunchConfig | None = None,
) -> WorkerLost:
    """Return the error that names the cause. At least one of the sequences is not empty.

    In this order: a process that was killed from outside, a rank's own exception, another
    process that ended without a word, what a peer saw of it, the runtime's complaint.
    `phases`: the last known phase by process name. `launch`: what was asked for.
    """
    killed = _killed(failures, exits)
    if killed:
        return _of_exit(killed[0], phases)
    own = _own(failures)
    if own:
        return _of_failure(own[0], _doubt(own[0], launch))
    silent = sorted(_silent(failures, exits), key=lambda end: end.signal == 0)
    if silent:
        return _of_exit(silent[0], phases)
    if failures:
        return _of_failure(min(failures, key=lambda failed: (failed.rank < 0, failed.secondary)))
    return _of_exit(exits[0], phases)


def asks_too_much(error: BaseException) -> bool:
    """Whether ranks that start have no memory for what the options ask: others can be chosen."""
    return (
        isinstance(error, WorkerLost) and error.error == OUT_OF_MEMORY and error.phase != STEP_PHASE
    )


def too_late(phases: Mapping[str, str], timeout_s: float, what: str = "start-up") -> WorkerLost:
    """Return the error of a start-up, or of what else loads, that takes too long."""
    ranks = [name for name in phases if name != process_name(-1)]
    said = ", ".join(f"{name} is in phase {phases[name]!r}" for name in ranks)
    return WorkerLost(f"{what} took more than {timeout_s:g} s: {said}")


def with_flight(lost: WorkerLost, path: str) -> WorkerLost:
    """The same error with the file that holds the last steps; "": there is none."""
    if not path:
        return lost
    return WorkerLost(
        f"{lost}; to run the step again: unisono replay {shlex.quote(path)}",
        rank=lost.rank,
        phase=lost.phase,
        step=lost.step,
        error=lost.error,
        traceback=lost.traceback,
        flight=path,
    )


def _own(failures: Sequence[Failed]) -> list[Failed]:
    """Exceptions that a rank has not caught from a peer; the runtime's may be a consequence."""
    return [failed for failed in failures if failed.rank >= 0 and not failed.secondary]


def _silent(failures: Sequence[Failed], exits: Sequence[Exit]) -> list[Exit]:
    """Ends that no exception explains. The runtime ends once it has passed one on."""
    explained = {process_name(failed.rank) for failed in failures}
    if failures:
        explained.add(process_name(-1))
    return [end for end in exits if end.name not in explained]


def _killed(failures: Sequence[Failed], exits: Sequence[Exit]) -> list[Exit]:
    """Ends by SIGKILL, which no fault of a peer leads to: someone, or a lack of memory, did it."""
    return [end for end in _silent(failures, exits) if end.signal == signal.SIGKILL]


def _doubt(failed: Failed, launch: LaunchConfig | None) -> str:
    """What else may be at fault. A step does not tell a NaN of its drafts from one of the model's:
    on a GPU one graph counts the answers of both."""
    if launch is None or "sampling rows" not in failed.message:
        return ""
    drafts = launch.runtime.worker.num_drafts
    return ", or those of their drafts, which --speculate off does without" if drafts else ""


def _of_failure(failed: Failed, doubt: str = "") -> WorkerLost:
    step = f" (step {failed.step})" if failed.step >= 0 else ""
    message = " ".join(failed.message.split())
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + " ..."
    cause = f"{failed.error}: {message}" if message else failed.error
    return WorkerLost(
        f"{process_name(failed.rank)} failed in phase {failed.phase!r}{step}: {cause}{doubt}",
        rank=failed.rank,
        phase=failed.phase,
        step=failed.step,
        error=failed.error,
        traceback=failed.traceback,
    )


def _of_exit(end: Exit, phases: Mapping[str, str]) -> WorkerLost:
    how = f"with exit code {end.code}"
    if end.signal:
        how = f"by signal {end.signal} ({_signal_name(end.signal)})"
    phase = phases.get(end.name, START_PHASE)
    rank = next((rank for rank in range(-1, 1 << 16) if process_name(rank) == end.name), -1)
    line = f"{end.name} (pid {end.pid}) died in phase {phase!r} {how}"
    return WorkerLost(line, rank=rank, phase=phase)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
