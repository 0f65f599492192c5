"""Gated activation on the GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, bound, launchable
from unisono.ops.kernels.overlap import begin, overlap_options

_BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """y = silu(gate) * up with x = [gate | up], x [tokens, 2 * width] -> y [tokens, width].

    silu(a) = a / (1 + exp(-a)) in fp32, rounded once to the dtype of `x` before the product.
    x is contiguous.
    """
    assert x.is_contiguous()
    tokens, both = x.shape
    width = both // 2
    y = x.new_empty(tokens, width)
    _silu_on(x.device).launch((tokens, blocks_of(width, _BLOCK)), x, y, width)
    return y


@functools.cache
def _silu_on(device: torch.device) -> Any:
    options = overlap_options(device)
    return bound(_silu_kernel, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False, **options)


@launchable
@triton.jit
def _silu_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptr = x_ptr + token * 2 * width + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + token * width + columns, silu * up, mask=inside)
