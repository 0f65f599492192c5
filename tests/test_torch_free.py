"""The deciding side never loads torch, and `unisono --help` answers at once."""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import python_path
from tests.test_layering import DECIDING, ROOT, TORCH_FREE

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "gguf", "safetensors", "jinja2", "rich")
"""What the command line may load only where it is used. All of it costs more than Python does."""
HELP_LIMIT_S = 0.3
SLOW_MACHINE = 2.0 if os.environ.get("CI") else 1.0

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
    loaded = [heavy for heavy in sys.argv[1].split(",") if heavy in sys.modules]
    if loaded:
        sys.exit(f"{name} loads {', '.join(loaded)}")
"""


def torch_free_modules() -> list[str]:
    """Every module of launcher and runtime, and what these may import of the other rooms."""
    files = [path for room in DECIDING for path in sorted((ROOT / room).rglob("*.py"))]
    files += [ROOT / room / f"{name}.py" for room, names in TORCH_FREE.items() for name in names]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return sorted(f"unisono.{name.removesuffix('.__init__')}" for name in names)


def test_deciding_modules_load_no_torch():
    done = _import_each("torch", torch_free_modules())
    assert done.returncode == 0, done.stderr


def test_command_line_loads_nothing_heavy():
    done = _import_each(",".join(HEAVY), ["unisono", "unisono.launcher.cli"])
    assert done.returncode == 0, done.stderr


def test_a_module_with_torch_is_found():
    done = _import_each("torch", ["unisono.models.config", "unisono.ops.linear"])
    assert "unisono.ops.linear loads torch" in done.stderr


def test_a_rank_loads_no_compiler():
    """torch's own takes longer to import than all the rest of a rank, at each start."""
    done = _import_each("torch._dynamo", ["unisono.workers.worker"])
    assert done.returncode == 0, done.stderr


def test_public_names_are_lazy():
    done = _python(
        "import sys, unisono\n"
        "assert sorted(dir(unisono)) == sorted(unisono.__all__)\n"
        "assert 'unisono.runtime.protocol' not in sys.modules\n"
        "unisono.LLM, unisono.SamplingParams(max_tokens=1)\n"
        "assert 'torch' not in sys.modules\n"
        "unisono.nothing"
    )
    assert "AttributeError: module 'unisono' has no attribute 'nothing'" in done.stderr


def test_help_is_instant(tmp_path):
    """Median processor time and best wall time: what a machine with nothing else to do shows."""
    environ = _environ() | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _help(environ, tmp_path)
    runs = [_help(environ, tmp_path) for _ in range(5)]
    limit = HELP_LIMIT_S * SLOW_MACHINE
    assert statistics.median(cpu_s for cpu_s, _ in runs) < limit, runs
    assert min(wall_s for _, wall_s in runs) < limit, runs


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_answers_go_to_stdout(tmp_path, option):
    done = _python("from unisono.launcher.cli import main\nmain()", option)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = r"unisono \d+\.\d+\.\d+\n" if option == "--version" else r"Usage: unisono .*generate.*"
    assert re.fullmatch(wanted, done.stdout, re.DOTALL)


def _help(environ: dict[str, str], elsewhere: Path) -> tuple[float, float]:
    """Run `unisono --help` and return its processor and wall time in seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "unisono", "--help"]
    subprocess.run(command, env=environ, cwd=elsewhere, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def _import_each(forbidden: str, modules: list[str]) -> subprocess.CompletedProcess[str]:
    return _python(IMPORT_EACH, forbidden, *modules)


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=_environ(), capture_output=True, text=True, timeout=100)


def _environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path()}
