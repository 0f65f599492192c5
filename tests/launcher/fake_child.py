"""A child process that does what its orders say, for tests of the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from unisono.workers.orders import die_with_parent, read_orders


@dataclass(frozen=True)
class Todo:
    """Orders of the children in this file."""

    what: str
    path: str = ""


def child() -> int | None:
    todo, parent_pid = read_orders(Todo)
    if todo.what != "deaf":
        die_with_parent(parent_pid)
    match todo.what.split():
        case ["sleep"]:
            _tell(todo, str(os.getpid()))
            time.sleep(60)
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _tell(todo, str(os.getpid()))
            time.sleep(60)
        case ["exit", code]:
            return int(code)
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["grandchild"]:
            grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            _tell(todo, str(grandchild.pid))
            return 3
        case ["read", fd]:
            _tell(todo, os.read(int(fd), 5).decode())
        case other:
            raise AssertionError(other)
    return None


def _tell(todo: Todo, text: str) -> None:
    if todo.path:
        Path(f"{todo.path}.part").write_text(text)
        os.replace(f"{todo.path}.part", todo.path)
