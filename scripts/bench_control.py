"""Measures what deciding costs: scripts/bench_control.py

Steady decode of 1, 32 and 256 rows on 1 and 2 ranks that answer at once: a real scheduler, worker
group, sockets and codec, ranks that are processes and compute nothing. Prints the time of each part
of a step in microseconds, and as the last line everything as JSON. "wait" is from the last byte
sent to the last answer taken in: the transport and the ranks' own work on a message.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

import unisono
from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.runtime.scheduler import Scheduler
from unisono.runtime.worker_group import WorkerGroup
from unisono.workers.channel import Hub, Peer, wait_readable
from unisono.workers.protocol import (
    WORKER_COMMANDS,
    WORKER_REPORTS,
    Allocate,
    Hello,
    Loaded,
    Phase,
    Ready,
    StepPlan,
    StepResult,
    int32s,
)

SESSION = "b" * 32
PARTS = ("plan", "send", "wait", "apply", "step")
PROMPT_TOKENS = 100
WARM_UP = 50


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--spin", action="store_true", help="ask for answers without sleeping")
    asked = options.parse_args()
    print(f"{machine()}, {asked.steps} steps, medians of {asked.rounds} rounds, us median / p99")
    print("ranks  rows" + "".join(f"{part:>16}" for part in PARTS))
    figures = []
    for ranks in asked.ranks:
        for rows in asked.rows:
            rounds = [measure(ranks, rows, asked.steps, asked.spin) for _ in range(asked.rounds)]
            found = {part: summary([each[part] for each in rounds]) for part in PARTS}
            shown = "".join(f"{median:>8.0f} /{p99:>6.0f}" for median, p99 in found.values())
            print(f"{ranks:>5} {rows:>5}{shown}", flush=True)
            figures.append({"ranks": ranks, "rows": rows, "us": found})
    print(json.dumps({"machine": machine(), "spin": asked.spin, "figures": figures}))


def measure(ranks: int, rows: int, steps: int, spin: bool) -> dict[str, list[float]]:
    """Microseconds of every part of every step."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    with engine(ranks) as (workers, hub):
        scheduler = full_scheduler(rows, steps)
        done = 0
        while done < steps + WARM_UP:
            times = [time.perf_counter()]
            plan = scheduler.next_plan()
            assert plan is not None
            times.append(time.perf_counter())
            workers.send(plan)
            times.append(time.perf_counter())
            while spin and not wait_readable([hub], 0):
                pass
            result = workers.receive(plan.step)
            times.append(time.perf_counter())
            scheduler.apply(result.tokens, result.counts, result.logprobs)
            times.append(time.perf_counter())
            is_steady = len(plan.rows) == rows and set(plan.rows.phase) == {Phase.DECODE}
            done += is_steady
            if is_steady and done > WARM_UP:
                spans = [*itertools.pairwise(times), (times[0], times[-1])]
                for part, (start, end) in zip(PARTS, spans, strict=True):
                    found[part].append(1e6 * (end - start))
    return found


def full_scheduler(rows: int, steps: int) -> Scheduler:
    """A scheduler with `rows` requests that run longer than `steps` decode steps."""
    length = PROMPT_TOKENS + steps + 2 * WARM_UP + rows
    scheduler = Scheduler(
        num_blocks=rows * (length // 64 + 1),
        max_requests=rows,
        max_model_len=length + 1,
        max_step_tokens=2048,
        eos_token_ids=[1],
    )
    for number in range(rows):
        scheduler.add(
            Request(
                client="bench",
                request_id=number,
                prompt_ids=array("i", [2 + number, *range(2, PROMPT_TOKENS + 1)]),
                params=SamplingParams(),
                max_tokens=length - PROMPT_TOKENS,
                arrived_s=0.0,
            )
        )
    return scheduler


@contextmanager
def engine(ranks: int) -> Iterator[tuple[WorkerGroup, Hub]]:
    """A worker group whose ranks answer at once."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        endpoint = f"ipc://{directory}/w"
        children = [spawn.Process(target=rank_main, args=(endpoint, i)) for i in range(ranks)]
        with Hub(endpoint, WORKER_REPORTS, SESSION) as hub:
            for child in children:
                child.start()
            workers = WorkerGroup(hub, ranks)
            workers.wait_loaded()
            workers.allocate(1)
            try:
                yield workers, hub
            finally:
                workers.shutdown()
                for child in children:
                    child.join()


def rank_main(endpoint: str, rank: int) -> None:
    """A rank that computes nothing: each sampling row gets the token 7."""
    with Peer(endpoint, f"rank {rank}", WORKER_COMMANDS, SESSION) as peer:
        peer.send(Hello(rank=rank, pid=os.getpid(), host="bench", config_digest=""))
        peer.send(
            Loaded(
                rank=rank,
                num_blocks=1,
                device="none",
                dtype="none",
                weight_bytes=0,
                activation_bytes=0,
                block_bytes=0,
            )
        )
        while True:
            match peer.receive(None):
                case StepPlan(step=step, rows=rows):
                    tokens = int32s([7] * (len(rows) - rows.phase.count(Phase.CHUNK)))
                    peer.send(
                        StepResult(rank=rank, step=step, tokens=tokens, digest=0, seconds=0.0)
                    )
                case Allocate():
                    peer.send(Ready(rank=rank))
                case _:
                    return


def summary(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Median and 99th percentile, each the median over the rounds."""
    ordered = [sorted(values) for values in rounds]
    medians = [statistics.median(values) for values in ordered]
    p99s = [values[min(len(values) * 99 // 100, len(values) - 1)] for values in ordered]
    return statistics.median(medians), statistics.median(p99s)


def machine() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return (
        f"{name}, {cores} cores, pyzmq {zmq.__version__}, Python {platform.python_version()}, "
        f"unisono {unisono.__version__}"
    )


if __name__ == "__main__":
    main()
