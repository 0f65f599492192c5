"""Gates on the GPU: what leaves attention times a sigmoid, what leaves a recurrence normed and
times a silu."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.alignment import row_alignment, with_aligned_rows
from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.kernels.norm import MAX_WIDTH, shape_of_program
from unisono.ops.kernels.overlap import begin, overlap_options

_BLOCK = 1024


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """y = x * sigmoid(gate), x [tokens, width], gate [tokens, width] or [tokens, 1].

    In fp32, as x / (1 + exp(-gate)), rounded once to the dtype of `x`. Rows may lie apart.
    """
    tokens, width = x.shape
    assert gate.shape in ((tokens, width), (tokens, 1)), (x.shape, gate.shape)
    assert x.stride(1) == gate.stride(1) == 1 or width == 1
    y = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    _sigmoid_kernel[(tokens, blocks_of(width, _BLOCK))](
        x,
        gate,
        y,
        width,
        x.stride(0),
        gate.stride(0),
        GATE_STEP=int(gate.shape[1] == width),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(x.device),
    )
    return y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = cast(x32 * rsqrt(mean(x32^2) + eps)) * weight * silu(gate), rounded once at the end.

    x, gate [tokens, width] or [tokens, heads, width] of one dtype, to which the normalised value is
    cast, width up to MAX_WIDTH; tokens may lie apart, their heads not. weight [width], contiguous,
    of that dtype or fp32. The products are taken in fp32.
    """
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    assert width <= MAX_WIDTH, width
    assert gate.shape == x.shape, (x.shape, gate.shape)
    assert weight.shape == (width,), (x.shape, weight.shape)
    assert gate.dtype == x.dtype
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    align = row_alignment(width, y, weight)
    x, gate = (with_aligned_rows(t.flatten(1), align) for t in (x, gate))
    num_rows = len(x) * heads
    rows, block, num_warps = shape_of_program(width)
    _gated_norm_kernel[(blocks_of(num_rows, rows),)](
        x,
        gate,
        weight,
        y,
        num_rows,
        x.stride(0),
        gate.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        ALIGN=align,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **overlap_options(x.device),
    )
    return y


@launchable
@triton.jit
def _sigmoid_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    GATE_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + columns * GATE_STEP, mask=inside, other=0.0)
    y = tl.div_rn(x, 1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(y_ptr + token * width + columns, y, mask=inside)


@launchable
@triton.jit(
    do_not_specialize=[
        "x_ptr",
        "gate_ptr",
        "weight_ptr",
        "y_ptr",
        "num_rows",
        "x_stride",
        "gate_stride",
    ]
)
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    in_row = columns < WIDTH
    inside = (rows < num_rows)[:, None] & in_row
    token, head = rows // HEADS, rows % HEADS
    x_rows = tl.multiple_of(x_ptr + token * x_stride + head * WIDTH, ALIGN)
    x = tl.load(x_rows[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    gate_rows = tl.multiple_of(gate_ptr + token * gate_stride + head * WIDTH, ALIGN)
    gate = tl.load(gate_rows[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    # An addition that the hint can hold to, of a zero that the compiler does not know.
    weight_row = tl.multiple_of(weight_ptr + tl.program_id(1) * WIDTH, ALIGN)
    weight = tl.load(weight_row + columns, mask=in_row, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=1, keep_dims=True) / WIDTH
    normed = (x * tl.rsqrt(mean + eps)).to(y_ptr.dtype.element_ty).to(tl.float32)
    y = normed * weight * tl.div_rn(gate, 1.0 + tl.exp(-gate))
    y_rows = tl.multiple_of(y_ptr + rows * WIDTH, ALIGN)
    tl.store(y_rows[:, None] + columns, y, mask=inside)
