"""The one definition of paged attention on a GPU, which decode and prefill kernels share.

Per query row: online softmax inside absolute splits of SPLIT_TILES tiles, each of TILE keys (one
cache block); probabilities are rounded to the cache's dtype before p v and before the row sum,
which is a tensor-core product with ones; at a split's end (m, l, acc) is merged into the running
total by `merge_partial`, left to right, starting from the empty total. Exponents are base 2.

Every a * b + c that rounds is spelled `tl.fma`, so that no compilation contracts it another way;
what a row cannot see adds exact zeros to it. So a row's bits depend neither on the tile's height,
nor on the warps, nor on where a prompt was cut.

Shape letters: M rows of a tile (tokens x query heads of one KV head), N = TILE keys, D channels
padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)
"""Keys of a tile: the KV block."""
SPLIT_TILES = tl.constexpr(4)
"""Tiles of a split. More make fewer partials; the fewer, the sooner a short request is through."""
SUMS = tl.constexpr(16)
"""Columns of ones: the narrowest operand of a product. All columns of a row sum are equal."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_record(
    records_ptr: tl.tensor,
    num_records: tl.tensor,
    index: tl.tensor,
    tiles_per_record: tl.tensor,
    per_tile: tl.tensor,
) -> tl.tensor:
    """Tile `index`: its block-table row, first token, first position, tokens, first partial.

    Tile j of a record holds its tokens [j * per_tile, (j + 1) * per_tile). The tokens may be none
    or negative; the first partial is the record's own.
    """
    record = index // tiles_per_record
    skipped = (index % tiles_per_record) * per_tile
    row = tl.load(records_ptr + record)
    token = tl.load(records_ptr + num_records + record) + skipped
    position = tl.load(records_ptr + 2 * num_records + record) + skipped
    length = tl.load(records_ptr + 3 * num_records + record) - skipped
    partial = tl.load(records_ptr + 4 * num_records + record)
    return row, token, position, tl.minimum(length, per_tile), partial


@triton.jit
def first_visible(position: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """First key that the query at `position` sees."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    return position * 0


@triton.jit
def load_query(
    q_ptr: tl.tensor,
    stride_token: tl.tensor,
    token: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> tl.tensor:
    """Queries [M, D] of a tile: row r is token r // GROUP, head r % GROUP of the KV head."""
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + r % GROUP
    at = (token + r // GROUP).to(tl.int64) * stride_token + head * DIM
    used = (r < length * GROUP)[:, None] & (d < DIM)[None, :]
    return tl.load(q_ptr + at[:, None] + d[None, :], mask=used, other=0.0)


@triton.jit
def load_slopes(
    slopes_ptr: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIBI: tl.constexpr,
) -> tl.tensor:
    """ALiBi slopes [M] in base-2 units, or zeros that nobody reads."""
    if ALIBI:
        slope = tl.load(slopes_ptr + kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP)
        return slope.to(tl.float32) * LOG2_E
    return tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def load_blocks(table_ptr: tl.tensor, split: tl.tensor, end_tile: tl.tensor) -> tl.tensor:
    """Cache blocks [SPLIT_TILES] of a split's tiles; those from `end_tile` on are not read.

    Held in registers: a load whose address waits for another load stalls the pipeline.
    """
    tile = split * SPLIT_TILES + tl.arange(0, SPLIT_TILES)
    return tl.load(table_ptr + tile, mask=tile < end_tile, other=0)


@triton.jit
def attend_tiles(
    m: tl.tensor,
    l: tl.tensor,  # noqa: E741
    acc: tl.tensor,
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    block_stride: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    positions: tl.tensor,
    slopes: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Take tiles [start, stop) of one split into its m [M], l [M, SUMS] and acc [M, D].

    k_ptr, v_ptr: block 0 of the KV head. `scale` includes log2(e). MASKED: rows may miss keys of
    these tiles, and keys outside [low, high) are seen by no row and may be NaN.
    """
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    inside = n[:, None] * DIM + d[None, :]
    ones = tl.full([TILE, SUMS], 1.0, q.dtype)
    for tile in tl.range(start, stop, num_stages=STAGES):
        ordinal = tl.arange(0, SPLIT_TILES)
        block = tl.sum(tl.where((tile - ordinal) % SPLIT_TILES == 0, blocks, 0), 0)
        base = block.to(tl.int64) * block_stride
        key = tile * TILE + n
        if MASKED:
            real = ((key >= low) & (key < high))[:, None] & (d < DIM)[None, :]
            k = tl.load(k_ptr + base + inside, mask=real, other=0.0)
            v = tl.load(v_ptr + base + inside, mask=real, other=0.0)
        elif DIM == DIM_PAD:
            k = tl.load(k_ptr + base + inside)
            v = tl.load(v_ptr + base + inside)
        else:
            k = tl.load(k_ptr + base + inside, mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + base + inside, mask=(d < DIM)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        distance = key[None, :] - positions[:, None]
        if ALIBI:
            s = tl.fma(s, scale, slopes[:, None] * distance.to(tl.float32))
        if MASKED:
            visible = distance <= 0
            if WINDOW:
                visible &= distance > -WINDOW
            s = tl.where(visible, s, float("-inf"))
        # Without slopes the scale is folded into the exponent; products keep the order of scores.
        peak = tl.max(s, 1) if ALIBI else tl.max(s, 1) * scale
        top = tl.maximum(m, peak)
        zero = tl.where(top == float("-inf"), 0.0, top)
        if ALIBI:
            p = tl.exp2(s - zero[:, None])
        else:
            p = tl.exp2(tl.fma(s, scale, -zero[:, None]))
        fade = tl.exp2(m - zero)
        p = p.to(v.dtype)
        l = tl.dot(p, ones, l * fade[:, None], input_precision=PRECISION)  # noqa: E741
        acc = tl.dot(p, v, acc * fade[:, None], input_precision=PRECISION)
        m = top
    return m, l, acc


@triton.jit
def merge_partial(
    total_m: tl.tensor,
    total_l: tl.tensor,
    total_acc: tl.tensor,
    m: tl.tensor,
    l: tl.tensor,  # noqa: E741
    acc: tl.tensor,
) -> tl.tensor:
    """Total of the splits so far and of the next one: m, l [M], acc [M, D], fp32.

    A row that saw no key of a split has m = -inf there, and its total stays as it is.
    """
    top = tl.maximum(total_m, m)
    zero = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(total_m - zero)
    weight = tl.exp2(m - zero)
    total_l = tl.fma(total_l, fade, l * weight)
    total_acc = tl.fma(total_acc, fade[:, None], acc * weight[:, None])
    return top, total_l, total_acc


@triton.jit
def store_output(
    out_ptr: tl.tensor,
    l: tl.tensor,  # noqa: E741
    acc: tl.tensor,
    rows: tl.tensor,
    token: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    num_heads: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> tl.tensor:
    """Write acc / l of the tile's `rows` [M] to out [T, heads, DIM]."""
    d = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + rows % GROUP
    at = ((token + rows // GROUP).to(tl.int64) * num_heads + head) * DIM
    used = (rows < length * GROUP)[:, None] & (d < DIM)[None, :]
    # Rows without a query may have seen no key.
    divisor = tl.where(rows < length * GROUP, l, 1.0)
    value = tl.div_rn(acc, tl.broadcast_to(divisor[:, None], acc.shape))
    tl.store(out_ptr + at[:, None] + d[None, :], value.to(out_ptr.dtype.element_ty), mask=used)
