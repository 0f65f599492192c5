"""Gated activations."""

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), x fp32.

    Written with exp: torch's own CPU silu rounds differently in the tail of a vector, so a row's
    bits would depend on where it lies.
    """
    return x / torch.exp(-x).add_(1.0)


def silu_and_mul(x: Tensor) -> Tensor:
    """y = silu(gate) * up with x = [gate | up], x [tokens, 2 * width] -> y [tokens, width].

    silu in fp32, rounded once to the dtype of `x` before the product.
    """
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.float()).to(x.dtype) * up


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """y = x * sigmoid(gate), x [tokens, width], gate [tokens, width] or [tokens, 1].

    In fp32, as x / (1 + exp(-gate)), rounded once to the dtype of `x`.
    """
    return (x.float() / torch.exp(-gate.float()).add_(1.0)).to(x.dtype)
