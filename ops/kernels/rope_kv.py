"""What becomes of the heads of a layer before attention, on the GPU, in one kernel.

A program takes a few heads of one token. A head is reduced by its own lanes with a layout that
follows from the width alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.alignment import row_alignment
from unisono.ops.kernels.launch import blocks_of, bound, launchable, power_of_two
from unisono.ops.kernels.overlap import begin, overlap_options

_PROGRAM = 1024
"""Elements of a program."""


def rope_and_write_kv(
    heads: Tensor,
    num_heads: int,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and rotate q and k, write k and v into the cache, return q [tokens, num_heads, dim].

    heads [tokens, num_heads + 2 * kv_heads, dim]: q, then k, then v; the heads of a token are
    contiguous, tokens may lie further apart. head_norms [num_heads + kv_heads, dim], of the dtype
    of `heads` or fp32, is the weight of the RMS norm of each head of q and k, or None. cos, sin
    [tokens, 1, rotary_dim / 2] fp32, rotary_dim at most dim; channels from rotary_dim on pass
    through. The normalised value rounds to the dtype of head_norms, its product with the weight
    and the rotation to that of `heads`. Caches [blocks, kv_heads, block_size, dim] of that dtype,
    of equal strides and unit stride in the last dimension; slot_mapping [tokens] int64 is
    block * block_size + offset, and a negative slot is not written. The rest is contiguous.
    """
    tokens, all_heads, dim = heads.shape
    _, kv_heads, block_size, _ = k_cache.shape
    assert all_heads == num_heads + 2 * kv_heads, (all_heads, num_heads, kv_heads)
    q = heads.new_empty(tokens, num_heads, dim)
    norms = heads if head_norms is None else head_norms
    align = row_alignment(dim, heads, norms, k_cache, v_cache)  # What is fresh is aligned.
    strides = _checked_strides(heads, norms, k_cache, v_cache, align)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert slot_mapping.is_contiguous()
    has_norm, half = head_norms is not None, cos.shape[-1]
    rows, kernel = _rope_of(
        num_heads, kv_heads, block_size, dim, half, has_norm, align, heads.device
    )
    kernel.launch(
        (tokens, blocks_of(all_heads, rows)),
        heads,
        norms,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        slot_mapping,
        eps,
        *strides,
    )
    return q


@functools.cache
def _rope_of(
    num_heads: int,
    kv_heads: int,
    block_size: int,
    dim: int,
    half: int,
    has_norm: bool,
    align: int,
    device: torch.device,
) -> tuple[int, Any]:
    """Heads of a program, and what launches it."""
    block = power_of_two(max(dim, 16))
    rows = max(1, _PROGRAM // block)
    return rows, bound(
        _rope_kernel,
        NUM_HEADS=num_heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        DIM=dim,
        HALF=half,
        HAS_NORM=has_norm,
        ALIGN=align,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(device),
    )


def _checked_strides(
    heads: Tensor, norms: Tensor, k_cache: Tensor, v_cache: Tensor, align: int
) -> tuple[int, int, int, int]:
    """Elements from token to token, and in a cache from block to block, head to head, and slot to
    slot."""
    dtype, size, (tokens, _, dim) = heads.dtype, heads.element_size(), heads.shape
    of_token, of_head, of_channel = heads.stride()
    block, head, slot, channel = strides = k_cache.stride()
    assert v_cache.stride() == strides
    assert channel == 1
    assert (block | head | slot) * size % align == 0
    assert dtype == k_cache.dtype == v_cache.dtype
    assert norms.dtype in (dtype, torch.float32)
    assert (of_head, of_channel) == (dim, 1), "the heads of a token must be contiguous"
    assert tokens < 2 or of_token * size % align == 0
    assert norms is heads or norms.is_contiguous()
    return of_token, block, head, slot


@launchable
@triton.jit(
    do_not_specialize=[
        "heads_ptr",
        "norms_ptr",
        "cos_ptr",
        "sin_ptr",
        "q_ptr",
        "k_cache_ptr",
        "v_cache_ptr",
        "slots_ptr",
        "heads_stride",
        "block_stride",
        "head_stride",
        "token_stride",
    ]
)
def _rope_kernel(
    heads_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    eps: tl.tensor,
    heads_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    TURNING: tl.constexpr = NUM_HEADS + KV_HEADS
    dtype = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    in_row = columns < DIM
    inside = (head < TURNING + KV_HEADS)[:, None] & in_row
    turns = (head < TURNING)[:, None] & (columns < 2 * HALF)
    partner = tl.where(columns < HALF, columns + HALF, columns - HALF)

    start = tl.multiple_of(heads_ptr + token * heads_stride + head * DIM, ALIGN)
    raw = tl.load(start[:, None] + columns, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    # The other channel of each pair; it comes out of the cache of the first load.
    other = tl.load(start[:, None] + partner, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        weight_ptr = tl.multiple_of(norms_ptr + head * DIM, ALIGN)[:, None]
        has_weight = (head < TURNING)[:, None] & in_row
        weight = tl.load(weight_ptr + columns, mask=has_weight, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + partner, mask=turns, other=0.0).to(tl.float32)
        weighed = norms_ptr.dtype.element_ty
        x = ((x * scale).to(weighed).to(tl.float32) * weight).to(dtype).to(tl.float32)
        other = (other * scale).to(weighed).to(tl.float32) * other_weight
        other = other.to(dtype).to(tl.float32)
    angle = token * HALF + tl.where(columns < HALF, columns, columns - HALF)
    in_rotation = columns < 2 * HALF
    cos = tl.load(cos_ptr + angle, mask=in_rotation, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=in_rotation, other=0.0)
    first = x * cos - other * sin
    second = x * cos + other * sin
    turned = tl.where(turns, tl.where(columns < HALF, first, second), x).to(dtype)

    q_start = tl.multiple_of(q_ptr + (token * NUM_HEADS + head) * DIM, ALIGN)
    tl.store(q_start[:, None] + columns, turned, mask=(head < NUM_HEADS)[:, None] & in_row)
    slot = tl.load(slots_ptr + token)
    offset = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
    is_k = (head >= NUM_HEADS) & (head < TURNING) & (slot >= 0)
    is_v = (head >= TURNING) & (head < TURNING + KV_HEADS) & (slot >= 0)
    k_head = (head - NUM_HEADS).to(tl.int64) * head_stride
    v_head = (head - TURNING).to(tl.int64) * head_stride
    k_start = tl.multiple_of(k_cache_ptr + offset + k_head, ALIGN)
    v_start = tl.multiple_of(v_cache_ptr + offset + v_head, ALIGN)
    tl.store(k_start[:, None] + columns, turned, mask=is_k[:, None] & in_row)
    tl.store(v_start[:, None] + columns, raw, mask=is_v[:, None] & in_row)
