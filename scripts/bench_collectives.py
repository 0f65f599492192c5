"""Times the collectives of a decode step: scripts/bench_collectives.py --ranks 2

Starts the ranks itself, or is one of them under torchrun. On GPUs every call is timed from CUDA
graphs, as in a decode step: one-shot, two-shot, each of them fused with residual and norm against
the same in separate kernels, the maximum of a few keys, and over NCCL the gather with ordered sum
and NCCL's own all-reduce. On the CPU (--device cpu) what there is meets over gloo. Prints a line a
size, medians in microseconds of rank 0, and everything as JSON in the last line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from unisono.ops.comm import Group
from unisono.ops.reference.norm import add_rms_norm as plain_add_rms_norm
from unisono.workers import device as devices
from unisono.workers.entry import prepare_environment

SIZES = tuple(1 << power for power in range(13, 27))
"""Bytes: 8 KiB to 64 MiB."""
WIDTH = 4096
KEYS = 32
MOST_ONE_SHOT = 2 << 20
"""Beyond every crossover, to find out where it should be."""
CALLS, REPLAYS, WARM_UP = 20, 31, 5
Call = Callable[[], object]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    asked = options.parse_args()
    if "RANK" in os.environ:
        return run_rank(asked.device, asked.sizes)
    return start_ranks(asked.ranks)


def start_ranks(ranks: int) -> int:
    """Run this script once for each rank; the first exit code that is not 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in range(ranks):
        own = {**shared, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        environ = {**os.environ, **{name: str(value) for name, value in own.items()}}
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environ))
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return next(filter(None, codes), 0)


def run_rank(kind: str, sizes: list[int]) -> int:
    prepare_environment(os.environ)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = devices.rank_device(kind, os.environ)
    store = devices.open_store(os.environ)
    plain = devices.join_group(rank, ranks, device, store, "nccl")
    direct, reason = None, "on the CPU there is none"
    if kind == "cuda":
        from unisono.ops.symmetric import open_symmetric
        from unisono.ops.symmetric_layout import Layout

        layout = Layout(ranks, MOST_ONE_SHOT, max(SIZES))
        assert dist.group.WORLD is not None
        direct, reason = open_symmetric(rank, ranks, device, store, dist.group.WORLD, layout)
    lines = []
    if rank == 0:
        print(f"{ranks} ranks on {kind}; symmetric memory: {reason or 'served'}", flush=True)
    for nbytes in sizes:
        times = {name: timed(device, call) for name, call in calls(nbytes, device, plain, direct)}
        lines.append({"bytes": nbytes, **{name: round(us, 2) for name, us in times.items()}})
        if rank == 0:
            shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"{nbytes:>9,} bytes: {shown}", flush=True)
    plain.direct.check()
    if rank == 0:
        facts = {"ranks": ranks, "device": device_name(device), "torch": torch.__version__}
        print(json.dumps({**facts, "symmetric": reason or "served", "us": lines}))
    devices.leave_group()
    return 0


def calls(
    nbytes: int, device: torch.device, plain: Group, direct: Any
) -> Iterator[tuple[str, Call]]:
    """What is timed at `nbytes` of bf16, by name."""
    x = torch.ones(max(nbytes // 2 // WIDTH, 1), min(nbytes // 2, WIDTH), device=device).bfloat16()
    residual, weight = torch.ones_like(x), torch.ones_like(x[0])
    keys = torch.arange(KEYS, device=device)
    add_norm = plain_add_rms_norm
    if device.type == "cuda":
        from unisono.ops.kernels.norm import add_rms_norm as add_norm
    if direct is not None:
        if nbytes <= direct.layout.one_shot_bytes:
            yield "one-shot", lambda: direct.one_shot(x)
        if nbytes <= direct.layout.two_shot_bytes:
            yield "two-shot", lambda: direct.two_shot(x)
        rest = (x, None, residual, weight, 1e-6)
        if nbytes <= 2 * direct.layout.one_shot_bytes and direct.one_shot_add_rms_norm(*rest):
            yield "fused", lambda: direct.one_shot_add_rms_norm(*rest)
        if nbytes <= direct.layout.one_shot_bytes:
            yield "one-shot + norm", lambda: add_norm(direct.one_shot(x), residual, weight, 1e-6)
        if direct.two_shot_add_rms_norm(*rest):
            yield "two-shot + norm fused", lambda: direct.two_shot_add_rms_norm(*rest)
            yield "two-shot + norm", lambda: add_norm(direct.two_shot(x), residual, weight, 1e-6)
        yield f"max of {KEYS}", lambda: direct.max(keys)
    yield "gather + sum", lambda: plain.all_reduce(x)
    yield "gather + sum + norm", lambda: add_norm(plain.all_reduce(x), residual, weight, 1e-6)
    yield f"gather + max of {KEYS}", lambda: plain.max(keys)
    zeros = torch.zeros_like(x)
    yield "all_reduce", lambda: dist.all_reduce(zeros)


def timed(device: torch.device, call: Call) -> float:
    """Median microseconds of `call`, one after the other on all ranks."""
    for _ in range(WARM_UP):
        call()
    if device.type == "cpu":
        return statistics.median(_seconds_of(call) for _ in range(REPLAYS)) * 1e6
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    return statistics.median(times) * 1e3 / CALLS


def _seconds_of(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
