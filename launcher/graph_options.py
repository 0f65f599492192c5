"""What `--graph-buckets` and `--capture` come to, or why they are refused. Pure and torch-free."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from unisono.models.config import ConfigError
from unisono.workers.config import WorkerConfig

_LADDER = (*(1, 2, 4), *range(8, 32, 8), *range(32, 128, 16))
"""Then every 32."""


def buckets_up_to(max_requests: int) -> tuple[int, ...]:
    """The heights that graphs are captured for unless the user says, ascending.

    Few enough to be captured in seconds, near enough that little is computed for padding.
    """
    ladder = (*_LADDER, *range(128, max_requests, 32))
    return (*(height for height in ladder if height < max_requests), max_requests)


def why_no_graphs(worker: WorkerConfig, instead: str) -> str:
    """Why nothing is ever captured, and what to choose: `instead` or others; "": something is."""
    if worker.device != "cuda":
        return f"{worker.device} has no graphs; {instead}, or --device cuda where there is a GPU"
    if worker.attn != "triton":
        return f"with --attn {worker.attn} nothing is captured; {instead}, or --attn auto or triton"
    return ""


def resolve_graphs(worker: WorkerConfig) -> WorkerConfig:
    """The same with its buckets, where there are graphs. `worker`: resolved but for these.

    Raises ConfigError for buckets that cannot be, and for choices that nothing would come of.
    """
    asked = ",".join(map(str, worker.graph_buckets))
    if worker.graph_buckets:
        _check_buckets(worker.graph_buckets, asked, worker.max_requests)
    given = {"--graph-buckets": asked, "--capture": worker.capture.removeprefix("lazy")}
    why = why_no_graphs(worker, "leave it out")
    if why and worker.random_padding:
        raise ConfigError(f"--random-padding: {why}")
    if not why and worker.no_graphs:
        why = "--no-graphs captures nothing; give one of the two"
    for flag, value in given.items():
        if value and why:
            raise ConfigError(f"{flag} {value}: {why}")
    if worker.device != "cuda" or worker.graph_buckets:
        return worker
    return replace(worker, graph_buckets=buckets_up_to(worker.max_requests))


def _check_buckets(buckets: tuple[int, ...], asked: str, max_requests: int) -> None:
    flag = f"--graph-buckets {asked}"
    if buckets[0] < 1:
        raise ConfigError(f"{flag}: a step has at least 1 row; choose 1 to {max_requests}")
    if any(a >= b for a, b in pairwise(buckets)):
        ascending = ",".join(map(str, sorted(set(buckets))))
        raise ConfigError(f"{flag}: must ascend; choose {ascending}")
    if buckets[-1] > max_requests:
        raise ConfigError(
            f"{flag}: at most --max-requests {max_requests} rows decode in a step; choose 1 to "
            f"{max_requests}, or raise that"
        )
