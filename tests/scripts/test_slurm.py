"""scripts/slurm/generate.sbatch: every task of a job gets the environment of torchrun.

A fake `srun` starts the tasks here, as Slurm would on its nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "generate.sbatch"
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 99
shift
pids=()
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] || exit 99
printf 'node1\\nnode2\\n'
"""
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TASK = f"""
import json, os, pathlib, sys
names = {NAMES!r}
said = {{name: os.environ[name] for name in names}} | {{"argv": sys.argv[1:]}}
pathlib.Path(f"rank{{os.environ['RANK']}}.json").write_text(json.dumps(said))
sys.exit(3 if os.environ["RANK"] == os.environ.get("FAILING") else 0)
"""


def test_every_rank_gets_its_place(tmp_path):
    done = _run_job(tmp_path, "demo", "two words", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [one["RANK"] for one in said] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in said] == ["0", "1", "0", "1"]
    for one in said:
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("node1", "12077")
        assert one["argv"] == ["generate", "demo", "two words", "--max-tokens", "4"]


def test_the_code_of_a_failing_rank_is_the_code_of_the_job(tmp_path):
    assert _run_job(tmp_path, "demo", FAILING="2").returncode == 3


def test_the_default_command_is_unisono_of_the_checkout(tmp_path):
    command = tmp_path / ".venv" / "bin" / "unisono"
    command.parent.mkdir(parents=True)
    _write_program(command, f"#!{sys.executable}\n{TASK}")
    assert _run_job(tmp_path, "demo", UNISONO_COMMAND="").returncode == 0
    assert json.loads((tmp_path / "rank3.json").read_text())["argv"] == ["generate", "demo"]


@pytest.mark.parametrize("missing", ["SLURM_NTASKS_PER_NODE", "SLURM_JOB_NODELIST"])
def test_a_job_without_its_facts_is_refused(tmp_path, missing):
    done = _run_job(tmp_path, "demo", **{missing: None})
    assert done.returncode != 0
    assert missing in done.stderr
    assert not list(tmp_path.glob("rank*.json"))


def _run_job(
    place: Path, *arguments: str, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """Run the job as Slurm would for two nodes of two tasks; a change of None unsets."""
    _write_program(place / "srun", SRUN)
    _write_program(place / "scontrol", SCONTROL)
    (place / "task.py").write_text(TASK)
    environ: dict[str, str | None] = {
        "PATH": f"{place}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "40077",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_SUBMIT_DIR": str(place),
        "UNISONO_COMMAND": f"{sys.executable} task.py",
        **changes,
    }
    return subprocess.run(
        ["bash", str(JOB), *arguments],
        cwd=place,
        env={name: value for name, value in environ.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _write_program(path: Path, source: str) -> None:
    path.write_text(source)
    path.chmod(0o755)
