"""What a call costs on a device, and what the device itself can: for benchmarks and tuning.

On a GPU many launches are captured in one graph and replayed, so that the host's part of a launch
does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from unisono.ops.linear import packed_product

Call = Callable[[], object]

REPEATS = 5
GRAPH_S = 2e-3
"""Seconds of work that a graph is filled up to."""
MOST_LAUNCHES = 64
_CPU_S, _LEAST_S = 0.05, 0.1
_ROW = 1 << 14
_PARTS = 4


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
    return statistics.median(_host_times(calls))


def read_bytes_per_s(buffer: Tensor) -> float:
    """Bytes a second that the device reads: the best of two reductions and a copy.

    buffer: contiguous, of 4 bytes an element and larger than any cache. A copy reads and writes
    every byte, and both count.
    """
    device = buffer.device
    # What else a CPU does disturbs short calls less often.
    count = 1 if device.type == "cuda" else _PARTS
    parts = buffer[: buffer.numel() // (count * _ROW) * count * _ROW].view(count, -1, _ROW)
    half = parts.flatten()[: parts.numel() // 2]
    target = torch.empty_like(half)
    seconds = (
        _least_seconds([partial(part.amax, 1) for part in parts], device) / parts[0].nbytes,
        _least_seconds([partial(part.sum, 1) for part in parts], device) / parts[0].nbytes,
        _least_seconds([lambda: target.copy_(half)], device) / (2 * half.nbytes),
    )
    return 1.0 / min(seconds)


def flops_per_s(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> float:
    """Floating point operations a second of the best product of two square matrices: of torch's
    own, and on a CPU of that of the ops too."""
    return max(_product_flops_per_s(size, dtype, device) for size in sizes)


def _product_flops_per_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    x, y = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = _least_seconds([lambda: x @ y], device)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        seconds = min(seconds, _least_seconds([partial(packed_product(y), x)], device))
    return 2 * size**3 / seconds


def _least_seconds(calls: Sequence[Call], device: torch.device) -> float:
    """What one of `calls` can take. Replays on a GPU hardly differ: their median."""
    if device.type == "cuda":
        return seconds_per_call(calls, device)
    return min(_host_times(calls, _LEAST_S))


def _host_times(calls: Sequence[Call], seconds: float = _CPU_S) -> list[float]:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < REPEATS or (time.perf_counter() - began < seconds and len(times) < 1000):
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _gpu_seconds(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end), 1e-4) * 1e-3
