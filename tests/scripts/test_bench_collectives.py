"""The measurement of collectives runs where ranks meet over gloo, and ends in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.paths import ROOT, python_path


def test_two_ranks_on_the_cpu() -> None:
    script = ROOT / "scripts" / "bench_collectives.py"
    done = subprocess.run(
        [sys.executable, script, "--ranks", "2", "--device", "cpu", "--sizes", "4096", "32768"],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    found = json.loads(last)
    assert (found["ranks"], found["device"]) == (2, "cpu")
    assert [line["bytes"] for line in found["us"]] == [4096, 32768]
    for line, text in zip(found["us"], shown[1:], strict=True):
        assert text.strip().startswith(f"{line['bytes']:,} bytes: gather + sum ")
        assert line["gather + sum"] > 0
        assert line["all_reduce"] > 0
