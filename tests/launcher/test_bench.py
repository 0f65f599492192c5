"""`unisono bench ops`: refusals, the table and its last line, and a process that goes away."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from tests.end_to_end import command
from unisono.launcher.bench.command import _case_lines, _entry
from unisono.launcher.bench.process import BenchBroken, BenchPlan, run_bench
from unisono.launcher.bench.report import WIDTH, Report, commit_of
from unisono.workers.timings import CaseTime, Machine

MACHINE = Machine(
    device="a card",
    torch="2.11.0",
    triton="3.6.0",
    dtype="bfloat16",
    bytes_per_s=4e12,
    flops_per_s=8e14,
    num_cases=1,
)
TIME = CaseTime(
    op="ordered_sum_add_rms_norm",
    shape="qwen3-8b",
    label="gate_up/2 151936x4096, 4096",
    num_bytes=8_000_000,
    num_flops=1000,
    seconds=4e-6,
    torch_seconds=12345.678e-6,
)


def test_a_line_says_what_was_reached_and_fits() -> None:
    head, titles, line = _case_lines(TIME, MACHINE, None)
    assert (head, titles.split()[0]) == ("", "qwen3-8b")
    assert line.split()[-5:] == ["2.000", "TB/s", "2.00", "50%", "12345.68"]
    assert max(len(titles), len(line)) <= WIDTH
    entry = _entry(TIME, MACHINE)
    assert (entry["us"], entry["floor_us"], entry["torch_us"]) == (4.0, 2.0, 12345.678)
    bound_by_products = replace(TIME, num_flops=8 * 10**9, seconds=20e-6, torch_seconds=0.0)
    (line,) = _case_lines(bound_by_products, MACHINE, TIME)
    assert line.split()[-5:] == ["400.0", "TFLOP/s", "10.00", "50%", "-"]
    assert len(line) == len(titles)
    slow = replace(bound_by_products, num_flops=10**9, seconds=20e-6)
    (line,) = _case_lines(slow, replace(MACHINE, flops_per_s=1e14), TIME)
    assert "50.00 TFLOP/s" in line
    cached = replace(TIME, is_cold=False)
    (line,) = _case_lines(cached, MACHINE, TIME)
    assert line.split()[-4:] == ["4.00", "2.000", "TB/s", "12345.68"]
    assert _entry(cached, MACHINE)["floor_us"] == 0
    (line,) = _case_lines(replace(TIME, seconds=0.0, error="E: " + "x" * 200), MACHINE, TIME)
    assert "failed: E: x" in line
    assert len(line) <= WIDTH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--op", "gone"), "--op gone: choose from linear, head"),
        (("--shape", "gone"), "--shape gone: choose from qwen3-0.6b"),
        (("--device", "tpu"), "--device tpu: choose auto, cpu or cuda"),
        (("--output", "/nowhere/x.json"), "--output /nowhere/x.json: cannot be written (No such"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], message: str, capsys) -> None:
    err = command.refused(capsys, "bench", "ops", *options)
    assert message in err.splitlines()[-1]


def test_the_command_measures_and_writes(tmp_path) -> None:
    where = tmp_path / "ops.json"
    options = ("--device", "cpu", "--op", "rms_norm", "--op", "silu_and_mul")
    out, _ = command.run("bench", "ops", *options, "--output", str(where))
    *table, last = out.splitlines()
    assert max(map(len, table)) <= WIDTH
    assert json.loads(where.read_text()) == (result := json.loads(last))
    assert {entry["op"] for entry in result["cases"]} == {"rms_norm", "silu_and_mul"}
    assert all(entry["us"] > 0 and entry["torch_us"] > 0 for entry in result["cases"])
    assert not any(entry["floor_us"] for entry in result["cases"]), "they fit a cache"
    assert len(result["cases"]) == result["machine"]["num_cases"] == 4
    assert result["num_left_out"] == 0


def test_a_fault_of_the_process_is_told() -> None:
    plan = BenchPlan(
        device="meta", ops=("rms_norm",), shapes=("smollm2-135m",), seconds=1, threads=1
    )
    with pytest.raises(BenchBroken, match="failed in phase 'make inputs'"):
        list(run_bench(plan, {}))


def test_what_is_too_long_goes_on_below(capsys) -> None:
    report = Report(as_json=False, output=None)
    report.line()
    report.line("  " + "--load-format-random " * 6)
    report.line(" 1 kept   as it is")
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert (first, fourth) == ("", " 1 kept   as it is")
    assert second == "  " + ("--load-format-random " * 4).rstrip()
    assert third == "    " + ("--load-format-random " * 2).rstrip()


def test_a_commit_says_that_files_were_changed(tmp_path) -> None:
    assert commit_of(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("a")
    for command_line in (["init", "-q"], ["add", "file"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *command_line], check=True)
    commit = commit_of(tmp_path)
    assert len(commit) == 12
    (tmp_path / "new").write_text("not part of it")
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert commit_of(tmp_path) == commit + "+"
