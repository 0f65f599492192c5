"""The gated delta rule token by token: one program per (row, value head, block of values).

A program reads its part of the state once, takes the row's tokens into it in registers, and writes
it once. How a row of it is summed follows from the channels of a key alone. Reference:
`ops/reference/delta_rule.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

NORM_EPS = tl.constexpr(1e-6)


@triton.jit(
    do_not_specialize=[
        "mixed_ptr",
        "b_ptr",
        "a_ptr",
        "decay_ptr",
        "bias_ptr",
        "state_ptr",
        "out_ptr",
        "records_ptr",
        "states_ptr",
        "rows_ptr",
        "num_rows",
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
    records_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_rows: tl.tensor,
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
) -> None:
    """Grid (rows with such tokens, value heads, blocks of values)."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    row = tl.load(rows_ptr + tl.program_id(0))
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
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
            state = state * tl.exp(g)
            correction = (v - tl.sum(state * k[None, :], 1)) * beta
            state += correction[:, None] * k[None, :]
            o = tl.sum(state * q[None, :], 1)
            tl.store(out_ptr + (token * HEADS + head) * VALUE + v_i, o, mask=v_i < VALUE)
            state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
        tl.store(state_rows, state, mask=inside)


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
