"""Times how attention may be launched on one GPU: python scripts/tune_attention.py RESULT.json

Requests of many lengths decode, or whole prompts are computed, with the heads of real models on one
rank and two; each launch from a CUDA graph, beside what it has to read or to multiply. All launches
must give the same bits. What serves, and why, is in ops/kernels/attention_launch.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from unisono.ops.attention import PAGE, AttentionShape
from unisono.ops.kernels import attention
from unisono.ops.kernels.attention import (
    AttentionPlan,
    paged_attention,
    plan_attention,
    plan_records,
)
from unisono.ops.kernels.attention_launch import Launch
from unisono.ops.timing import read_bytes_per_s, seconds_per_call, timing_stream

SHAPES = {
    "qwen3-8b": AttentionShape(32, 8, 128),
    "qwen3-8b on two": AttentionShape(16, 4, 128),
    "qwen3-0.6b": AttentionShape(16, 8, 128),
    "smollm2-135m": AttentionShape(9, 3, 64),
}
DECODE_ROWS = (1, 16, 32, 64, 96, 128, 192, 256)
DECODE_KEYS = ((100, 1100), (400, 800), (8000, 8192))
PROMPTS = ((64, 128), (16, 512), (8, 1024), (2, 4096), (1, 32768))
"""How many of how many tokens."""
MOST_BYTES = 24 << 30
"""Of a cache that is worth timing."""
DECODE_LAUNCHES = (
    *(Launch(16, 4, stages) for stages in (2, 3, 5)),
    *(Launch(16, 4, stages, takes, 168) for takes in (2, 4, 8) for stages in (2, 3)),
    Launch(16, 4, 3, 4),
)
PREFILL_LAUNCHES = (
    *(Launch(64, 4, stages) for stages in (1, 2, 3)),
    *(Launch(128, 8, stages) for stages in (1, 2, 3)),
    Launch(64, 8, 2),
    Launch(128, 4, 2),
)
SCALE = 0.1
DEVICE, DTYPE = "cuda", torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One call of the op."""

    name: str
    q: Tensor
    caches: tuple[Tensor, Tensor]
    plan: AttentionPlan
    num_bytes: int
    num_flops: int

    def run(self) -> Tensor:
        return paged_attention(self.q, *self.caches, self.plan, SCALE)


def main() -> int:
    """Time, print and write; 1 if two launches gave different bits."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("result", type=Path, help="where to write the figures, as JSON")
    options.add_argument("--seconds", type=float, default=150.0, help="stop after that long")
    options.add_argument("--shape", choices=SHAPES, action="append")
    asked = options.parse_args()
    deadline = time.monotonic() + asked.seconds
    with timing_stream(torch.device(DEVICE)):
        entries = list(measured(asked.shape or [*SHAPES], deadline))
    asked.result.write_text(json.dumps(entries))
    return 1 if any(entry["unequal"] for entry in entries) else 0


def measured(names: list[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Time and print the mixes of these shapes until the deadline."""
    bytes_per_s = read_bytes_per_s(torch.randn(1 << 30, device=DEVICE))
    for name in names:
        for mix in mixes(name, SHAPES[name]):
            if time.monotonic() > deadline:
                print(f"out of time before {mix.name}")
                return
            entry = measure(mix, bytes_per_s)
            print(_line(entry), flush=True)
            yield entry


def mixes(name: str, shape: AttentionShape) -> Iterator[Mix]:
    """Rows that decode, then prompts, as far as a cache of them is worth its memory."""
    page = 4 * PAGE * shape.num_kv_heads * shape.head_dim
    rng = random.Random(0)
    for low, high in DECODE_KEYS:
        for rows in DECODE_ROWS:
            lengths = [rng.randint(low, high) for _ in range(rows)]
            if sum(map(_pages, lengths)) * page < MOST_BYTES:
                yield decode_mix(f"{name}, {rows} rows of {low}-{high} keys", shape, lengths)
    for count, length in PROMPTS:
        yield prompt_mix(f"{name}, {count} prompts of {length}", shape, count, length)


def decode_mix(name: str, shape: AttentionShape, lengths: list[int]) -> Mix:
    """As a graph's step: records on the device, splits for the longest that may come."""
    table, caches = _cache(shape, lengths)
    splits = -(-2 * max(lengths) // attention.SPLIT)
    order = torch.arange(len(lengths), dtype=torch.int32)
    last = torch.tensor(lengths, dtype=torch.int32) - 1
    records = torch.stack((order, order, last, torch.ones_like(order), order * splits)).to(DEVICE)
    return Mix(
        name=name,
        q=_noise(len(lengths), shape.num_heads, shape.head_dim),
        caches=caches,
        plan=plan_records(shape, records, table, splits),
        num_bytes=4 * shape.num_kv_heads * shape.head_dim * sum(lengths),
        num_flops=0,
    )


def prompt_mix(name: str, shape: AttentionShape, count: int, length: int) -> Mix:
    """Whole prompts, nothing before them."""
    table, caches = _cache(shape, [length] * count)
    return Mix(
        name=name,
        q=_noise(count * length, shape.num_heads, shape.head_dim),
        caches=caches,
        plan=plan_attention(shape, [0] * count, [length] * count, table),
        num_bytes=0,
        num_flops=2 * count * length * (length + 1) * shape.num_heads * shape.head_dim,
    )


def measure(mix: Mix, bytes_per_s: float) -> dict[str, Any]:
    """Time every launch of a mix, the one that serves first."""
    which = "decode_launch" if mix.plan.many is None else "prefill_launch"
    serving = getattr(attention, which)
    want, serving_us = mix.run(), time_us(mix.run)
    times, unequal = {}, []
    for launch in DECODE_LAUNCHES if mix.plan.many is None else PREFILL_LAUNCHES:
        setattr(attention, which, lambda *_, launch=launch: launch)
        try:
            if not torch.equal(mix.run(), want):
                unequal.append(str(launch))
            times[str(tuple(launch))] = time_us(mix.run)
        except OutOfResources as error:
            print(f"{mix.name}, {launch}: {error}")
        finally:
            setattr(attention, which, serving)
    return {
        "name": mix.name,
        "serving_us": serving_us,
        "floor_us": mix.num_bytes / bytes_per_s * 1e6,
        "tflops": mix.num_flops / serving_us / 1e6,
        "us": times,
        "unequal": unequal,
    }


def time_us(call: Callable[[], object]) -> float:
    return seconds_per_call([call], torch.device(DEVICE)) * 1e6


def _cache(shape: AttentionShape, lengths: list[int]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A block table of pages in no order, and the pages."""
    counts = [_pages(length) for length in lengths]
    order = torch.randperm(sum(counts)).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
    sizes = (sum(counts), shape.num_kv_heads, PAGE, shape.head_dim)
    return table.to(DEVICE), (_noise(*sizes), _noise(*sizes))


def _noise(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DTYPE, device=DEVICE)


def _pages(length: int) -> int:
    return -(-length // PAGE)


def _line(entry: dict[str, Any]) -> str:
    best = sorted(entry["us"], key=lambda launch: entry["us"][launch])[:3]
    others = ", ".join(f"{entry['us'][launch]:.1f} {launch}" for launch in best)
    beside = (
        f"floor {entry['floor_us']:.1f}" if entry["floor_us"] else f"{entry['tflops']:.0f} TFLOP/s"
    )
    wrong = f"; DIFFERENT BITS: {', '.join(entry['unequal'])}" if entry["unequal"] else ""
    return f"{entry['name']}: {entry['serving_us']:.1f} us, {beside}; {others}{wrong}"


if __name__ == "__main__":
    sys.exit(main())
