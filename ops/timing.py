"""What a call costs on a device, and what the device itself can: for benchmarks and tuning.

On a GPU many launches are captured in one graph and replayed, so that the host's part of a launch
does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Call = Callable[[], object]

REPEATS = 5
GRAPH_S = 2e-3
"""Seconds of work that a graph is filled up to."""
MOST_LAUNCHES = 64
_CPU_S = 0.05
_ROW = 1 << 14


def seconds_per_call(calls: Sequence[Call], device: torch.device) -> float:
    """Median seconds of one of `calls`, made in turn: give several to find nothing in a cache.

    On a GPU they must be capturable, and `timing_stream` must be the current one. Each is called
    at least once.
    """
    calls[0]()
    if device.type != "cuda":
        return host_seconds_per_call(calls)
    rough = _gpu_seconds(calls[-1])
    launches = max(len(calls), min(MOST_LAUNCHES, int(GRAPH_S / rough)), 1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # torch.cuda.graph would collect garbage each time, which takes longer than the measurement.
    graph.capture_begin()
    try:
        for number in range(launches):
            calls[number % len(calls)]()
    finally:
        graph.capture_end()
    graph.replay()
    return statistics.median(_gpu_seconds(graph.replay) for _ in range(REPEATS)) / launches


@contextmanager
def timing_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own, for the default one cannot be captured; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def host_seconds_per_call(calls: Sequence[Call]) -> float:
    """Median seconds of a call as the host sees it, nothing waited for."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < REPEATS or (time.perf_counter() - began < _CPU_S and len(times) < 1000):
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bytes_per_s(buffer: Tensor) -> float:
    """Bytes a second that the device reads: the best of two reductions and a copy.

    buffer: contiguous, of 4 bytes an element and larger than any cache. A copy reads and writes
    every byte, and both count.
    """
    rows = buffer[: buffer.numel() // _ROW * _ROW].view(-1, _ROW)
    half = buffer.numel() // 2
    source, target = buffer[:half], torch.empty_like(buffer[:half])
    device = buffer.device
    seconds = (
        seconds_per_call([lambda: rows.amax(1)], device) / rows.nbytes,
        seconds_per_call([lambda: rows.sum(1)], device) / rows.nbytes,
        seconds_per_call([lambda: target.copy_(source)], device) / (2 * source.nbytes),
    )
    return 1.0 / min(seconds)


def flops_per_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Floating point operations a second of torch's own product of two square matrices."""
    x, y = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_per_call([lambda: x @ y], device)


def _gpu_seconds(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end), 1e-4) * 1e-3
