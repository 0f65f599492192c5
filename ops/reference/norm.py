"""RMS normalisation."""

import torch
from torch import Tensor

from unisono.ops.reference.activation import silu

# From this many elements on, torch cuts the sum of a lone row over its threads.
_SPLIT_FROM = 32768


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm of the sum, the sum x + residual rounded to the dtype of `x`)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * cast(x32 * rsqrt(mean(x32^2) + eps)), statistics in fp32.

    `x` is [..., width], `weight` broadcasts against it from the right ([width], or
    [heads, width]). The normalised value is rounded to the dtype of `weight` before the product,
    and the product to that of `x`: with weights of the dtype of `x` as transformers does, and in
    fp32 with fp32 weights (a zero-centred norm keeps its 1 + w so). One row's bits do not depend
    on the other rows.
    """
    return (_normalised(x, eps).to(weight.dtype) * weight).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = cast(x32 * rsqrt(mean(x32^2) + eps)) * weight * silu(gate), rounded once at the end.

    x, gate [..., width] of one dtype, to which the normalised value is cast; weight [width] of
    that dtype or fp32. The products are taken in fp32.
    """
    normed = _normalised(x, eps).to(x.dtype).float() * weight.float()
    return (normed * silu(gate.float())).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """x32 * rsqrt(mean(x32^2) + eps), [..., width] fp32."""
    if x.numel() == x.shape[-1] >= _SPLIT_FROM:
        return _normalised(torch.stack((x, x)), eps)[0]
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
