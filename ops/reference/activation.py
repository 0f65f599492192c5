"""Gated activation."""

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """y = silu(gate) * up with x = [gate | up], x [tokens, 2 * width] -> y [tokens, width].

    silu(a) = a / (1 + exp(-a)) in fp32, rounded once to the dtype of `x` before the product.
    Written with exp: torch's own CPU silu rounds differently in the tail of a vector, so a
    row's bits would depend on where it lies.
    """
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / torch.exp(-wide).add_(1.0)).to(x.dtype) * up
