"""`unisono bench`: how fast this machine computes, beside what it could and what torch does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click

from unisono.launcher.bench.offline import offline_command
from unisono.launcher.bench.process import BenchPlan, all_threads, run_bench
from unisono.launcher.bench.report import WIDTH, Report, output_options, versions, versions_line
from unisono.launcher.bench.speculate import speculate_command
from unisono.launcher.bench.step import step_command
from unisono.launcher.options import option_spec
from unisono.launcher.resolve import check_device, host_facts, resolve_device
from unisono.models.config import ConfigError
from unisono.models.shapes import SHAPES
from unisono.runtime.protocol import EngineError
from unisono.workers.timings import TIMED_OPS, BenchDone, CaseTime, Machine

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
@output_options
def ops_command(
    device: str, ops: tuple[str, ...], shapes: tuple[str, ...], as_json: bool, output: str | None
) -> int:
    """Time every op at the sizes of real models, in steps of 1 to thousands of tokens.

    Beside it stand the floor, the time that its bytes or its arithmetic take at the speed measured
    on this device, and what torch as it comes needs for the same. On a CPU what fits its caches has
    no floor. The last line is JSON. Ends with 1 where a case fails.
    """
    plan = _plan(device, ops, shapes)
    report, made_with = Report(as_json=as_json, output=output), versions()
    times: list[CaseTime] = []
    done: BenchDone | None = None
    with closing(run_bench(plan, os.environ)) as told:
        for news in told:
            lines: Iterator[str] = iter(())
            match news:
                case Machine():
                    machine = news
                    lines = _header(machine, made_with)
                case CaseTime():
                    lines = _case_lines(news, machine, times[-1] if times else None)
                    times.append(news)
                case BenchDone():
                    done = news
            for line in lines:
                report.line(line)
    assert done is not None
    if done.num_left_out:
        report.line(f"{done.num_left_out} cases were left out after {plan.seconds:.0f} s")
    report.end(
        {
            **made_with,
            "machine": dataclasses.asdict(machine),
            **dataclasses.asdict(done),
            "cases": [_entry(time, machine) for time in times],
        }
    )
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
    return BenchPlan(
        device=kind,
        ops=ops or TIMED_OPS,
        shapes=tuple(dict.fromkeys(shapes)) or SHAPES_BY_DEFAULT[kind],
        seconds=SECONDS,
        threads=all_threads(os.environ),
    )


def _header(machine: Machine, made_with: dict[str, str]) -> Iterator[str]:
    yield machine.device
    yield versions_line(made_with)
    yield (
        f"{machine.dtype}; measured: reads {machine.bytes_per_s / 1e12:.3f} TB/s, "
        f"products {machine.flops_per_s / 1e12:.2f} TFLOP/s; {machine.num_cases} cases"
    )


command.add_command(speculate_command)
command.add_command(step_command)
command.add_command(offline_command)


def _case_lines(time: CaseTime, machine: Machine, before: CaseTime | None) -> Iterator[str]:
    if before is None or before.shape != time.shape:
        yield ""
        yield (
            f"{time.shape:<24} {'':<29}{'us':>8} {'reached':>13}{'floor us':>9}{'':>5}"
            f"{'torch us':>10}"
        )
    name = f"{time.op:<24} {time.label:<29}"
    if time.error:
        yield f"{name} failed: {time.error}"[:WIDTH]
        return
    entry = _entry(time, machine)
    has_floor = time.num_bytes and time.is_cold
    share = f"{entry['floor_us'] / entry['us']:>5.0%}" if has_floor else f"{'':>5}"
    floor = f"{entry['floor_us']:>9.2f}" if has_floor else f"{'':>9}"
    torch = f"{entry['torch_us']:>10.2f}" if time.torch_seconds else f"{'-':>10}"
    yield f"{name}{entry['us']:>8.2f} {_reached(time, machine):>13}{floor}{share}{torch}"


def _reached(time: CaseTime, machine: Machine) -> str:
    if not time.num_bytes:
        return ""
    if time.num_flops / machine.flops_per_s > time.num_bytes / machine.bytes_per_s:
        tflops = time.num_flops / time.seconds / 1e12
        return f"{tflops:.{2 if tflops < 100 else 1}f} TFLOP/s"
    return f"{time.num_bytes / time.seconds / 1e12:.3f} TB/s"


def _entry(time: CaseTime, machine: Machine) -> dict[str, Any]:
    """One case as JSON: microseconds; 0 for what was not measured, or is not known."""
    floor = max(time.num_bytes / machine.bytes_per_s, time.num_flops / machine.flops_per_s)
    floor *= time.is_cold
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
