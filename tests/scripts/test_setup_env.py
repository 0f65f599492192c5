"""scripts/setup_env: what it installs, in which order, and that it does so once.

A fake interpreter stands for Python: it makes environments of copies of itself and writes down
what pip is asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU_IS_VISIBLE = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
PYTHON = """#!/bin/bash
state={state}
case "$1 $2" in
    "-c "*version_info*) [ ! -e $state/unfit ] ;;
    "-c "*torch*) grep -q torch== $state/pip 2>/dev/null ;;
    "-c "*) ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo made >>$state/venv ;;
    "-m pip") echo "${{*:3}}" >>$state/pip; echo pip says no; [ ! -e $state/broken ] ;;
    *) exit 99 ;;
esac
"""
TORCH = [] if GPU_IS_VISIBLE else ["install torch==2.13.0"]


class Checkout:
    """A checkout with nothing but the script and its project file."""

    def __init__(self, place: Path) -> None:
        self.root, self.state = place / "checkout", place / "state"
        (self.root / "scripts").mkdir(parents=True)
        self.state.mkdir()
        shutil.copy(ROOT / "scripts" / "setup_env", self.root / "scripts")
        (self.root / "pyproject.toml").write_text("one\n")
        self.python = place / "python"
        self.python.write_text(PYTHON.format(state=self.state))
        self.python.chmod(0o755)

    def set_up(self, *extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "scripts" / "setup_env"), *extra],
            env={**os.environ, "PYTHON": str(self.python)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def said(self, what: str) -> list[str]:
        path = self.state / what
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_torch_comes_by_itself_and_first(checkout):
    done = checkout.set_up("test")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "setting up .venv (once)\n"
    assert checkout.said("pip") == [*TORCH, "install -e .[test]"]


def test_a_second_run_does_nothing(checkout):
    checkout.set_up()
    before = checkout.said("pip")
    done = checkout.set_up()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.said("pip") == before == [*TORCH, "install -e ."]


def test_what_the_tests_need_is_enough_for_the_demo_and_not_the_reverse(checkout):
    checkout.set_up()
    checkout.set_up("test")
    checkout.set_up()
    assert checkout.said("pip") == [*TORCH, "install -e .", "install -e .[test]"]
    assert checkout.said("venv") == ["made"]


def test_a_changed_project_file_installs_again_but_not_torch(checkout):
    checkout.set_up()
    (checkout.root / "pyproject.toml").write_text("two\n")
    checkout.set_up()
    assert checkout.said("pip") == [*TORCH, "install -e .", "install -e ."]


def test_a_moved_checkout_gets_a_new_environment(checkout, tmp_path):
    checkout.set_up()
    checkout.root = checkout.root.rename(tmp_path / "moved")
    assert checkout.set_up().returncode == 0
    assert checkout.said("venv") == ["made", "made"]


def test_a_failing_install_shows_why_and_is_tried_again(checkout):
    (checkout.state / "broken").touch()
    done = checkout.set_up()
    assert done.returncode == 1
    assert "pip says no\nsetup_env: failed: .venv/bin/python -m pip install" in done.stderr
    (checkout.state / "broken").unlink()
    assert checkout.set_up().returncode == 0
    assert checkout.said("pip")[-1] == "install -e ."


def test_an_unfit_interpreter_is_refused_by_name(checkout):
    (checkout.state / "unfit").touch()
    done = checkout.set_up()
    assert done.returncode == 1
    assert f"no Python 3.11 or 3.12 with its venv module: tried {checkout.python};" in done.stderr
    assert not (checkout.root / ".venv").exists()
