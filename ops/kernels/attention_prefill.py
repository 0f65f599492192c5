"""Paged attention for many queries a request: one program per (tile of rows, KV head).

A tile packs the query heads of one KV head beside each other, so keys and values are read once
for the group. The program walks the splits of 256 keys in order and keeps two accumulators: that
of the split and the total. Only tiles that some row cannot see whole pay for masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.ops.kernels.attention_tiles import (
    SPLIT_TILES,
    SUMS,
    TILE,
    attend_tiles,
    first_visible,
    load_blocks,
    load_query,
    load_record,
    load_slopes,
    merge_partial,
    store_output,
)
from unisono.ops.kernels.launch import launchable
from unisono.ops.kernels.overlap import begin

_VARYING = [
    "records_ptr",
    "table_ptr",
    "slopes_ptr",
    "table_stride",
    "num_records",
    "tiles_per_record",
]
"""Arguments whose value or alignment changes from step to step: nothing is compiled anew."""


@launchable
@triton.jit(do_not_specialize=_VARYING)
def prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    records_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    num_records: tl.tensor,
    tiles_per_record: tl.tensor,
    GROUP: tl.constexpr,
    PER_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (tiles, KV heads)."""
    begin(OVERLAPS)
    kv_head = tl.program_id(1)
    row, token, position, length, _ = load_record(
        records_ptr, num_records, tl.program_id(0), tiles_per_record, PER_TILE
    )
    last = position + length - 1
    low = first_visible(position, WINDOW)
    r = tl.arange(0, BLOCK_M)
    positions = position + r // GROUP
    q = load_query(q_ptr, q_stride, token, length, kv_head, GROUP, BLOCK_M, DIM, DIM_PAD)
    slopes = load_slopes(slopes_ptr, kv_head, GROUP, BLOCK_M, ALIBI)
    k_head = k_ptr + kv_head * (TILE * DIM)
    v_head = v_ptr + kv_head * (TILE * DIM)
    table_row = table_ptr + row.to(tl.int64) * table_stride

    first_tile = low // TILE
    end_tile = tl.where(length > 0, last // TILE + 1, 0)
    # All rows that hold a query see tiles [first_whole, end_whole) whole.
    end_whole = (position + 1) // TILE
    first_whole = 0
    if WINDOW:
        first_whole = (first_visible(last, WINDOW) + TILE - 1) // TILE

    total_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_l = tl.zeros([BLOCK_M], tl.float32)
    total_acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for split in tl.range(first_tile // SPLIT_TILES, tl.cdiv(end_tile, SPLIT_TILES), num_stages=1):
        blocks = load_blocks(table_row, split, end_tile)
        start = tl.maximum(split * SPLIT_TILES, first_tile)
        stop = tl.minimum(split * SPLIT_TILES + SPLIT_TILES, end_tile)
        whole = tl.minimum(tl.maximum(first_whole, start), stop)
        ragged = tl.minimum(tl.maximum(end_whole, whole), stop)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M, SUMS], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        if WINDOW:
            m, l, acc = attend_tiles(  # noqa: E741
                m, l, acc, q, k_head, v_head, block_stride, blocks, start, whole, positions,
                slopes, low, last + 1, scale, DIM, DIM_PAD, WINDOW, ALIBI, True, PRECISION, STAGES,
            )  # fmt: skip
        m, l, acc = attend_tiles(  # noqa: E741
            m, l, acc, q, k_head, v_head, block_stride, blocks, whole, ragged, positions,
            slopes, low, last + 1, scale, DIM, DIM_PAD, WINDOW, ALIBI, False, PRECISION, STAGES,
        )  # fmt: skip
        m, l, acc = attend_tiles(  # noqa: E741
            m, l, acc, q, k_head, v_head, block_stride, blocks, ragged, stop, positions,
            slopes, low, last + 1, scale, DIM, DIM_PAD, WINDOW, ALIBI, True, PRECISION, STAGES,
        )  # fmt: skip
        total_m, total_l, total_acc = merge_partial(
            total_m, total_l, total_acc, m, tl.max(l, 1), acc
        )
    num_heads = tl.num_programs(1) * GROUP
    store_output(
        out_ptr, total_l, total_acc, r, token, length, kv_head, num_heads, GROUP, DIM, DIM_PAD
    )
