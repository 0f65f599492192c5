"""Ranks of symmetric memory without processes: their memories are tensors of one device, and a
kernel's stages are run for all ranks before the next stage is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tests.ops import kernel_rig
from unisono.ops.symmetric import Symmetric
from unisono.ops.symmetric_layout import Layout

T = TypeVar("T")
SMALL = {"one_shot_bytes": 32 << 10, "two_shot_bytes": 256 << 10}
"""Of a layout: so that the interpreter is done in a moment."""


def local_ranks(ranks: int, layout: Layout | None = None, wait_s: float = 1e-5) -> list[Symmetric]:
    """Their ends. A rank that waits finds everything there, or gives up after a few looks."""
    layout = layout or Layout(ranks, **SMALL)
    device = kernel_rig.DEVICE
    memories = [
        torch.zeros(layout.nbytes + 16, dtype=torch.uint8, device=device) for _ in range(ranks)
    ]
    # What the interpreter is given may begin anywhere.
    memories = [memory[-memory.data_ptr() % 16 :][: layout.nbytes] for memory in memories]
    addresses = [memory.data_ptr() for memory in memories]
    return [
        Symmetric(
            rank,
            layout,
            memory,
            addresses,
            torch.zeros(1, dtype=torch.int64, pin_memory=kernel_rig.IS_GPU),
            wait_s,
        )
        for rank, memory in enumerate(memories)
    ]


def in_stages(ranks: list[Symmetric], num_stages: int, call: Callable[[Symmetric], T]) -> list[T]:
    """What `call` gives on each rank, once all of them have been through all stages."""
    results: list[T] = []
    for stage in range(num_stages):
        results = []
        for each in ranks:
            each.stages = (stage, stage)
            results.append(call(each))
            each.stages = None
    return results


def num_norm_stages(layout: Layout, x: Tensor) -> int:
    """Of the sum with a norm that serves x [tokens, width]: a one-shot has 2, a two-shot 3."""
    row_bytes = x.shape[1] * x.element_size()
    is_small = len(x) * row_bytes <= 2 * layout.one_shot_bytes and row_bytes <= 16 << 10
    return 2 if is_small and len(x) <= layout.one_shot_lanes else 3
