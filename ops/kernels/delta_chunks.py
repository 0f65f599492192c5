"""The gated delta rule in its chunked form, in two kernels.

What needs no state is made for all chunks at once: `system_kernel`, one program per (chunk, value
head). Then `scan_kernel`, one program per (row, value head, block of values), walks a row's chunks
with its part of the state in registers. A chunk is computed alike whatever chunks come before or
beside it, and a short one like a full one whose absent tokens are zeros. Formulas and letters:
`run_chunk` of `ops/delta.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.ops.kernels.delta_steps import NORM_EPS, load_gates
from unisono.ops.kernels.launch import launchable

TILE = tl.constexpr(64)
"""Tokens of a chunk."""
VECTORS = tl.constexpr(4)
"""By token: factor of q, factor of k, G, beta."""
_VARYING = [
    "mixed_ptr",
    "b_ptr",
    "a_ptr",
    "decay_ptr",
    "bias_ptr",
    "state_ptr",
    "out_ptr",
    "records_ptr",
    "states_ptr",
    "tiles_ptr",
    "rows_ptr",
    "num_rows",
    "num_tiles",
    "num_chunk_rows",
    "b_stride",
    "a_stride",
]


@launchable
@triton.jit(do_not_specialize=_VARYING)
def system_kernel(
    mixed_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    vectors_ptr: tl.tensor,
    records_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    b_stride: tl.tensor,
    a_stride: tl.tensor,
    scale: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """(I + A)^-1, the scores (q_i . k_j) exp(G_i - G_j), and vectors by token, of a chunk.

    inverse, scores [chunks, heads, TILE, TILE], vectors [chunks, heads, VECTORS, TILE]; fp32.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    tile = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.load(tiles_ptr + tile)
    offset = tl.load(tiles_ptr + num_tiles + tile)
    length = tl.minimum(tl.load(records_ptr + 3 * num_rows + row) - offset, TILE)
    r = tl.arange(0, TILE)
    is_token = r < length
    token = tl.load(records_ptr + row).to(tl.int64) + offset + r
    q_at = token * CHANNELS + key_head * KEY
    q = load_rows(mixed_ptr, q_at, is_token, KEY, KEY_PAD, ALIGN)
    k = load_rows(mixed_ptr, q_at + KEY_HEADS * KEY, is_token, KEY, KEY_PAD, ALIGN)
    q_factor = tl.where(is_token, tl.rsqrt(_squares(q) + NORM_EPS) * scale, 0.0)
    k_factor = tl.where(is_token, tl.rsqrt(_squares(k) + NORM_EPS), 0.0)
    g, beta = load_gates(
        b_ptr + token * b_stride + head,
        a_ptr + token * a_stride + head,
        decay_ptr + head,
        bias_ptr + head,
        is_token,
    )
    total = tl.cumsum(g, 0)
    of_chunk = tile.to(tl.int64) * HEADS + head
    vector = vectors_ptr + of_chunk * (VECTORS * TILE) + r
    tl.store(vector, q_factor)
    tl.store(vector + TILE, k_factor)
    tl.store(vector + 2 * TILE, total)
    tl.store(vector + 3 * TILE, beta)

    i = r[:, None]
    j = r[None, :]
    fading = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))
    # Of what was loaded, whose products a tensor core takes exactly; the factors come after.
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_factor[:, None]
    scores = scores * (k_factor[None, :] * fading)
    at = of_chunk * (TILE * TILE) + i * TILE + j
    tl.store(scores_ptr + at, scores)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (k_factor * beta)[:, None]
    system = system * (k_factor[None, :] * fading)
    tl.store(inverse_ptr + at, tl.where(i > j, system, 0.0))
    # Rows are read back below by threads that did not write them.
    tl.debug_barrier()
    # Forward substitution: row n of the inverse is e_n less what row n of A takes of those above.
    inverse = tl.where(i == j, 1.0, 0.0)
    system_row = inverse_ptr + of_chunk * (TILE * TILE) + r
    for n in range(1, length):
        taken = tl.load(system_row + n * TILE)
        inverse -= tl.where(i == n, tl.sum(taken[:, None] * inverse, 0)[None, :], 0.0)
    tl.debug_barrier()
    tl.store(inverse_ptr + at, inverse)


@launchable
@triton.jit(do_not_specialize=_VARYING)
def scan_kernel(
    mixed_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    vectors_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    records_ptr: tl.tensor,
    states_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    num_chunk_rows: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
    STATE_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Outputs and states of a row's prompt, out of what `system_kernel` made of its chunks."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    index = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.load(rows_ptr + index)
    first_tile = tl.load(rows_ptr + num_chunk_rows + index)
    first = tl.load(records_ptr + row).to(tl.int64)
    has_past = tl.load(records_ptr + num_rows + row) > 0
    chunked = tl.load(records_ptr + 3 * num_rows + row)
    number = tl.load(states_ptr + row).to(tl.int64)
    r = tl.arange(0, TILE)
    k_i = tl.arange(0, KEY_PAD)
    v_i = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (v_i < VALUE)[:, None] & (k_i < KEY)[None, :]
    in_state = tl.multiple_of(state_ptr + head * (VALUE * KEY) + v_i * KEY, STATE_ALIGN)
    of_head = in_state[:, None] + k_i[None, :]
    own = of_head + number * (HEADS * VALUE * KEY)
    state = tl.load(own, mask=inside & has_past, other=0.0).to(tl.float32)
    square = (r * TILE)[:, None] + r[None, :]
    # Tokens are columns here, so that the state is the left operand as it lies.
    for offset in range(0, chunked, TILE):
        tile = first_tile + offset // TILE
        of_chunk = tile.to(tl.int64) * HEADS + head
        vector = vectors_ptr + of_chunk * (VECTORS * TILE) + r
        k_factor = tl.load(vector + TILE)
        total = tl.load(vector + 2 * TILE)
        fade = tl.exp(total)
        is_token = r < chunked - offset
        token = first + offset + r
        q_at = token * CHANNELS + key_head * KEY
        k_at = q_at + KEY_HEADS * KEY
        v_at = token * CHANNELS + 2 * KEY_HEADS * KEY + head * VALUE
        v_inside = is_token[:, None] & (v_i < VALUE)[None, :]
        v_rows = tl.multiple_of(mixed_ptr + v_at, ALIGN)[:, None] + v_i[None, :]
        v = tl.trans(tl.load(v_rows, mask=v_inside, other=0.0).to(tl.float32))
        k = load_rows(mixed_ptr, k_at, is_token, KEY, KEY_PAD, ALIGN).to(tl.float32)
        seen = tl.dot(state, tl.trans(k), input_precision=PRECISION) * (k_factor * fade)[None, :]
        right = (v - seen) * tl.load(vector + 3 * TILE)[None, :]
        inverse = tl.load(inverse_ptr + of_chunk * (TILE * TILE) + square)
        u = tl.dot(right, tl.trans(inverse), input_precision=PRECISION)
        q = load_rows(mixed_ptr, q_at, is_token, KEY, KEY_PAD, ALIGN).to(tl.float32)
        o = tl.dot(state, tl.trans(q), input_precision=PRECISION)
        o = o * (tl.load(vector) * fade)[None, :]
        scores = tl.load(scores_ptr + of_chunk * (TILE * TILE) + square)
        o = tl.dot(u, tl.trans(scores), o, input_precision=PRECISION)
        out_rows = out_ptr + (token * HEADS + head) * VALUE
        tl.store(out_rows[:, None] + v_i[None, :], tl.trans(o), mask=v_inside)
        # Absent tokens have g = 0, so that the last sum is that of the last token.
        last = tl.sum(tl.where(r == TILE - 1, total, 0.0), 0)
        u = u * (k_factor * tl.exp(last - total))[None, :]
        # Loaded once more: registers are few, and it lies in the cache.
        k = load_rows(mixed_ptr, k_at, is_token, KEY, KEY_PAD, ALIGN).to(tl.float32)
        state = tl.dot(u, k, state * tl.exp(last), input_precision=PRECISION)
        state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
        save = tl.load(tiles_ptr + 2 * num_tiles + tile)
        if save >= 0:
            tl.store(of_head + save.to(tl.int64) * (HEADS * VALUE * KEY), state, mask=inside)
    tl.store(own, state, mask=inside)


@triton.jit
def load_rows(
    ptr: tl.tensor,
    at: tl.tensor,
    is_row: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    """[rows, WIDTH_PAD] as they lie, from those that begin `at` [rows] elements after `ptr`."""
    i = tl.arange(0, WIDTH_PAD)
    inside = is_row[:, None] & (i < WIDTH)[None, :]
    # The hint holds to the result of the sum; on an argument it would be lost.
    rows = tl.multiple_of(ptr + at, ALIGN)
    return tl.load(rows[:, None] + i[None, :], mask=inside, other=0.0)


@triton.jit
def _squares(x: tl.tensor) -> tl.tensor:
    """The sum of squares of each row, in fp32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)
