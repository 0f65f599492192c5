"""The gated delta rule token by token: one program per (row, value head, block of values).

A program reads its part of the state once, takes the row's tokens into it in registers, and writes
it once: behind them, or before them and behind what was pending if the row holds back. How a row of
it is summed follows from the channels of a key alone, and the program is the same whether anything
is pending or not, so that the bits are. Reference: `ops/reference/delta_rule.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.ops.kernels.launch import launchable
from unisono.ops.kernels.overlap import begin

NORM_EPS = tl.constexpr(1e-6)


@launchable
@triton.jit(
    do_not_specialize=[
        "mixed_ptr",
        "b_ptr",
        "a_ptr",
        "decay_ptr",
        "bias_ptr",
        "state_ptr",
        "out_ptr",
        "keys_ptr",
        "updates_ptr",
        "decays_ptr",
        "new_keys_ptr",
        "new_decays_ptr",
        "records_ptr",
        "states_ptr",
        "rows_ptr",
        "num_rows",
        "room",
        "b_stride",
        "a_stride",
    ]
)
def step_kernel(
    mixed_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    updates_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    new_keys_ptr: tl.tensor,
    new_decays_ptr: tl.tensor,
    records_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_rows: tl.tensor,
    room: tl.tensor,
    b_stride: tl.tensor,
    a_stride: tl.tensor,
    scale: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
    STATE_ALIGN: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (rows with such tokens, value heads, blocks of values).

    keys, updates and decays are the `PendingTokens`, `room` of them a state. Of the tokens that are
    held back, updates are written there by the program that read the old ones. Keys and decays are
    read by others too: they go to new_keys [T, key heads, KEY] and new_decays [T, heads].
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    begin(OVERLAPS)
    row = tl.load(rows_ptr + tl.program_id(0))
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    is_first = tl.program_id(2) == 0
    is_first_of_key = is_first & (head % (HEADS // KEY_HEADS) == 0)
    first = tl.load(records_ptr + row).to(tl.int64)
    position = tl.load(records_ptr + num_rows + row)
    count = tl.load(records_ptr + 2 * num_rows + row)
    chunked = tl.load(records_ptr + 3 * num_rows + row)
    if count > chunked:
        k_i = tl.arange(0, KEY_PAD)
        v_i = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (v_i < VALUE)[:, None] & (k_i < KEY)[None, :]
        number = tl.load(states_ptr + row).to(tl.int64)
        at = (number * HEADS + head) * (VALUE * KEY) + v_i * KEY
        state_rows = tl.multiple_of(state_ptr + at, STATE_ALIGN)[:, None] + k_i[None, :]
        has_past = position + chunked > 0
        state = tl.load(state_rows, mask=inside & has_past, other=0.0).to(tl.float32)
        holds = (tl.load(records_ptr + 5 * num_rows + row) > 0) & (room > 0)
        num_pending = tl.minimum(tl.load(records_ptr + 4 * num_rows + row), room)
        num_pending = tl.where(has_past, num_pending, 0)
        for j in range(num_pending):
            place = number * room + j
            key_at = (place * KEY_HEADS + key_head) * KEY
            k = tl.load(keys_ptr + key_at + k_i, mask=k_i < KEY, other=0.0)
            update_at = (place * HEADS + head) * VALUE
            update = tl.load(updates_ptr + update_at + v_i, mask=v_i < VALUE, other=0.0)
            state = state * tl.load(decays_ptr + place * HEADS + head)
            state += update[:, None] * k[None, :]
            state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
        # Other threads may still have to read updates that are overwritten.
        tl.debug_barrier()
        tl.store(state_rows, state, mask=inside & holds)
        for i in range(chunked, count):
            token = first + i
            q_at = token * CHANNELS + key_head * KEY
            v_at = token * CHANNELS + 2 * KEY_HEADS * KEY + head * VALUE
            q = load_head(mixed_ptr, q_at, k_i, KEY, ALIGN)
            k = load_head(mixed_ptr, q_at + KEY_HEADS * KEY, k_i, KEY, ALIGN)
            v = load_head(mixed_ptr, v_at, v_i, VALUE, ALIGN)
            g, beta = load_gates(
                b_ptr + token * b_stride + head,
                a_ptr + token * a_stride + head,
                decay_ptr + head,
                bias_ptr + head,
                True,
            )
            q = q * tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * scale
            k = k * tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
            fade = tl.exp(g)
            state = state * fade
            update = (v - tl.sum(state * k[None, :], 1)) * beta
            state += update[:, None] * k[None, :]
            o = tl.sum(state * q[None, :], 1)
            tl.store(out_ptr + (token * HEADS + head) * VALUE + v_i, o, mask=v_i < VALUE)
            state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
            if holds:
                key_at = (token * KEY_HEADS + key_head) * KEY
                tl.store(new_keys_ptr + key_at + k_i, k, mask=(k_i < KEY) & is_first_of_key)
                tl.store(new_decays_ptr + token * HEADS + head, fade, mask=is_first)
                update_at = ((number * room + i) * HEADS + head) * VALUE
                is_kept = (v_i < VALUE) & (i < room)
                tl.store(updates_ptr + update_at + v_i, update, mask=is_kept)
        tl.store(state_rows, state, mask=inside & (holds == 0))


@launchable
@triton.jit(
    do_not_specialize=[
        "keys_ptr",
        "decays_ptr",
        "new_keys_ptr",
        "new_decays_ptr",
        "records_ptr",
        "states_ptr",
        "rows_ptr",
        "num_rows",
        "room",
    ]
)
def keep_kernel(
    keys_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    new_keys_ptr: tl.tensor,
    new_decays_ptr: tl.tensor,
    records_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_rows: tl.tensor,
    room: tl.tensor,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Put keys and decays that `step_kernel` made where they are kept. Grid (rows, tokens)."""
    begin(OVERLAPS)
    row = tl.load(rows_ptr + tl.program_id(0))
    i = tl.program_id(1)
    count = tl.minimum(tl.load(records_ptr + 2 * num_rows + row), room)
    if (tl.load(records_ptr + 5 * num_rows + row) > 0) & (i < count):
        token = tl.load(records_ptr + row).to(tl.int64) + i
        at = tl.load(states_ptr + row).to(tl.int64) * room + i
        for start in range(0, KEYS, BLOCK):
            k_i = start + tl.arange(0, BLOCK)
            keys = tl.load(new_keys_ptr + token * KEYS + k_i, mask=k_i < KEYS, other=0.0)
            tl.store(keys_ptr + at * KEYS + k_i, keys, mask=k_i < KEYS)
        head = tl.arange(0, HEADS_PAD)
        decays = tl.load(new_decays_ptr + token * HEADS + head, mask=head < HEADS, other=0.0)
        tl.store(decays_ptr + at * HEADS + head, decays, mask=head < HEADS)


@triton.jit
def load_head(
    ptr: tl.tensor, at: tl.tensor, i: tl.tensor, WIDTH: tl.constexpr, ALIGN: tl.constexpr
) -> tl.tensor:
    """Channels `i` of a head that begins `at` elements after `ptr`, in fp32."""
    # The hint holds to the result of the sum; on an argument it would be lost.
    head_ptr = tl.multiple_of(ptr + at, ALIGN)
    return tl.load(head_ptr + i, mask=i < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def load_gates(
    b_ptr: tl.tensor, a_ptr: tl.tensor, decay_ptr: tl.tensor, bias_ptr: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """g = decay * softplus(a + bias) and beta = sigmoid(b), rounded to the dtype of b; fp32.

    decay and bias are of one head. What `mask` leaves out has g = beta = 0.
    """
    b = tl.load(b_ptr, mask=mask, other=0.0)
    beta = tl.div_rn(b.to(tl.float32) * 0 + 1.0, 1.0 + tl.exp(-b.to(tl.float32)))
    x = tl.load(a_ptr, mask=mask, other=0.0).to(tl.float32) + tl.load(bias_ptr)
    # log1p(y): log(1 + y) alone would lose what the sum rounds off.
    y = tl.exp(-tl.abs(x))
    sum_y = 1.0 + y
    lost = sum_y == 1.0
    log1p = tl.where(lost, y, tl.log(sum_y) * tl.div_rn(y, tl.where(lost, 1.0, sum_y - 1.0)))
    g = tl.load(decay_ptr) * (tl.maximum(x, 0.0) + log1p)
    return tl.where(mask, g, 0.0), tl.where(mask, beta.to(b.dtype).to(tl.float32), 0.0)
