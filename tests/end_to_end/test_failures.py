"""Real processes that fail or are killed: the cause is the last line, and nothing stays behind.

That no process and no private directory stays is checked after every test (tests/conftest.py).
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.command import plant, refused, run, start
from tests.tiny_tokenizers import long_model

LONG = ("--raw", "--ignore-eos", "--max-tokens", "20000", "--max-model-len", "30000")


@pytest.fixture(autouse=True)
def flights_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return long_model(tmp_path_factory.mktemp("model"))


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def wait_for_output(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(1), "ended before its first character"


def test_a_death_without_a_word_names_rank_phase_and_signal(model: str, tmp_path: Path) -> None:
    """By SIGKILL: tests/end_to_end/test_replay.py."""
    env = plant(
        tmp_path,
        1,
        {
            "unisono.workers.model_runner:ModelRunner.step": "import os\n"
            "def planted(original, self, plan):\n"
            "    if plan.step == 5: os.abort()\n"
            "    return original(self, plan)"
        },
    )
    began = time.monotonic()
    _, err = run("generate", model, "hello", "--tp", "2", *LONG, env=env, code=1)
    line, _, command = last_line(err).partition("; to run the step again: ")
    assert command.startswith("unisono replay /")
    assert line.startswith("unisono: rank 1 (pid ")
    assert line.endswith("died in phase 'step' by signal 6 (SIGABRT)")
    assert time.monotonic() - began < 30


def test_a_rank_killed_while_loading_is_named(model: str, tmp_path: Path) -> None:
    env = plant(
        tmp_path,
        1,
        {
            "unisono.models.ledger:fill_weights": "import os\n"
            "def planted(original, *args):\n"
            "    os.kill(os.getpid(), 9)"
        },
    )
    _, err = run("generate", model, "hello", "--tp", "2", env=env, code=1)
    assert "rank 1" in last_line(err)
    assert last_line(err).endswith("died in phase 'load weights' by signal 9 (SIGKILL)")


def test_nan_logits_are_a_fault_not_a_token(model: str, tmp_path: Path) -> None:
    env = plant(
        tmp_path,
        0,
        {
            "unisono.models.llama:Llama.logits": "def planted(original, self, hidden):\n"
            "    return original(self, hidden) * float('nan')"
        },
    )
    _, err = run("generate", model, "hello", env=env, code=1)
    assert "FloatingPointError: the logits of sampling rows [0] hold NaN" in last_line(err)


EVERY_1_1_S = (0.3, 1.4, 2.5)
"""Seconds, until long after the first token."""


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_ctrl_c_at_any_moment_ends_everything(model: str) -> None:
    for moment in [0.05, 0.2, *(random.uniform(after, after + 1.1) for after in EVERY_1_1_S)]:
        process = start("generate", model, "hello", "--tp", "2", *LONG)
        try:
            process.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        # Before our handler is there Python itself ends, by the signal or with a traceback.
        ended_early = process.returncode == -signal.SIGINT or "KeyboardInterrupt" in err
        assert process.returncode == 130 or ended_early, f"after {moment:.2f} s"


def test_sigterm_is_a_clean_stop(model: str) -> None:
    process = start("generate", model, "hello", *LONG)
    wait_for_output(process)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["loading", "answering"])
def test_kill_minus_9_of_the_launcher_leaves_nothing(model: str, moment: str) -> None:
    process = start("generate", model, "hello", "--tp", "2", *LONG)
    if moment == "answering":
        wait_for_output(process)
    launcher = psutil.Process(process.pid)
    # The ranks load torch for a second or more after they were started.
    while len(children := launcher.children(recursive=True)) < 3:
        assert process.poll() is None, "ended before its processes were there"
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_closed_pipe_is_quiet(model: str) -> None:
    process = start("generate", model, "hello", *LONG)
    wait_for_output(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=20)
    assert "Traceback" not in err


def test_a_cache_that_does_not_fit_says_what_helps(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run("generate", model, "hello", "--memory-utilization", "1e-9", code=2)
    line = last_line(err)
    assert line.startswith("unisono: rank 0 failed in phase 'take memory': OutOfMemory: one KV")
    assert "--memory-utilization 1e-09 of the host's" in line
    assert line.endswith("raise it to at least 0.002")
    both = ("--memory-utilization", "0.5", "--kv-tokens", "64")
    assert "give one of the two" in last_line(refused(capsys, "generate", model, "hello", *both))


def test_weights_that_do_not_fit_are_refused_before_one_is_read(tmp_path: Path) -> None:
    env = plant(
        tmp_path,
        None,
        {
            "unisono.workers.memory:available_bytes": "def planted(original):\n    return 8 << 30",
            "unisono.models.ledger:fill_weights": "def planted(original, *args):\n    1 / 0",
        },
    )
    _, err = run("generate", "shape:qwen3-32b", "--prompt-ids", "1", "--tp", "2", env=env, code=2)
    line = last_line(err)
    assert "failed in phase 'check memory': OutOfMemory: rank " in line
    assert "needs 61.03 GiB for its weights and 4.00 GiB are free for it on this host" in line
    assert line.endswith("use a host with more than 122.05 GiB free")
