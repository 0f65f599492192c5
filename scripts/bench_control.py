"""Measures what deciding costs: scripts/bench_control.py

Steady decode of 1, 32, 128 and 256 rows on 1 and 2 ranks that answer at once: the real engine loop,
scheduler, sockets and codec; ranks that are processes and compute nothing; and a launcher in a
process of its own that turns what it is told into answers. Prints microseconds of each part of a
step, and as the last line everything as JSON.

"wait" is for the ranks: the transport and their own work on a message. "tell" is passing tokens on.
"cycle" is from a result to the plan that it lets go, which a device that is a step ahead must hide.
"step" is from result to result, which no device can make shorter. "launcher" is processor time of
that process, all its threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

import unisono
from unisono.launcher.answering import answer_all, ids_request
from unisono.launcher.text.ids_only import IdsOnly
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import CLIENT_MESSAGES, ENGINE_EVENTS, SamplingParams, Stop, Submit
from unisono.runtime.protocol import Tokens as Told
from unisono.runtime.scheduler import Scheduler
from unisono.runtime.worker_group import WorkerGroup
from unisono.workers.channel import Hub, Peer
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
PARTS = ("drain", "plan", "send", "tell", "wait", "apply", "cycle", "step")
PROMPT_TOKENS = 100
WARM_UP = 50


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 256])
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--stream", action="store_true", help="make pieces of text of every token")
    asked = options.parse_args()
    print(f"{machine()}, {asked.steps} steps, medians of {asked.rounds} rounds, us median / p99")
    print("ranks  rows" + "".join(f"{part:>14}" for part in PARTS) + "  launcher")
    figures = []
    for ranks in asked.ranks:
        for rows in asked.rows:
            rounds = [measure(ranks, rows, asked.steps, asked.stream) for _ in range(asked.rounds)]
            found = {part: summary([each[part] for each, _ in rounds]) for part in PARTS}
            launcher = statistics.median(us for _, us in rounds)
            shown = "".join(f"{median:>7.0f} /{p99:>5.0f}" for median, p99 in found.values())
            print(f"{ranks:>5} {rows:>5}{shown}{launcher:>10.0f}", flush=True)
            figures.append({"ranks": ranks, "rows": rows, "us": found, "launcher_us": launcher})
    print(json.dumps({"machine": machine(), "stream": asked.stream, "figures": figures}))


def measure(
    ranks: int, rows: int, steps: int, stream: bool
) -> tuple[dict[str, list[float]], float]:
    """Microseconds of every part of every step; and of the launcher's processor, a step."""
    length = PROMPT_TOKENS + steps + 2 * WARM_UP + rows
    with engine(ranks, rows, length, stream) as (workers, clients, launcher):
        scheduler = Scheduler(
            num_blocks=rows * (length // 64 + 1),
            max_requests=rows,
            max_model_len=length + 1,
            max_step_tokens=2048,
            eos_token_ids=[1],
        )
        served = Engine(clients, workers, scheduler, length + 1)
        clock = Clock(rows)
        clock.watch(served, "_drain", "drain")
        clock.watch(served, "_tell", "tell")
        clock.watch(scheduler, "next_plan", "plan")
        clock.watch(scheduler, "apply", "apply")
        clock.watch(workers, "send", "send")
        clock.watch(workers, "receive", "wait")
        served.run()
        found = clock.steps[WARM_UP : WARM_UP + steps]
        assert len(found) == steps, f"{len(found)} steady steps"
        return {part: [1e6 * step[part] for step in found] for part in PARTS}, launcher.recv()


class Clock:
    """Adds up what the parts of each step take, of those steps in which all `rows` decode."""

    def __init__(self, rows: int) -> None:
        self.steps: list[dict[str, float]] = []
        self._rows = rows
        self._is_steady = False
        self._now: defaultdict[str, float] = defaultdict(float)
        self._answered_s = 0.0

    def watch(self, owner: object, method: str, part: str) -> None:
        """Count the calls of `method` as `part`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*values: Any) -> Any:
            began = time.perf_counter()
            result = inner(*values)
            ended = time.perf_counter()
            self._now[part] += ended - began
            if part == "send":
                rows = values[0].rows
                self._is_steady = len(rows) == self._rows and rows.decode_only
                self._now["cycle"] = ended - self._answered_s
            if part == "wait":
                self._end_step(ended)
            return result

        setattr(owner, method, timed)

    def _end_step(self, now_s: float) -> None:
        if self._is_steady:
            self.steps.append({**self._now, "step": now_s - self._answered_s})
        self._now.clear()
        self._is_steady, self._answered_s = False, now_s


@contextmanager
def engine(
    ranks: int, rows: int, length: int, stream: bool
) -> Iterator[tuple[WorkerGroup, Hub, Connection]]:
    """A worker group whose ranks answer at once, and clients of which one asks for `rows`."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        ends = [f"ipc://{directory}/{name}" for name in ("w", "c")]
        ours, theirs = spawn.Pipe()
        children = [spawn.Process(target=rank_main, args=(ends[0], i)) for i in range(ranks)]
        with (
            Hub(ends[0], WORKER_REPORTS, SESSION) as hub,
            Hub(ends[1], CLIENT_MESSAGES, SESSION) as clients,
        ):
            for child in children:
                child.start()
            workers = WorkerGroup(hub, ranks)
            workers.wait_loaded()
            workers.allocate(1)
            asked = (ends[1], rows, length - PROMPT_TOKENS, stream, theirs)
            children.append(spawn.Process(target=launcher_main, args=asked))
            children[-1].start()
            yield workers, clients, ours
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


def launcher_main(
    endpoint: str, rows: int, max_tokens: int, stream: bool, result: Connection
) -> None:
    """A launcher that asks for `rows` answers and sends what a steady step cost it."""
    with Peer(endpoint, "launcher", ENGINE_EVENTS, SESSION) as peer:
        channel = Channel(peer, rows)
        requests = [
            ids_request(number, [2 + number, *range(2, PROMPT_TOKENS + 1)])
            for number in range(rows)
        ]
        params = SamplingParams(max_tokens=max_tokens)
        words = IdsOnly("bench", 1 << 20)
        deque(answer_all(channel, words, requests, params, whole=not stream), maxlen=0)
        result.send(channel.us_per_step())
        peer.send(Stop())


class Channel:
    """What `answer_all` needs of an engine, and a note of the time at each steady step."""

    def __init__(self, peer: Peer, rows: int) -> None:
        self._peer, self._rows = peer, rows
        self._num_asked = 0
        self._seconds: list[float] = []

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int) -> int:
        number, self._num_asked = self._num_asked, self._num_asked + 1
        more = self._num_asked < self._rows
        prompt = int32s(prompt_ids)
        self._peer.send(Submit(request_id=number, prompt_ids=prompt, params=params, more=more))
        return number

    def abort(self, request_id: int) -> None:
        raise AssertionError("nothing is aborted")

    def poll(self, timeout_s: float) -> list[Any]:
        events = []
        message = self._peer.receive(timeout_s)
        while message is not None:
            events.append(message)
            if isinstance(message, Told) and len(message.token_ids) == self._rows:
                self._seconds.append(time.process_time())
            message = self._peer.receive(0.0)
        return events

    def us_per_step(self) -> float:
        steady = self._seconds[WARM_UP:]
        return 1e6 * (steady[-1] - steady[0]) / (len(steady) - 1)


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
