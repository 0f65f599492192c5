"""A child gets its orders over stdin and never outlives its parent, whatever it is doing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.paths import python_path
from unisono.models.config import ModelConfig, RopeConfig
from unisono.workers.channel import CurveKeys, ProtocolError
from unisono.workers.config import WorkerConfig
from unisono.workers.orders import WorkerOrders, orders_line, read_orders

LINUX = sys.platform == "linux"

CHILD = """
import os, sys, time
from unisono.workers.orders import WorkerOrders, die_with_parent, read_orders
orders, parent_pid = read_orders(WorkerOrders)
mark = sys.argv[1]
tidy = (lambda: open(mark, "w").close()) if mark else None
die_with_parent(parent_pid, tidy=tidy)
print("ready", orders.rank, flush=True)
while True:
    time.sleep(1)
"""

BUSY = """
import sys, signal, re
from unisono.workers.orders import WorkerOrders, die_with_parent, read_orders
orders, parent_pid = read_orders(WorkerOrders)
die_with_parent(parent_pid)
print("ready", flush=True)
re.match("(a*)*b", "a" * 60)  # holds the interpreter lock for ever: no thread of Python runs
"""

HASTY = """
import os, select, sys
import unisono.workers.orders as guard
guard._watch_parent = lambda *_: None  # a watching thread that comes too late
orders, parent_pid = guard.read_orders(guard.WorkerOrders)
guard.die_with_parent(parent_pid, tidy=lambda: open(sys.argv[1], "w").close())
print("ready", orders.rank, flush=True)
if select.select([0], [], [], 5)[0]:
    sys.exit("the channel broke")
"""

PARENT = """
import os, subprocess, sys, time
from unisono.workers.orders import orders_line, WorkerOrders, from_plain
import json
orders = from_plain(WorkerOrders, json.loads(sys.argv[2]))
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[3:]],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdin.write(orders_line(orders, os.getpid()))
child.stdin.flush()
child.stdout.readline()
if os.environ.get("FORK") and os.fork() == 0:
    time.sleep(2)  # holds the pipe open
    os._exit(0)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_orders_and_parent_survive_the_pipe():
    line = orders_line(orders(), 77)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert read_orders(WorkerOrders, io.BytesIO(line)) == (orders(), 77)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[1]\n",
        b'{"parent_pid":1,"orders":{}}\n',
        b'{"parent_pid":"1","orders":{}}\n',
        b'{"parent_pid":1,"orders":{},"more":1}\n',
        b"\xff\xfe\n",
    ],
)
def test_a_line_that_is_no_orders_is_refused(line):
    with pytest.raises(ProtocolError):
        read_orders(WorkerOrders, io.BytesIO(line))


@pytest.mark.parametrize("line", [b"", b'{"parent_pid":1,'])
def test_a_pipe_that_closes_first_ends_the_process_quietly(line):
    with pytest.raises(SystemExit) as end:
        read_orders(WorkerOrders, io.BytesIO(line))
    assert end.value.code == 1


def test_closing_the_pipe_ends_a_child():
    with _start(CHILD, "") as child:
        child.stdin.close()
        assert child.wait(5) == 1


def test_an_orphan_may_tidy_up(tmp_path):
    with _start(CHILD, str(tmp_path / "mark")) as child:
        child.stdin.close()
        assert child.wait(5) == 1
    assert (tmp_path / "mark").exists()


def test_interrupts_are_ignored_and_sigterm_ends():
    with _start(CHILD, "") as child:
        child.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert child.poll() is None
        child.terminate()
        assert child.wait(5) == -signal.SIGTERM


def test_a_wrong_parent_ends_a_child(tmp_path):
    """The parent died before the child could arm: somebody else is the parent by now."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "mark")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environ()
    ) as child:
        child.stdin.write(orders_line(orders(), os.getpid() + 1))
        child.stdin.flush()
        assert child.wait(5) == 1
        assert child.stdout.read() == b""
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("fork", ["", "1"], ids=["alone", "with a fork that holds the pipe"])
@pytest.mark.parametrize("tidies", [False, True])
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_children_die_when_the_parent_is_killed(tmp_path, tidies, fork):
    mark = tmp_path / "mark"
    with _parent(CHILD, str(mark) if tidies else "", fork=fork) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        assert _gone_within(pid, 1.7)
    assert mark.exists() == tidies


def test_a_main_thread_that_notices_first_tidies_up_too(tmp_path):
    mark = tmp_path / "mark"
    with _start(HASTY, str(mark)) as child:
        child.stdin.close()
        assert child.wait(5) == 1
    assert mark.exists()


@pytest.mark.skipif(not LINUX, reason="the kernel's parent-death signal")
def test_a_child_that_holds_the_interpreter_lock_dies_too():
    with _parent(BUSY) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        assert _gone_within(pid, 3.0)


def test_reading_leaves_the_pipe_to_the_watch():
    """Only the line is taken: a child that reads ahead would miss the end of the pipe."""
    with _start(CHILD, "") as child:
        child.stdin.write(b"more\n")
        child.stdin.flush()
        time.sleep(0.1)
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(5) == 1


def test_a_long_line_arrives_in_pieces():
    long = orders(model_path="x" * 200_000)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environ(),
    ) as child:
        line = orders_line(long, os.getpid())
        threading.Thread(target=lambda: (child.stdin.write(line), child.stdin.flush())).start()
        assert child.stdout.readline() == b"ready 1\n"
        child.kill()


def orders(model_path: str = "a path/with \u00e4 and \udcff") -> WorkerOrders:
    model = ModelConfig(
        family="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope=RopeConfig(rotary_dim=4, long_factor=(1.0, 2.5)),
        eos_token_ids=(1, 2),
    )
    return WorkerOrders(
        config=WorkerConfig(model_path=model_path, model=model),
        rank=1,
        endpoint="ipc:///tmp/x",
        session="s",
        curve=CurveKeys(public="p"),
    )


def _environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path()}


def _start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environ(),
    )
    child.stdin.write(orders_line(orders(), os.getpid()))
    child.stdin.flush()
    assert child.stdout.readline() == b"ready 1\n"
    return child


def _parent(code: str, *arguments: str, fork: str = "") -> subprocess.Popen[bytes]:
    line = json.loads(orders_line(orders(), 0))["orders"]
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, code, json.dumps(line), *(arguments or [""])],
        stdout=subprocess.PIPE,
        env=_environ() | {"FORK": fork},
    )


def _gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
