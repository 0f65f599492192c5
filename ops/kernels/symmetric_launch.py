"""How kernels over symmetric memory are compiled: what launches one, named once a layout and width.

`stages`: the first and the last that run, see ops/kernels/symmetric.py.
"""

from __future__ import annotations

import functools
from typing import Any

from unisono.ops.kernels.launch import bound, power_of_two
from unisono.ops.kernels.norm import shape_of_program
from unisono.ops.kernels.symmetric import one_shot_all_reduce_add_rms_norm_kernel
from unisono.ops.kernels.two_shot import (
    two_shot_all_reduce_add_rms_norm_kernel,
    two_shot_all_reduce_kernel,
)
from unisono.ops.symmetric_layout import REGION_WORDS, Layout

_ALIGN = 16
_PIECE_BYTES, _WARPS = 16384, 16
"""Of a two-shot: what a program has under way at once, and how many warps take it."""


@functools.cache
def one_shot_norm_of(ranks: int, width: int, has_bias: bool, stages: tuple[int, int]) -> Any:
    _, block, num_warps = shape_of_program(width)
    return bound(
        one_shot_all_reduce_add_rms_norm_kernel,
        WIDTH=width,
        HAS_BIAS=has_bias,
        RANKS=ranks,
        EPOCHS=1,
        REGION=REGION_WORDS,
        ALIGN=_ALIGN,
        BLOCK=block,
        FIRST=stages[0],
        LAST=stages[1],
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


@functools.cache
def two_shot_of(layout: Layout, item_bytes: int, stages: tuple[int, int]) -> Any:
    return bound(
        two_shot_all_reduce_kernel,
        **_two_shot_places(layout),
        BLOCK=_PIECE_BYTES // item_bytes,
        FIRST=stages[0],
        LAST=stages[1],
        num_warps=_WARPS,
    )


@functools.cache
def two_shot_norm_of(
    layout: Layout, width: int, item_bytes: int, has_bias: bool, stages: tuple[int, int]
) -> Any:
    _, block, num_warps = shape_of_program(width)
    return bound(
        two_shot_all_reduce_add_rms_norm_kernel,
        WIDTH=width,
        HAS_BIAS=has_bias,
        **_two_shot_places(layout),
        ALIGN=_ALIGN,
        # More than 128 bytes a thread would not find room in its registers, beside their sums.
        PIECE=min(_PIECE_BYTES, 4096 * num_warps) // item_bytes,
        # 32 numbers a thread, or 64 where a thread may have twice the registers. More rows do not
        # change how one is summed: each has all threads of the program, as if it were alone.
        ROWS=max((1024 if num_warps == _WARPS else 2048) * num_warps // block, 1),
        BLOCK=block,
        FIRST=stages[0],
        LAST=stages[1],
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


def _two_shot_places(layout: Layout) -> dict[str, int]:
    return {
        "RANKS": layout.ranks,
        "RANKS_OR_MORE": power_of_two(layout.ranks),
        "EPOCHS": 1 + layout.one_shot_lanes,
        "LANES": layout.two_shot_lanes,
        "SIGNALS": layout.signals,
        "DATA": layout.data,
        "REGION": layout.region_bytes,
    }
