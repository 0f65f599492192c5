"""The sum over ranks on the GPU: element = dtype(sum by ascending rank of fp32(part)).

What `Group.all_reduce` computes (see ops/comm.py) from the parts of all ranks in one tensor, as
an all-gather leaves them. `norm.ordered_sum_add_rms_norm` is the same sum with what follows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.kernels.overlap import begin, overlap_options

_BLOCK = 1024


def ordered_sum(parts: Tensor) -> Tensor:
    """Sum `parts` [ranks, ...] over the ranks in ascending order, in fp32, rounded once.

    parts is contiguous, of any float dtype up to fp32; the result has its dtype.
    """
    assert parts.is_contiguous()
    total = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    count = total.numel()
    _sum_kernel[(blocks_of(count, _BLOCK),)](
        parts,
        total,
        count,
        RANKS=parts.shape[0],
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(parts.device),
    )
    return total


@launchable
@triton.jit
def _sum_kernel(
    parts_ptr: tl.tensor,
    total_ptr: tl.tensor,
    count: tl.tensor,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(parts_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        part = tl.load(
            parts_ptr + tl.cast(count, tl.int64) * rank + offsets, mask=inside, other=0.0
        )
        total += part.to(tl.float32)
    tl.store(total_ptr + offsets, total, mask=inside)
