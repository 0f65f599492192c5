"""Runs the tests that need a GPU, on all there are: python scripts/gpu_tests.py [PYTEST OPTIONS]

What most of them take is the time to compile kernels, so several processes share each GPU, with a
part of the tests each. Then those that want a GPU to themselves (mark `alone`) run one by one, on
every GPU some; and at last those that need two (mark `two_gpus`). Prints a line as each process
ends, and all that it said where tests failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 6
"""That share a GPU: those with an engine take a few GB of it each, and two CPUs."""
PHASES = ("crowd", "alone", "together", "together-alone")
NO_TESTS = 5
"""How pytest ends where all tests were another process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The tests of one process."""

    name: str
    marks: str
    gpus: Sequence[int]
    part: int
    parts: int

    def command(self, options: Sequence[str]) -> list[str]:
        own = ["-m", self.marks, "--shard", f"{self.part}/{self.parts}"]
        return [sys.executable, "-m", "pytest", "-q", *own, *options]


def main() -> int:
    """Run all; 1 if a test failed."""
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reader.add_argument("--processes", type=int, default=PROCESSES, help="that share a GPU")
    reader.add_argument("--only", choices=PHASES, action="append", help="may be repeated")
    asked, options = reader.parse_known_args()
    num_gpus = count_gpus()
    if not num_gpus:
        print("no CUDA device is visible to torch", file=sys.stderr)
        return 2
    began, good = time.monotonic(), True
    found = phases(num_gpus, asked.processes)
    for name in asked.only or PHASES:
        if name not in found:
            print(f"{name}: not run, it needs two GPUs")
    for phase in [found[name] for name in asked.only or PHASES if name in found]:
        with ThreadPoolExecutor(len(phase)) as pool:
            good &= all(pool.map(lambda share: run(share, options, began), phase))
    print(f"{'all passed' if good else 'SOME FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if good else 1


def phases(num_gpus: int, processes: int) -> dict[str, list[Share]]:
    """What runs at the same time, by the name of the phase; on one GPU some have nothing."""
    single = [[gpu] for gpu in range(num_gpus)]
    every = [list(range(num_gpus))]
    found = {
        "crowd": ("gpu and not alone and not two_gpus", single * processes),
        "alone": ("gpu and alone and not two_gpus", single),
    }
    if num_gpus > 1:
        # Ranks wait for each other on their GPUs: more engines at a time take turns for too long.
        found["together"] = ("gpu and two_gpus and not alone", every * 2)
        found["together-alone"] = ("gpu and two_gpus and alone", every)
    return {name: shares(name, *asked) for name, asked in found.items()}


def shares(name: str, marks: str, gpus: Sequence[Sequence[int]]) -> list[Share]:
    """Equal parts of the tests with these marks, one for each of `gpus`."""
    return [
        Share(name=f"{name} {part}", marks=marks, gpus=seen, part=part, parts=len(gpus))
        for part, seen in enumerate(gpus)
    ]


def run(share: Share, options: Sequence[str], began: float) -> bool:
    """Run a share to its end and say how it went."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, share.gpus))}
    environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryFile("w+") as said:
        code = subprocess.run(
            share.command(options), cwd=ROOT, env=environ, stdout=said, stderr=said, check=False
        ).returncode
        said.seek(0)
        text = said.read().rstrip()
    good = code in (0, NO_TESTS)
    last = text.splitlines()[-1] if text else ""
    print(f"[{time.monotonic() - began:.0f} s] {share.name}: {last if good else text}", flush=True)
    return good


def count_gpus() -> int:
    # In a process of its own: a context would take memory from the tests.
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(count, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
