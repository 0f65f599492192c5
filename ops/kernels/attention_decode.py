"""Paged attention for few queries a request: one program per (tile, KV head, TAKES splits).

Wins where keys are many and queries few: decoding and verification of drafts. Splits are merged
left to right. The first program of a tile merges its own, and where those are all it writes the
output itself; other splits write partials to fp32 scratch, which `merge_kernel` adds. Few programs
take one split each, to use the whole card; many take several, and most requests need no scratch.
Positions and counts are read on the device, so a captured launch serves all lengths up to its
number of splits.
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
    "rows",
]
"""Arguments whose value or alignment changes from step to step: nothing is compiled anew."""


@launchable
@triton.jit(do_not_specialize=_VARYING)
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
    TAKES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (tiles, KV heads, splits / TAKES): splits count from the first that the tile sees.

    sums [partials, tiles_per_record, kv_heads, rows, 2] holds m and l, partials [.., DIM] acc, of
    split 0 the total of the first TAKES; both unused if there are no more.
    """
    begin(OVERLAPS)
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.program_id(2) * TAKES
    row, token, position, length, partial = load_record(
        records_ptr, num_records, index, tiles_per_record, PER_TILE
    )
    last = position + length - 1
    low = first_visible(position, WINDOW)
    skipped = low // (TILE * SPLIT_TILES)
    count = last // (TILE * SPLIT_TILES) - skipped + 1
    if (length > 0) & (first < count):
        r = tl.arange(0, BLOCK_M)
        q = load_query(q_ptr, q_stride, token, length, kv_head, GROUP, BLOCK_M, DIM, DIM_PAD)
        slopes = load_slopes(slopes_ptr, kv_head, GROUP, BLOCK_M, ALIBI)
        end_tile = last // TILE + 1
        table_row = table_ptr + row.to(tl.int64) * table_stride
        ahead = load_blocks(table_row, skipped + first, end_tile)
        head_offset = kv_head * (TILE * DIM)
        # Where the partial of split 0 lies, and how many rows further the next one does.
        at = partial * tiles_per_record + index % tiles_per_record
        at = (at.to(tl.int64) * tl.num_programs(1) + kv_head) * rows
        step = tiles_per_record.to(tl.int64) * tl.num_programs(1) * rows
        used = r < length * GROUP
        total_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total_l = tl.zeros([BLOCK_M], tl.float32)
        total_acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        for ordinal in tl.range(first, tl.minimum(first + TAKES, count), num_stages=1):
            split = skipped + ordinal
            blocks = ahead
            ahead = load_blocks(table_row, split + 1, end_tile)
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
            if first == 0:
                total_m, total_l, total_acc = merge_partial(
                    total_m, total_l, total_acc, m, tl.max(l, 1), acc
                )
            else:
                here = at + ordinal * step + r
                _store_partial(
                    sums_ptr, partials_ptr, here, used, m, tl.max(l, 1), acc, DIM, DIM_PAD
                )
        if first == 0:
            if count <= TAKES:
                num_heads = tl.num_programs(1) * GROUP
                store_output(
                    out_ptr, total_l, total_acc, r, token, length, kv_head, num_heads, GROUP, DIM,
                    DIM_PAD,
                )  # fmt: skip
            else:
                _store_partial(
                    sums_ptr, partials_ptr, at + r, used, total_m, total_l, total_acc, DIM, DIM_PAD
                )


@launchable
@triton.jit(do_not_specialize=_VARYING)
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
    TAKES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (tiles, KV heads, rows of a partial / HEIGHT): merge partials, left to right."""
    begin(OVERLAPS)
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.program_id(2) * HEIGHT
    _, token, position, length, partial = load_record(
        records_ptr, num_records, index, tiles_per_record, PER_TILE
    )
    low = first_visible(position, WINDOW)
    first_split = low // (TILE * SPLIT_TILES)
    count = (position + length - 1) // (TILE * SPLIT_TILES) - first_split + 1
    # Nobody looks at the count of a tile without a query.
    if (first_row < length * GROUP) & (count > TAKES):
        r = first_row + tl.arange(0, HEIGHT)
        # Row r of the first partial, and how many rows further the next one is.
        at = partial * tiles_per_record + index % tiles_per_record
        at = (at.to(tl.int64) * tl.num_programs(1) + kv_head) * rows
        at += tl.minimum(r, length * GROUP - 1)
        step = tiles_per_record.to(tl.int64) * tl.num_programs(1) * rows
        m, l, acc = _load_partial(  # noqa: E741
            sums_ptr, partials_ptr, at, 0, count, step, DIM, DIM_PAD
        )
        for ordinal in tl.range(TAKES, count, 4, num_stages=1):
            # Four at a time are on their way: else each would wait for the one before.
            here = at + ordinal * step
            left = count - ordinal
            m_0, l_0, acc_0 = _load_partial(
                sums_ptr, partials_ptr, here, 0, left, step, DIM, DIM_PAD
            )
            m_1, l_1, acc_1 = _load_partial(
                sums_ptr, partials_ptr, here, 1, left, step, DIM, DIM_PAD
            )
            m_2, l_2, acc_2 = _load_partial(
                sums_ptr, partials_ptr, here, 2, left, step, DIM, DIM_PAD
            )
            m_3, l_3, acc_3 = _load_partial(
                sums_ptr, partials_ptr, here, 3, left, step, DIM, DIM_PAD
            )
            m, l, acc = merge_partial(m, l, acc, m_0, l_0, acc_0)  # noqa: E741
            m, l, acc = merge_partial(m, l, acc, m_1, l_1, acc_1)  # noqa: E741
            m, l, acc = merge_partial(m, l, acc, m_2, l_2, acc_2)  # noqa: E741
            m, l, acc = merge_partial(m, l, acc, m_3, l_3, acc_3)  # noqa: E741
        num_heads = tl.num_programs(1) * GROUP
        store_output(out_ptr, l, acc, r, token, length, kv_head, num_heads, GROUP, DIM, DIM_PAD)


@triton.jit
def _store_partial(
    sums_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    at: tl.tensor,
    used: tl.tensor,
    m: tl.tensor,
    l: tl.tensor,  # noqa: E741
    acc: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """Keep rows `at` [M], those that are `used`."""
    d = tl.arange(0, DIM_PAD)
    tl.store(sums_ptr + at * 2, m, mask=used)
    tl.store(sums_ptr + at * 2 + 1, l, mask=used)
    tl.store(
        partials_ptr + at[:, None] * DIM + d[None, :], acc, mask=used[:, None] & (d < DIM)[None, :]
    )


@triton.jit
def _load_partial(
    sums_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    at: tl.tensor,
    ordinal: tl.constexpr,
    count: tl.tensor,
    step: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> tl.tensor:
    """m, l and acc of partial `ordinal`; from `count` on, those of a split that no row sees.

    Loads are not predicated but repeat the last partial, so that all can start at once.
    """
    here = at + tl.minimum(count - 1, ordinal) * step
    d = tl.arange(0, DIM_PAD)
    m = tl.load(sums_ptr + here * 2)
    l = tl.load(sums_ptr + here * 2 + 1)  # noqa: E741
    if DIM == DIM_PAD:
        acc = tl.load(partials_ptr + here[:, None] * DIM + d[None, :])
    else:
        acc = tl.load(
            partials_ptr + here[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0
        )
    return tl.where(ordinal < count, m, float("-inf")), l, acc
