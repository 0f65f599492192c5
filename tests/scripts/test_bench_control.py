"""The benchmark of the control plane runs and measures every part."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.end_to_end.command import environment
from tests.paths import ROOT


def test_it_measures_every_part_of_a_step():
    command = [sys.executable, str(ROOT / "scripts" / "bench_control.py")]
    options = ["--steps", "20", "--rounds", "1", "--rows", "1", "3", "--ranks", "2"]
    out = subprocess.run(
        [*command, *options, "--stream"],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = json.loads(out.splitlines()[-1])["figures"]
    assert [(each["ranks"], each["rows"]) for each in found] == [(2, 1), (2, 3)]
    for each in found:
        parts = {part: median for part, (median, _) in each["us"].items()}
        own = {"drain", "plan", "send", "tell", "apply"}
        assert set(parts) == own | {"wait", "cycle", "step"}
        assert all(median > 0 for median in (*parts.values(), each["launcher_us"]))
        assert parts["step"] > parts["cycle"] > max(parts["plan"], parts["send"], parts["apply"])
