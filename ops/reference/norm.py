"""RMS normalisation."""

import torch
from torch import Tensor

# From this many elements on, torch cuts the sum of a lone row over its threads.
_SPLIT_FROM = 32768


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm of the sum, the sum x + residual rounded to the dtype of `x`)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * cast(x32 * rsqrt(mean(x32^2) + eps)), statistics in fp32.

    `x` is [..., width], `weight` broadcasts against it from the right ([width], or
    [heads, width]). The normalised value is rounded to the dtype of `x` before the product, as
    transformers does. One row's bits do not depend on the other rows.
    """
    wide = x.float()
    if x.numel() == x.shape[-1] >= _SPLIT_FROM:
        return rms_norm(torch.stack((x, x)), weight, eps)[0]
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight
