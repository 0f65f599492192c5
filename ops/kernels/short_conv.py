"""The short causal convolution on the GPU: one program per (tile of a row, block of channels).

All of it is elementwise along channels and tokens, so a token's bits do not depend on its tile.
The first tile of a row moves the row's past on: no other reads it, for a tile is longer than any
past. It ends with the tokens that are pending. Reference: `ops/reference/short_conv.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.delta import CHUNK, PendingTokens
from unisono.ops.kernels.delta_plan import DeltaPlan
from unisono.ops.kernels.launch import blocks_of, launchable, power_of_two
from unisono.ops.kernels.overlap import begin, overlap_options

_BLOCK_C = 256
_MOST_T = 8
"""Tokens at a time."""


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv: Tensor,
    plan: DeltaPlan,
    pending: PendingTokens | None = None,
) -> Tensor:
    """Convolve the step's tokens, and move the past of their rows on.

    x [T, channels], rows may lie apart; weight [channels, W] contiguous, W up to CHUNK; conv
    [states, W - 1, channels], each state contiguous; x and conv of one dtype, as the inputs of
    `pending`, which are contiguous. Returns [T, channels] of it. What conv has for a row that
    begins at position 0 is not read. The sum in fp32 from the oldest input on, silu in fp32,
    rounded once. `pending` may be None where nothing is and no row holds back.
    """
    tokens, channels = x.shape
    taps = weight.shape[1]
    assert weight.shape[0] == channels, (x.shape, weight.shape)
    assert conv.shape[1:] == (taps - 1, channels), (x.shape, weight.shape, conv.shape)
    assert taps <= CHUNK
    assert x.dtype == conv.dtype
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert conv[0].is_contiguous()
    kept = x if pending is None else pending.inputs
    assert kept.dtype == x.dtype
    assert pending is None or kept.is_contiguous()
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    num_tiles = plan.tiles.shape[1]
    _conv_kernel[(num_tiles, blocks_of(channels, _BLOCK_C))](
        x,
        weight,
        conv,
        kept,
        out,
        plan.records,
        plan.states,
        plan.tiles,
        plan.records.shape[1],
        num_tiles,
        channels,
        x.stride(0),
        conv.stride(0),
        TAPS=taps,
        ROOM=plan.room(pending),
        TILE=CHUNK,
        PAST=power_of_two(max(taps - 1, 1)),
        BLOCK_T=min(_MOST_T, power_of_two(max(plan.longest, 1))),
        BLOCK_C=_BLOCK_C,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(x.device),
    )
    return out


@launchable
@triton.jit(
    do_not_specialize=["records_ptr", "states_ptr", "tiles_ptr", "num_rows", "num_tiles"],
)
def _conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    out_ptr: tl.tensor,
    records_ptr: tl.tensor,
    states_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    TAPS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    tile = tl.program_id(0)
    row = tl.load(tiles_ptr + tile)
    offset = tl.load(tiles_ptr + num_tiles + tile)
    save = tl.load(tiles_ptr + 2 * num_tiles + tile)
    first = tl.load(records_ptr + row).to(tl.int64)
    has_past = tl.load(records_ptr + num_rows + row) > 0
    count = tl.load(records_ptr + 2 * num_rows + row)
    num_pending = tl.minimum(tl.load(records_ptr + 4 * num_rows + row), ROOM)
    num_pending = tl.where(has_past, num_pending, 0)
    holds = (tl.load(records_ptr + 5 * num_rows + row) > 0) & (ROOM > 0)
    state = tl.load(states_ptr + row).to(tl.int64)
    length = tl.minimum(count - offset, TILE)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x_ptr += first * x_stride
    past_ptr = conv_ptr + state * state_stride
    kept_ptr += state * (ROOM * channels)
    for start in range(0, length, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        is_token = t < length
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for j in tl.static_range(TAPS):
            at = offset + t - (TAPS - 1) + j
            u = _load_inputs(
                x_ptr,
                past_ptr,
                kept_ptr,
                at,
                is_token,
                has_past,
                num_pending,
                c,
                channels,
                x_stride,
                TAPS - 1,
                ROOM,
            )
            tap = tl.load(weight_ptr + c * TAPS + j, mask=c < channels, other=0.0).to(tl.float32)
            total += u.to(tl.float32) * tap[None, :]
        y = tl.div_rn(total, 1.0 + tl.exp(-total))
        out_rows = (first + offset + t) * channels
        inside = is_token[:, None] & (c < channels)[None, :]
        tl.store(out_ptr + out_rows[:, None] + c[None, :], y, mask=inside)
    i = tl.arange(0, PAST)
    is_past = i < TAPS - 1
    inside = is_past[:, None] & (c < channels)[None, :]
    where = (i * channels)[:, None] + c[None, :]
    if (offset == 0) & (length > 0):
        at = tl.where(holds, 0, count) - (TAPS - 1) + i
        last = _load_inputs(
            x_ptr,
            past_ptr,
            kept_ptr,
            at,
            is_past,
            has_past,
            num_pending,
            c,
            channels,
            x_stride,
            TAPS - 1,
            ROOM,
        )
        # Other threads may still have to read what is overwritten.
        tl.debug_barrier()
        tl.store(past_ptr + where, last, mask=inside)
        if holds:
            for start in range(0, tl.minimum(count, ROOM), BLOCK_T):
                t = start + tl.arange(0, BLOCK_T)
                is_kept = (t < tl.minimum(count, ROOM))[:, None] & (c < channels)[None, :]
                x_rows = t.to(tl.int64) * x_stride
                u = tl.load(x_ptr + x_rows[:, None] + c[None, :], mask=is_kept, other=0.0)
                tl.store(kept_ptr + (t * channels)[:, None] + c[None, :], u, mask=is_kept)
    if save >= 0:
        at = offset + length - (TAPS - 1) + i
        last = _load_inputs(
            x_ptr,
            past_ptr,
            kept_ptr,
            at,
            is_past & (at >= 0),
            has_past,
            num_pending,
            c,
            channels,
            x_stride,
            TAPS - 1,
            ROOM,
        )
        tl.store(conv_ptr + save.to(tl.int64) * state_stride + where, last, mask=inside)


@triton.jit
def _load_inputs(
    x_ptr: tl.tensor,
    past_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    at: tl.tensor,
    wanted: tl.tensor,
    has_past: tl.tensor,
    num_pending: tl.tensor,
    c: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    NUM_PAST: tl.constexpr,
    ROOM: tl.constexpr,
) -> tl.tensor:
    """Inputs `at` [rows] of a row, counted from its first token; those before it, from the past,
    whose last ones are those that are pending."""
    inside = wanted[:, None] & (c < channels)[None, :]
    is_past = (at < 0)[:, None]
    x_rows = at.to(tl.int64) * x_stride
    now = tl.load(x_ptr + x_rows[:, None] + c[None, :], mask=inside & (at >= 0)[:, None], other=0.0)
    inside = inside & is_past & has_past
    place = at + num_pending
    past_rows = (place + NUM_PAST) * channels
    is_older = (place < 0)[:, None]
    past = tl.load(past_ptr + past_rows[:, None] + c[None, :], mask=inside & is_older, other=0.0)
    if ROOM > 0:
        kept_rows = kept_ptr + (place * channels)[:, None]
        kept = tl.load(kept_rows + c[None, :], mask=inside & (is_older == 0), other=0.0)
        past = tl.where(is_older, past, kept)
    return tl.where(is_past, past, now)
