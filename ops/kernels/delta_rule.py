"""The gated delta rule on the GPU: which kernel serves which tokens, and how it is launched.

Prompts go to `delta_chunks`, what comes after them to `delta_steps`; a row that has both goes
through both, in that order. Only the latter has pending tokens. No setting below follows from the
number of rows or tokens. Reference: `ops/reference/delta_rule.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unisono.ops.delta import CHUNK, PendingTokens
from unisono.ops.kernels.alignment import row_alignment
from unisono.ops.kernels.delta_chunks import VECTORS, scan_kernel, system_kernel
from unisono.ops.kernels.delta_plan import DeltaPlan
from unisono.ops.kernels.delta_steps import keep_kernel, step_kernel
from unisono.ops.kernels.gaps import output
from unisono.ops.kernels.launch import blocks_of, power_of_two
from unisono.ops.kernels.overlap import overlap_options

PRECISION = "tf32x3"
"""Of the chunked form's products: three of the tensor core for one, as exact as fp32."""
_STEP_VALUES, _STEP_WARPS = 8, 1
"""Values of a program that walks tokens: one warp has 32 numbers of a state a thread, at 128."""
_KEEP_KEYS = 1024
"""Numbers that are copied at once."""
_SCAN_VALUES, _SCAN_WARPS, _SCAN_STAGES = 16, 4, 2
"""Values of a program that walks chunks: with more registers run out."""
_SYSTEM_WARPS = 8


def delta_rule(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    plan: DeltaPlan,
    num_key_heads: int,
    pending: PendingTokens | None = None,
) -> Tensor:
    """The gated delta rule over the step's tokens; formulas in `ops/delta.py`.

    mixed [T, channels]: [q of all key heads | k of all | v of all value heads], contiguous; b, a
    [T, H], rows may lie apart; decay = -exp(A_log) and dt_bias [H] fp32, contiguous; state
    [states, H, V, K] fp32, bf16 or fp16, contiguous, read and written. What it has for a row that
    begins at position 0 is not read. `pending`, contiguous, may be None where nothing is and no row
    holds back. Returns [T, H, V] in the dtype of `mixed`; where the plan has `outputs`, good until
    the next call with it.
    """
    _, heads, value_dim, key_dim = state.shape
    _check(mixed, b, a, decay, dt_bias, state, num_key_heads)
    out = output(plan.outputs, mixed, len(mixed), heads, value_dim)
    common = {
        "KEY_HEADS": num_key_heads,
        "HEADS": heads,
        "KEY": key_dim,
        "VALUE": value_dim,
        "ALIGN": row_alignment(math.gcd(key_dim, value_dim), mixed, out),
        "enable_fp_fusion": False,
    }
    if plan.num_chunks:
        _run_chunks(out, (mixed, b, a, decay, dt_bias), state, plan, common)
    if len(plan.tail_rows):
        _run_steps(out, (mixed, b, a, decay, dt_bias), state, plan, pending, common)
    return out


def _run_steps(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    plan: DeltaPlan,
    pending: PendingTokens | None,
    common: dict[str, Any],
) -> None:
    mixed, b, a, decay, dt_bias = inputs
    _, heads, value_dim, key_dim = state.shape
    num_rows, room = plan.records.shape[1], plan.room(pending)
    # One kernel whether tokens are pending or not: what stands in for them is never touched.
    keys = updates = decays = new_keys = new_decays = decay
    holds = pending is not None and plan.may_hold
    if pending is not None:
        keys, updates, decays = pending.keys, pending.updates, pending.decays
    if holds:
        new_keys, new_decays = (x.new_empty(len(mixed), *x.shape[2:]) for x in (keys, decays))
    for tensor in (keys, updates, decays):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
    values = min(_STEP_VALUES, power_of_two(value_dim))
    step_kernel[(len(plan.tail_rows), heads, blocks_of(value_dim, values))](
        *(mixed, b, a, decay, dt_bias, state, out),
        *(keys, updates, decays, new_keys, new_decays),
        *(plan.records, plan.states, plan.tail_rows, num_rows, room),
        b.stride(0),
        a.stride(0),
        key_dim**-0.5,
        KEY_PAD=power_of_two(key_dim),
        BLOCK_V=values,
        STATE_ALIGN=row_alignment(key_dim, state),
        num_warps=_STEP_WARPS,
        **overlap_options(out.device),
        **common,
    )
    if holds:
        keep_kernel[(len(plan.tail_rows), min(room, plan.longest))](
            *(keys, decays, new_keys, new_decays),
            *(plan.records, plan.states, plan.tail_rows, num_rows, room),
            KEYS=keys.shape[2] * key_dim,
            HEADS=heads,
            BLOCK=_KEEP_KEYS,
            HEADS_PAD=power_of_two(heads),
            num_warps=4,
            **overlap_options(out.device),
        )


def _run_chunks(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    plan: DeltaPlan,
    common: dict[str, Any],
) -> None:
    mixed, b, a, decay, dt_bias = inputs
    _, heads, value_dim, key_dim = state.shape
    num_rows, num_tiles = plan.records.shape[1], plan.tiles.shape[1]
    shape = (plan.num_chunks, heads, CHUNK, CHUNK)
    inverse, scores = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
    vectors = torch.empty(
        (plan.num_chunks, heads, VECTORS.value, CHUNK), dtype=torch.float32, device=out.device
    )
    key_pad = max(16, power_of_two(key_dim))
    system_kernel[(plan.num_chunks, heads)](
        mixed,
        b,
        a,
        decay,
        dt_bias,
        inverse,
        scores,
        vectors,
        plan.records,
        plan.tiles,
        num_rows,
        num_tiles,
        b.stride(0),
        a.stride(0),
        key_dim**-0.5,
        KEY_PAD=key_pad,
        PRECISION=PRECISION,
        num_warps=_SYSTEM_WARPS,
        **common,
    )
    values = max(16, min(_SCAN_VALUES, power_of_two(value_dim)))
    scan_kernel[(plan.chunk_rows.shape[1], heads, blocks_of(value_dim, values))](
        mixed,
        inverse,
        scores,
        vectors,
        state,
        out,
        plan.records,
        plan.states,
        plan.tiles,
        plan.chunk_rows,
        num_rows,
        num_tiles,
        plan.chunk_rows.shape[1],
        KEY_PAD=key_pad,
        BLOCK_V=values,
        STATE_ALIGN=row_alignment(key_dim, state),
        PRECISION=PRECISION,
        num_warps=_SCAN_WARPS,
        num_stages=_SCAN_STAGES,
        **common,
    )


def _check(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    num_key_heads: int,
) -> None:
    _, heads, value_dim, key_dim = state.shape
    channels = 2 * num_key_heads * key_dim + heads * value_dim
    assert heads % num_key_heads == 0, f"{heads} value heads of {num_key_heads} key heads"
    assert mixed.shape == (len(mixed), channels), f"{list(mixed.shape)}, not {channels} channels"
    assert b.shape == a.shape == (len(mixed), heads)
    assert decay.shape == dt_bias.shape == (heads,)
    assert decay.dtype == dt_bias.dtype == torch.float32
    assert b.stride(1) == a.stride(1) == 1 or heads == 1
    for tensor in (mixed, decay, dt_bias, state):
        assert tensor.is_contiguous()
