"""`unisono bench`: how fast this machine computes, beside what it could and what torch does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import unisono
from unisono.launcher.bench_process import BenchPlan, run_bench
from unisono.launcher.host_report import is_linux
from unisono.launcher.options import option_spec
from unisono.launcher.process_table import threads_per_rank
from unisono.launcher.resolve import check_device, host_facts, resolve_device
from unisono.models.config import ConfigError
from unisono.models.shapes import SHAPES
from unisono.runtime.protocol import EngineError
from unisono.workers.timings import TIMED_OPS, BenchDone, CaseTime, Machine

WIDTH = 100
SHAPES_BY_DEFAULT = {"cuda": ("qwen3-0.6b", "qwen3-8b"), "cpu": ("smollm2-135m",)}
SECONDS = 120.0
"""Cases that have not begun by then are left out."""


class CasesFailed(EngineError):
    """A case raised; the others were measured."""


@click.group("bench")
def command() -> None:
    """Measure how fast this machine computes."""


@command.command("ops")
@click.option("--device", default="auto", metavar="[auto|cpu|cuda]", help="auto: a GPU, if any.")
@click.option("--op", "ops", multiple=True, metavar="NAME", help="This op only; may be repeated.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME",
    help="The sizes of this model (qwen3-8b); may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object and no table.")
@click.option("--output", type=click.Path(), help="Write the JSON object to this file too.")
def ops_command(
    device: str, ops: tuple[str, ...], shapes: tuple[str, ...], as_json: bool, output: str | None
) -> int:
    """Time every op at the sizes of real models, in steps of 1 to thousands of tokens.

    Beside it stand the floor, the time that its bytes or its arithmetic take at the speed measured
    on this device, and what torch as it comes needs for the same. The last line is JSON. Ends with
    1 where a case fails.
    """
    plan = _plan(device, ops, shapes)
    _check_output(output)
    facts = _facts()
    times: list[CaseTime] = []
    done: BenchDone | None = None
    for news in run_bench(plan, os.environ):
        lines: Iterator[str] = iter(())
        match news:
            case Machine():
                facts |= {"machine": dataclasses.asdict(news)}
                machine = news
                lines = _header(facts, machine)
            case CaseTime():
                lines = _case_lines(news, machine, times[-1] if times else None)
                times.append(news)
            case BenchDone():
                done = news
        if not as_json:
            for line in lines:
                click.echo(line)
    assert done is not None
    result = {**facts, **dataclasses.asdict(done), "cases": [_entry(t, machine) for t in times]}
    if output is not None:
        Path(output).write_text(json.dumps(result) + "\n", encoding="utf-8")
    if done.num_left_out and not as_json:
        click.echo(f"{done.num_left_out} cases were left out after {plan.seconds:.0f} s")
    click.echo(json.dumps(result))
    failed = [time for time in times if time.error]
    if failed:
        first = failed[0]
        raise CasesFailed(
            f"{len(failed)} of {len(times)} cases failed, the first is {first.op} "
            f"{first.label}: {first.error}"
        )
    return 0


def _plan(device: str, ops: tuple[str, ...], shapes: tuple[str, ...]) -> BenchPlan:
    option_spec("device").check(device)
    for flag, asked, legal in (("--op", ops, TIMED_OPS), ("--shape", shapes, tuple(SHAPES))):
        for name in asked:
            if name not in legal:
                raise ConfigError(f"{flag} {name}: choose from {', '.join(legal)}")
    host = host_facts(os.environ)
    kind = resolve_device(device, host)
    check_device(kind, host, 1)
    cores = len(os.sched_getaffinity(0)) if is_linux() else os.cpu_count() or 1
    return BenchPlan(
        device=kind,
        ops=ops or TIMED_OPS,
        shapes=tuple(dict.fromkeys(shapes)) or SHAPES_BY_DEFAULT[kind],
        seconds=SECONDS,
        threads=threads_per_rank(os.environ, cores, 1),
    )


def _check_output(output: str | None) -> None:
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: its directory does not exist")


def _facts() -> dict[str, Any]:
    driver = Path("/sys/module/nvidia/version")
    return {
        "unisono": unisono.__version__,
        "commit": _commit(),
        "driver": driver.read_text().strip() if driver.exists() else "",
    }


def _commit() -> str:
    """Of the checkout that this package lies in; empty if that is none."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    ask = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _header(facts: dict[str, Any], machine: Machine) -> Iterator[str]:
    parts = [f"unisono {facts['unisono']}", facts["commit"] and f"commit {facts['commit']}"]
    parts += [f"torch {machine.torch}", machine.triton and f"triton {machine.triton}"]
    parts += [facts["driver"] and f"driver {facts['driver']}"]
    yield machine.device
    yield ", ".join(part for part in parts if part)
    yield (
        f"{machine.dtype}; measured: reads {machine.bytes_per_s / 1e12:.3f} TB/s, "
        f"products {machine.flops_per_s / 1e12:.2f} TFLOP/s; {machine.num_cases} cases"
    )


def _case_lines(time: CaseTime, machine: Machine, before: CaseTime | None) -> Iterator[str]:
    if before is None or before.shape != time.shape:
        yield ""
        yield (
            f"{time.shape:<24} {'':<29}{'us':>9} {'reached':>12}{'floor us':>9}{'':>5}"
            f"{'torch us':>10}"
        )
    name = f"{time.op:<24} {time.label:<29}"
    if time.error:
        yield f"{name} failed: {time.error}"[:WIDTH]
        return
    entry = _entry(time, machine)
    share = f"{entry['floor_us'] / entry['us']:>5.0%}" if time.num_bytes else f"{'':>5}"
    floor = f"{entry['floor_us']:>9.2f}" if time.num_bytes else f"{'':>9}"
    torch = f"{entry['torch_us']:>10.2f}" if time.torch_seconds else f"{'-':>10}"
    yield f"{name}{entry['us']:>9.2f} {_reached(time, machine):>12}{floor}{share}{torch}"


def _reached(time: CaseTime, machine: Machine) -> str:
    if not time.num_bytes:
        return ""
    if time.num_flops / machine.flops_per_s > time.num_bytes / machine.bytes_per_s:
        return f"{time.num_flops / time.seconds / 1e12:.2f} TFLOP/s"
    return f"{time.num_bytes / time.seconds / 1e12:.3f} TB/s"


def _entry(time: CaseTime, machine: Machine) -> dict[str, Any]:
    """One case as JSON: microseconds; 0 for what was not measured."""
    floor = max(time.num_bytes / machine.bytes_per_s, time.num_flops / machine.flops_per_s)
    return {
        "op": time.op,
        "shape": time.shape,
        "case": time.label,
        "us": round(time.seconds * 1e6, 3),
        "floor_us": round(floor * 1e6, 3),
        "torch_us": round(time.torch_seconds * 1e6, 3),
        "num_bytes": time.num_bytes,
        "num_flops": time.num_flops,
        "error": time.error,
    }
