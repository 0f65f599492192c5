"""Starts, watches and stops the processes of a table. No process outlives its supervisor."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import unisono
from unisono.launcher.process_table import ProcessSpec
from unisono.workers.orders import orders_line

WATCH_S = 0.05
"""How often processes are looked at."""
KILL_WAIT_S = 3.0
"""Longest that a killed process is awaited; one that hangs in a driver may take for ever."""

BOOT = """\
import importlib, importlib.util, os, sys
init, entry = sys.argv[1:]
spec = importlib.util.find_spec("unisono")
if spec is None or spec.origin is None or not os.path.samefile(spec.origin, init):
    sys.path.insert(0, os.path.dirname(os.path.dirname(init)))
module, _, function = entry.partition(":")
sys.exit(getattr(importlib.import_module(module), function)())
"""
"""Run by a child: finds the parent's own package, installed or not, then calls the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a process. `signal` is 0 unless one killed it; `code` is 0 then."""

    name: str
    pid: int
    code: int
    signal: int


class Supervisor:
    """Runs the processes of `specs`. `grace_s`: what they get to end by themselves.

    The constructor starts nothing. A thread of its own, which lives as long as the supervisor,
    owns the children: it spawns them, because the kernel's parent-death signal fires when the
    spawning *thread* ends, and it ends them. The methods only read and write plain attributes, so
    `stop` works from a signal handler too, whatever it interrupts.
    """

    def __init__(self, specs: Sequence[ProcessSpec], grace_s: float) -> None:
        self._specs = tuple(specs)
        self._grace_s = grace_s
        self._children: list[tuple[ProcessSpec, subprocess.Popen[bytes]]] = []
        self._exits: tuple[Exit, ...] = ()
        self._started = self._stopping = self._hurry = False
        self._error: BaseException | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._own, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start every process, in order, and return. Raises OSError if one cannot be."""
        self._thread.start()
        while not self._started and self._thread.is_alive():
            time.sleep(0.002)
        if self._error is not None:
            raise self._error

    def poll(self) -> list[Exit]:
        """Return the processes that have ended, in the order they were seen to."""
        return list(self._exits)

    def pids(self) -> dict[str, int]:
        """Return the process ids by name."""
        return {spec.name: child.pid for spec, child in self._children}

    def wait(self, timeout_s: float) -> bool:
        """Give the processes time to end by themselves; True if all have."""
        deadline = time.monotonic() + timeout_s
        while len(self._exits) < len(self._children):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def begin_stop(self) -> None:
        """Have every process end as by `stop`, and return at once."""
        # Who was forked off has no thread, and nothing to wait for.
        if os.getpid() == self._owner_pid:
            self._stopping = True
            self._wake.put(None)

    def stop(self) -> None:
        """End every process: SIGTERM, and SIGKILL after the grace. Safe at any time, and twice.

        Returns when they are gone, at the latest a few seconds after the grace. A Ctrl-C
        meanwhile ends the grace.
        """
        self.begin_stop()
        deadline = time.monotonic() + self._grace_s + KILL_WAIT_S + 1.0
        try:
            self._await_thread(deadline)
        except KeyboardInterrupt:
            self._hurry = True
            self._await_thread(deadline)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_thread(self, deadline: float) -> None:
        # Not join(): it takes a lock, which a signal handler may not.
        while self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _own(self) -> None:
        """Life of the thread."""
        try:
            for spec in self._specs:
                if self._stopping:
                    break
                self._children.append((spec, _spawn(spec)))
                _give_orders(*self._children[-1])
        except BaseException as error:
            self._error = error
        self._started = True
        while not self._stopping and self._error is None:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=WATCH_S)
            self._reap()
        self._end()

    def _end(self) -> None:
        for _, child in self._running():
            _signal_group(child, signal.SIGTERM)
            assert child.stdin is not None
            child.stdin.close()
        deadline = time.monotonic() + self._grace_s
        while self._running() and not self._hurry and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        for _, child in self._running():
            _signal_group(child, signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.005)
            self._reap()

    def _running(self) -> list[tuple[ProcessSpec, subprocess.Popen[bytes]]]:
        return [(spec, child) for spec, child in self._children if child.returncode is None]

    def _reap(self) -> None:
        for spec, child in self._running():
            code = child.poll()
            if code is None:
                continue
            # What it started itself, such as a compiler, ends with it.
            _signal_group(child, signal.SIGKILL)
            assert child.stdin is not None
            child.stdin.close()
            self._exits += (
                Exit(name=spec.name, pid=child.pid, code=max(code, 0), signal=max(-code, 0)),
            )


def _spawn(spec: ProcessSpec) -> subprocess.Popen[bytes]:
    init = Path(unisono.__file__).resolve()
    return subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT, str(init), spec.entry],
        stdin=subprocess.PIPE,
        env={**os.environ, **spec.env},
        pass_fds=spec.pass_fds,
        # A session of its own: the Ctrl-C of a terminal is for the launcher only.
        start_new_session=True,
        bufsize=0,
    )


def _give_orders(spec: ProcessSpec, child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    line = memoryview(orders_line(spec.orders, os.getpid()))
    # A child that ended before it was told anything is the watch's business.
    with contextlib.suppress(BrokenPipeError):
        while line:
            line = line[child.stdin.write(line) :]


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Gone already; macOS answers EPERM for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
