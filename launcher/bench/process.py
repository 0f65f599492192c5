"""Runs the measuring process of `unisono bench` and hands on what it says."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from unisono.launcher.cluster import SESSION_VARIABLE
from unisono.launcher.host_report import is_linux
from unisono.launcher.private_directory import PrivateDirectory
from unisono.launcher.process_table import ProcessSpec, threads_per_rank
from unisono.launcher.supervisor import Supervisor
from unisono.runtime.protocol import EngineError
from unisono.workers.channel import Hub
from unisono.workers.timings import (
    BENCH_REPORTS,
    BenchDone,
    BenchFailed,
    BenchOrders,
    CaseTime,
    Machine,
)

BENCH_ENTRY = "unisono.workers.bench:main"
SILENCE_S = 180.0
"""Longest time without a word: torch is loaded, timed and kernels are compiled meanwhile."""
_NAME = "bench"
_SHAPE = "smollm2-135m"
"""Its sizes make inputs that are larger than caches."""
_GRACE_S = 2.0
_WATCH_S = 0.1


class BenchBroken(EngineError):
    """The measuring process could not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is to be measured: fields of `BenchOrders`."""

    device: str
    ops: tuple[str, ...]
    shapes: tuple[str, ...]
    seconds: float
    threads: int


def run_bench(
    plan: BenchPlan, environ: Mapping[str, str]
) -> Generator[Machine | CaseTime | BenchDone, None, None]:
    """Yield the machine, the cases as they are measured, and the end. Raises BenchBroken.

    Leaving early ends the process: close the iterator.
    """
    session = secrets.token_hex(16)
    with (
        PrivateDirectory() as directory,
        Hub(directory.endpoint(_NAME), BENCH_REPORTS, session) as hub,
    ):
        orders = BenchOrders(
            device=plan.device,
            ops=plan.ops,
            shapes=plan.shapes,
            seconds=plan.seconds,
            endpoint=directory.endpoint(_NAME),
            session=session,
            threads=plan.threads,
        )
        env = {SESSION_VARIABLE: session, "OMP_NUM_THREADS": str(plan.threads)}
        spec = ProcessSpec(name=_NAME, entry=BENCH_ENTRY, orders=orders, env=env)
        with Supervisor([spec], _GRACE_S) as processes:
            processes.start()
            yield from _news(hub, processes)


def measure_machine(device: str, environ: Mapping[str, str]) -> Machine:
    """Have `device` (cpu or cuda) measured as `unisono bench ops` does. Raises BenchBroken."""
    plan = BenchPlan(
        device=device, ops=(), shapes=(_SHAPE,), seconds=0.0, threads=all_threads(environ)
    )
    [machine] = [news for news in run_bench(plan, environ) if isinstance(news, Machine)]
    return machine


def all_threads(environ: Mapping[str, str]) -> int:
    """CPU threads of a process that has the machine for itself."""
    cores = len(os.sched_getaffinity(0)) if is_linux() else os.cpu_count() or 1
    return threads_per_rank(environ, cores, 1)


def _news(hub: Hub, processes: Supervisor) -> Iterator[Machine | CaseTime | BenchDone]:
    heard = time.monotonic()
    while time.monotonic() - heard < SILENCE_S:
        ended = processes.poll()
        received = hub.receive(_WATCH_S)
        if received is None:
            if ended:
                how = f"signal {ended[0].signal}" if ended[0].signal else f"code {ended[0].code}"
                raise BenchBroken(f"the measuring process ended with {how}")
            continue
        heard = time.monotonic()
        match received[1]:
            case BenchFailed(phase=phase, message=message):
                what = f"the measuring process failed in phase {phase!r}: {message}"
                raise BenchBroken(" ".join(what.split()))
            case BenchDone() as done:
                yield done
                processes.wait(_GRACE_S)
                return
            case news:
                yield news
    raise BenchBroken(f"the measuring process said nothing for {SILENCE_S:.0f} s")
