"""How a child process is told what to do, and how it dies with its parent. Torch-free.

The parent writes one line of JSON to the child's stdin and keeps the pipe open: the line is the
orders, and the end of the pipe is the parent's death. A child's first two calls are

    orders, parent_pid = read_orders(WorkerOrders)
    die_with_parent(parent_pid)

before it imports anything slow, so that no phase of its life is without a guard.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, NoReturn, TypeVar

from unisono.workers.channel import CurveKeys, ProtocolError, from_plain, to_plain
from unisono.workers.config import WorkerConfig

T = TypeVar("T")

ORPHAN_EXIT_CODE = 1
"""Of a child whose parent is gone; nobody is left to read it."""
PARENT_CHECK_S = 1.0
"""How often a child looks who its parent is: a fork of the parent may hold the pipe open."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrders:
    """What one rank is told. `rank`, `endpoint` and `session` are all it needs to report back."""

    config: WorkerConfig
    rank: int
    endpoint: str
    """Where the runtime's ROUTER for ranks listens."""
    session: str
    max_step_tokens: int = 0
    """Most tokens of a step, or one KV block if that is more: what memory must be kept for."""
    has_prefix_cache: bool = True
    """Whether there are snapshots of recurrent states."""
    log_level: str = "warning"
    threads: int = 0
    """CPU threads of this rank; 0: cores divided by ranks of this host."""
    curve: CurveKeys | None = None
    """The hub's public key where `endpoint` is tcp:// beyond this host."""
    timeline_dir: str = ""
    """Where a rank of this host notes what it does (workers/timeline.py); empty: nowhere."""


def orders_line(orders: object, parent_pid: int) -> bytes:
    """Return what the parent writes to the child's stdin. Raises ProtocolError."""
    envelope = {"parent_pid": parent_pid, "orders": to_plain(orders)}
    return json.dumps(envelope, separators=(",", ":")).encode() + b"\n"


def read_orders(cls: type[T], stream: BinaryIO | None = None) -> tuple[T, int]:
    """Read the line from stdin (or `stream`); return the orders and the parent's process id.

    Ends the process if the pipe closes first: the parent died or changed its mind. Raises
    ProtocolError for a line that is not such orders.
    """
    line = _first_line_of_stdin() if stream is None else stream.readline()
    if not line.endswith(b"\n"):
        sys.exit(ORPHAN_EXIT_CODE)
    try:
        envelope = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"orders are one line of JSON: {error}") from None
    if type(envelope) is not dict or envelope.keys() != {"parent_pid", "orders"}:
        raise ProtocolError("orders are an object of parent_pid and orders")
    if type(envelope["parent_pid"]) is not int:
        raise ProtocolError(f"parent_pid {envelope['parent_pid']!r} is not a number")
    return from_plain(cls, envelope["orders"]), envelope["parent_pid"]


def die_with_parent(parent_pid: int, tidy: Callable[[], None] | None = None) -> None:
    """Make sure this process does not outlive process `parent_pid`. Call it in the main thread.

    A worker (no `tidy`) is killed by the kernel where that exists (Linux), at the moment the
    thread that started it ends. With `tidy` the process gets the time to call it and then ends;
    `tidy` is called as well when the process ends by itself. SIGINT is ignored from here on: a
    Ctrl-C reaches every process of a terminal, and the launcher decides what it means. SIGTERM
    ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if tidy is None and sys.platform == "linux":
        _arm_parent_death_signal()
    # After arming: a parent that died before it sends no signal any more.
    if os.getppid() != parent_pid:
        _end(tidy)
    if tidy is not None:
        # Not for orphans only: a dying parent closes its sockets before it is seen to be dead, and
        # the main thread may end by the broken channel before the watching thread learns of it.
        atexit.register(tidy)
    thread = threading.Thread(
        target=_watch_parent, args=(parent_pid, tidy), name="parent-watch", daemon=True
    )
    thread.start()


def _first_line_of_stdin() -> bytes:
    # Unbuffered: what is left in the pipe belongs to the thread that waits for its end.
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            break
        line += piece
    return line


def _arm_parent_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _watch_parent(parent_pid: int, tidy: Callable[[], None] | None) -> None:
    while os.getppid() == parent_pid:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_S)
        if readable and not os.read(0, 1 << 12):
            break
    _end(tidy)


def _end(tidy: Callable[[], None] | None) -> NoReturn:
    try:
        if tidy is not None:
            tidy()
    finally:
        os._exit(ORPHAN_EXIT_CODE)
