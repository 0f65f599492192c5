"""Where kernels are tested: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16]
    if IS_GPU
    # The interpreter computes `tl.dot` of bfloat16 operands wrongly.
    else [torch.float32, torch.float16]
)


def on_gpu(*values: object) -> pytest.MarkDecorator:
    """Parameters that are too large for the interpreter: their tests carry the mark `gpu`."""
    return pytest.mark.parametrize("case", [pytest.param(v, marks=pytest.mark.gpu) for v in values])


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere: what a kernel does not write shows, and what it should not read spreads."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
