"""What a rank sets before it imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unisono.workers.entry import prepare_environment

ONE_HOST = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name their loopback otherwise")
@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        (ONE_HOST, "lo"),
        (ONE_HOST | {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
)
def test_ranks_of_one_host_meet_on_its_loopback(environ, interface):
    environ = dict(environ)
    prepare_environment(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(
    ("given", "level"), [({}, "ERROR"), ({"TORCH_CPP_LOG_LEVEL": "INFO"}, "INFO")]
)
def test_torch_is_quiet_unless_the_user_asks(given, level):
    environ = dict(given)
    prepare_environment(environ)
    assert environ["TORCH_CPP_LOG_LEVEL"] == level


def test_what_was_said_is_out_before_a_rank_ends_at_once():
    code = (
        "import atexit, logging; from unisono.workers import entry\n"
        "logging.basicConfig(); logging.warning('logged'); print('said', end='')\n"
        "atexit.register(print, 'taken apart'); entry.end_at_once(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "WARNING:root:logged\n")


def test_the_entry_comes_before_torch():
    code = "import sys, unisono.workers.entry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
