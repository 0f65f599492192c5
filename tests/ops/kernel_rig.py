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

MARKS = [pytest.mark.gpu] if IS_GPU else []
"""`pytestmark` of a file of kernel tests: `scripts/test --gpu` runs them compiled."""


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere: what a kernel does not write shows, and what it should not read spreads."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
