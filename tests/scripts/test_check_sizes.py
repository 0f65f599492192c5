"""The size check finds what it is there to find."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_sizes.py"
LONG_BODY = "    x = 1\n" * 70


@pytest.fixture
def sizes(tmp_path):
    """The script's `main`, at work on a checkout in `tmp_path`."""
    names = runpy.run_path(str(SCRIPT))
    for part in (*names["SOURCES"], *names["CORE"]):
        path = tmp_path / part
        if path.suffix:
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
        else:
            path.mkdir(parents=True, exist_ok=True)
    main = names["main"]
    main.__globals__["ROOT"] = tmp_path
    return main


def test_a_small_checkout_passes(sizes, tmp_path, capsys):
    (tmp_path / "ops" / "a.py").write_text("x = 1\n" * 450)
    assert sizes() == 0
    assert "too long" not in capsys.readouterr().out


def test_long_files_and_functions_are_faults(sizes, tmp_path, capsys):
    (tmp_path / "models" / "a.py").write_text("x = 1\n" * 451)
    (tmp_path / "ops" / "b.py").write_text(f"class C:\n  def f():\n{LONG_BODY}")
    assert sizes() == 1
    out = capsys.readouterr().out
    assert "too long: models/a.py: 451 lines, at most 450" in out
    assert "too long: ops/b.py:2 f: 71 lines, at most 70" in out


def test_a_function_over_the_goal_is_only_reported(sizes, tmp_path, capsys):
    (tmp_path / "ops" / "a.py").write_text("def f():\n" + "    x = 1\n" * 60)
    assert sizes() == 0
    assert "long: ops/a.py:1 f: 61 lines, better 60" in capsys.readouterr().out


def test_kernels_are_exempt(sizes, tmp_path):
    (tmp_path / "ops" / "a.py").write_text(f"@triton.jit\ndef kernel():\n{LONG_BODY}")
    assert sizes() == 0


def test_a_large_core_is_a_fault(sizes, tmp_path, capsys):
    for number in range(14):
        (tmp_path / "workers" / f"a{number}.py").write_text("x = 1\n" * 440)
    assert sizes() == 1
    assert "core: 6160 of 6000 lines" in capsys.readouterr().out
