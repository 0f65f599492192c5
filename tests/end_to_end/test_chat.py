"""`unisono chat` with the demo model: two turns, Ctrl-C in an answer, Ctrl-C at the prompt."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from typing import IO

import pytest

from tests.end_to_end.command import UNISONO, environment

WAIT_S = 15.0


class Lines:
    """The lines of a pipe, each with a time limit."""

    def __init__(self, pipe: IO[str]) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def next(self) -> str:
        return self._lines.get(timeout=WAIT_S)

    def next_with(self, word: str) -> str:
        while word not in (line := self.next()):
            pass
        return line

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put(line)


@pytest.mark.timeout(40)
def test_ctrl_c_stops_the_answer_then_the_chat() -> None:
    process = subprocess.Popen(
        [*UNISONO, "chat", "demo", "--max-tokens", "400", "--max-model-len", "600", "--stats"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdin, process.stdout:
        err = Lines(process.stderr)
        print("What is the capital of France?", file=process.stdin)
        assert "Paris" in process.stdout.readline()
        assert "first token" in err.next()

        print("Tell me a very long story about it.", file=process.stdin)
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        assert err.next() == "unisono: stopped\n"

        out = Lines(process.stdout)
        print("/reset\nWhat is the capital of France?", file=process.stdin)
        assert out.next_with("The capital of France is Paris")
        assert "first token" in err.next()

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=WAIT_S) == 130
