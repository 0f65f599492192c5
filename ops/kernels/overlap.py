"""Kernels that begin while the one before them ends (Hopper's programmatic dependent launch).

The order of a stream stays what it was: a kernel that is launched so waits, before it reads or
writes anything that another kernel may touch, until all that came before it is done and visible.
What it gains is the time to be launched, and to fetch what no kernel writes: weights.

Every program of such a kernel calls `begin`, on every path: the kernel after it waits for this one
alone, and takes it that whoever came before is done once this one is.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

LINE = tl.constexpr(16)
"""Bytes that a prefetch begins on, and is a multiple of."""


@functools.cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """What to launch a kernel with that takes OVERLAPS and calls `begin`, on `device`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def begin(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel be launched, and wait for the one before."""
    release(OVERLAPS)
    wait(OVERLAPS)


@triton.jit
def wait(OVERLAPS: tl.constexpr) -> None:
    """Wait for the kernel before; `release` may come later."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel be launched, once every program has called this.

    Its programs are placed where there is room at that moment. So a kernel that fills the card
    calls it when it is nearly done: else the next one crowds onto a few processors.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers: tl.tensor, num_bytes: tl.tensor) -> None:
    """Have `num_bytes` from each of `pointers` on brought into the L2 cache; both in LINEs."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
