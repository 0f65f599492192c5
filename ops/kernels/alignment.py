"""What kernels may assume of where rows begin, said so that a row's bits cannot depend on it.

Triton compiles a kernel anew for pointers that happen to be aligned, with another layout and so
another order of a row's sum. Kernels that reduce therefore take their pointers unspecialised and
are told an alignment that follows from the width alone.
"""

import torch
from torch import Tensor

_VECTOR_BYTES = 16


def row_alignment(width: int, *tensors: Tensor) -> int:
    """Bytes that divide the address of every row of `width` elements in `tensors`: 16, or one
    element of the first where rows cannot keep to 16. The others have its dtype or a wider one.
    """
    size = tensors[0].element_size()
    if width * size % _VECTOR_BYTES:
        return size
    for tensor in tensors:
        assert tensor.data_ptr() % _VECTOR_BYTES == 0, "rows must begin on 16 bytes"
    return _VECTOR_BYTES


def with_aligned_rows(x: Tensor, align: int) -> Tensor:
    """Return x [rows, width], or a copy of it where rows do not begin on `align` bytes."""
    stride = x.stride(0) if len(x) > 1 else 0
    if x.data_ptr() % align or stride * x.element_size() % align or x.stride(1) != 1:
        return x.clone(memory_format=torch.contiguous_format)
    return x
