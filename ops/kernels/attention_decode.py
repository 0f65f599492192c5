"""Paged attention for few queries a request: one program per (tile, KV head, split of 512 keys).

Wins where keys are many and queries few: decoding and verification of drafts. Splits write their
partials to fp32 scratch and `merge_kernel` adds them left to right; where a plan has no request
longer than one split, the first kernel writes the output itself. Positions and counts are read on
the device, so a captured launch serves all lengths up to its number of splits.
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

_COUNTS = ["table_stride", "num_records", "tiles_per_record", "rows"]
"""Arguments that vary from step to step: no kernel is compiled anew for their values."""


@triton.jit(do_not_specialize=_COUNTS)
def decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    records_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    num_records: tl.tensor,
    tiles_per_record: tl.tensor,
    rows: tl.tensor,
    GROUP: tl.constexpr,
    PER_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Grid (tiles, KV heads, splits): the split counts from the first that the tile sees.

    sums [partials, tiles_per_record, kv_heads, rows, 2] holds m and l, partials [.., DIM] acc;
    both unused if DIRECT (one split at most).
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    ordinal = tl.program_id(2)
    row, token, position, length, partial = load_record(
        records_ptr, num_records, index, tiles_per_record, PER_TILE
    )
    last = position + length - 1
    low = first_visible(position, WINDOW)
    split = low // (TILE * SPLIT_TILES) + ordinal
    if (length > 0) & (split * (TILE * SPLIT_TILES) <= last):
        r = tl.arange(0, BLOCK_M)
        q = load_query(q_ptr, q_stride, token, length, kv_head, GROUP, BLOCK_M, DIM, DIM_PAD)
        slopes = load_slopes(slopes_ptr, kv_head, GROUP, BLOCK_M, ALIBI)
        end_tile = last // TILE + 1
        blocks = load_blocks(table_ptr + row.to(tl.int64) * table_stride, split, end_tile)
        head_offset = kv_head * (TILE * DIM)
        m, l, acc = attend_tiles(  # noqa: E741
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M, SUMS], tl.float32),
            tl.zeros([BLOCK_M, DIM_PAD], tl.float32),
            q,
            k_ptr + head_offset,
            v_ptr + head_offset,
            block_stride,
            blocks,
            tl.maximum(split * SPLIT_TILES, low // TILE),
            tl.minimum(split * SPLIT_TILES + SPLIT_TILES, end_tile),
            position + r // GROUP,
            slopes,
            low,
            last + 1,
            scale,
            DIM,
            DIM_PAD,
            WINDOW,
            ALIBI,
            True,
            PRECISION,
            STAGES,
        )
        total = tl.max(l, 1)
        if DIRECT:
            _, total, acc = merge_partial(
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, DIM_PAD], tl.float32),
                m,
                total,
                acc,
            )
            num_heads = tl.num_programs(1) * GROUP
            store_output(
                out_ptr, total, acc, r, token, length, kv_head, num_heads, GROUP, DIM, DIM_PAD
            )
        else:
            of_tile = (partial + ordinal) * tiles_per_record + index % tiles_per_record
            at = (of_tile.to(tl.int64) * tl.num_programs(1) + kv_head) * rows + r
            d = tl.arange(0, DIM_PAD)
            used = r < length * GROUP
            tl.store(sums_ptr + at * 2, m, mask=used)
            tl.store(sums_ptr + at * 2 + 1, total, mask=used)
            tl.store(
                partials_ptr + at[:, None] * DIM + d[None, :],
                acc,
                mask=used[:, None] & (d < DIM)[None, :],
            )


@triton.jit(do_not_specialize=_COUNTS[1:])
def merge_kernel(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    records_ptr: tl.tensor,
    num_records: tl.tensor,
    tiles_per_record: tl.tensor,
    rows: tl.tensor,
    GROUP: tl.constexpr,
    PER_TILE: tl.constexpr,
    HEIGHT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Grid (tiles, KV heads, rows of a partial / HEIGHT): merge partials, left to right."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.program_id(2) * HEIGHT
    _, token, position, length, partial = load_record(
        records_ptr, num_records, index, tiles_per_record, PER_TILE
    )
    if first_row < length * GROUP:
        low = first_visible(position, WINDOW)
        first_split = low // (TILE * SPLIT_TILES)
        count = (position + length - 1) // (TILE * SPLIT_TILES) - first_split + 1
        d = tl.arange(0, DIM_PAD)
        r = first_row + tl.arange(0, HEIGHT)
        used = r < length * GROUP
        m = tl.full([HEIGHT], float("-inf"), tl.float32)
        l = tl.zeros([HEIGHT], tl.float32)  # noqa: E741
        acc = tl.zeros([HEIGHT, DIM_PAD], tl.float32)
        for ordinal in tl.range(0, count, loop_unroll_factor=4):
            of_tile = (partial + ordinal) * tiles_per_record + index % tiles_per_record
            at = (of_tile.to(tl.int64) * tl.num_programs(1) + kv_head) * rows + r
            m, l, acc = merge_partial(  # noqa: E741
                m,
                l,
                acc,
                tl.load(sums_ptr + at * 2, mask=used, other=0.0),
                tl.load(sums_ptr + at * 2 + 1, mask=used, other=1.0),
                tl.load(
                    partials_ptr + at[:, None] * DIM + d[None, :],
                    mask=used[:, None] & (d < DIM)[None, :],
                    other=0.0,
                ),
            )
        num_heads = tl.num_programs(1) * GROUP
        store_output(out_ptr, l, acc, r, token, length, kv_head, num_heads, GROUP, DIM, DIM_PAD)
