"""RMS normalisation on the GPU, alone and fused with the sums that come before it.

One kernel serves every form, so that a fused form has the bits of the separate ones: sum the
ranks' parts, add a bias, add the residual, normalise; each step rounds where the separate op
would. A row is reduced by one program with a layout that follows from its width alone; short rows
share a program, each with its own lanes.
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

MAX_WIDTH = 16384
_SHARED_PROGRAM = 1024
"""Elements of a program whose rows are short."""
_SHORT = 256
"""Rows up to this width share a program."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * cast(x32 * rsqrt(mean(x32^2) + eps)), statistics in fp32.

    x [..., width], contiguous, width up to MAX_WIDTH; weight [width], or [heads, width] against
    x [..., heads, width], of the dtype of `x` or fp32. The normalised value is rounded to the dtype
    of the weight before the product, the product to that of `x`.
    """
    normed = torch.empty_like(x)
    _launch(x, None, None, weight, eps, normed, normed)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm of the sum, the sum x + residual rounded to the dtype of `x`).

    residual has the shape and dtype of `x` and is contiguous; the rest as in `rms_norm`, whose
    bits the first result has.
    """
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, None, residual, weight, eps, normed, total)
    return normed, total


def ordered_sum_add_rms_norm(
    parts: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `ordered_sum(parts)` (+ bias), with the bits of the separate ops.

    parts [ranks, tokens, width] of one dtype with the rest, contiguous; bias [width] or None, its
    sum rounded before the residual [tokens, width] is added; weight [width] as in `rms_norm`.
    """
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(parts, bias, residual, weight, eps, normed, total)
    return normed, total


@functools.cache
def shape_of_program(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's block, and its warps: the order of a row's sum."""
    block = power_of_two(max(width, 16))
    if block <= _SHORT:
        return _SHARED_PROGRAM // block, block, 4
    return 1, block, min(16, block // 256)


def _launch(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    total: Tensor,
) -> None:
    """`parts` of more than one rank have a leading dimension."""
    width, size, dtype = weight.shape[-1], normed.numel(), parts.dtype
    assert width <= MAX_WIDTH, width
    assert normed.shape[-1] == width, (normed.shape, weight.shape)
    assert weight.dtype in (dtype, torch.float32), (weight.dtype, dtype)
    assert parts.is_contiguous()
    assert weight.is_contiguous()
    others = [other for other in (bias, residual) if other is not None]
    for other in others:
        assert other.dtype == dtype
        assert other.is_contiguous()
    num_rows = size // width
    rows, kernel = _norm_of(
        width,
        weight.numel() // width,
        parts.numel() // size if size else 1,
        bias is not None,
        residual is not None,
        row_alignment(width, parts, weight, *others),  # What is fresh is aligned.
        parts.device,
    )
    kernel.launch(
        (blocks_of(num_rows, rows),),
        parts,
        weight if bias is None else bias,
        parts if residual is None else residual,
        weight,
        normed,
        total,
        num_rows,
        eps,
    )


@functools.cache
def _norm_of(
    width: int,
    heads: int,
    ranks: int,
    has_bias: bool,
    has_residual: bool,
    align: int,
    device: torch.device,
) -> tuple[int, Any]:
    """Rows of a program, and what launches it."""
    rows, block, num_warps = shape_of_program(width)
    return rows, bound(
        _norm_kernel,
        WIDTH=width,
        HEADS=heads,
        RANKS=ranks,
        HAS_BIAS=has_bias,
        HAS_RESIDUAL=has_residual,
        ALIGN=align,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **overlap_options(device),
    )


@launchable
@triton.jit(
    do_not_specialize=[
        "parts_ptr",
        "bias_ptr",
        "residual_ptr",
        "weight_ptr",
        "normed_ptr",
        "total_ptr",
        "num_rows",
    ]
)
def _norm_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    dtype = normed_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)
    start = rows * WIDTH
    # Always 0, which the compiler does not know: without an addition the hint of `load_rows`
    # would have nothing to hold to.
    zero = tl.zeros((ROWS,), tl.int32) + tl.program_id(1)
    x = load_rows(parts_ptr, start, columns, inside, ALIGN)
    for rank in tl.static_range(1, RANKS):
        offset = rank * (num_rows.to(tl.int64) * WIDTH)
        x += load_rows(parts_ptr, start + offset, columns, inside, ALIGN)
    x = x.to(dtype).to(tl.float32)
    if HAS_BIAS:
        bias = load_rows(bias_ptr, zero * WIDTH, columns, inside, ALIGN)
        x = (x + bias).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        x += load_rows(residual_ptr, start, columns, inside, ALIGN)
        x = x.to(dtype).to(tl.float32)
        tl.store(tl.multiple_of(total_ptr + start, ALIGN)[:, None] + columns, x, mask=inside)
    normed = normalised(x, eps, WIDTH, weight_ptr.dtype.element_ty)
    y = normed * load_rows(weight_ptr, (rows % HEADS + zero) * WIDTH, columns, inside, ALIGN)
    tl.store(tl.multiple_of(normed_ptr + start, ALIGN)[:, None] + columns, y, mask=inside)


@triton.jit
def normalised(x: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Rows of x [rows, block] fp32, 0 beyond WIDTH, over their root mean square, as DTYPE has it.

    [rows, block] fp32: what is still to be multiplied by the weight, whose dtype DTYPE is.
    """
    mean = tl.sum(x * x, axis=1, keep_dims=True) / WIDTH
    return (x * tl.rsqrt(mean + eps)).to(DTYPE).to(tl.float32)


@triton.jit
def load_rows(
    ptr: tl.tensor, start: tl.tensor, columns: tl.tensor, inside: tl.tensor, ALIGN: tl.constexpr
) -> tl.tensor:
    """Rows that begin `start` [rows] elements after `ptr`, in fp32, [rows, block]."""
    # The hint holds to the result of the sum; on an argument it would be lost.
    row_ptr = tl.multiple_of(ptr + start, ALIGN)
    return tl.load(row_ptr[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
