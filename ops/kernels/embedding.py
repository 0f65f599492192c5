"""Embedding over a shard of the vocabulary, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.kernels.overlap import begin, overlap_options

_BLOCK = 1024


def embed_shard(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of `table` [shard, hidden] for ids in [first_id, first_id + shard), else zeros.

    token_ids [tokens] int64 -> [tokens, hidden]; the sum over ranks is the embedding. For an id
    of another shard nothing is read. Both arguments are contiguous.
    """
    assert token_ids.is_contiguous()
    assert table.is_contiguous()
    shard, width = table.shape
    tokens = token_ids.shape[0]
    rows = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
    grid = (tokens, blocks_of(width, _BLOCK))
    _embed_kernel[grid](
        token_ids,
        table,
        rows,
        first_id,
        shard,
        width,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(table.device),
    )
    return rows


@launchable
@triton.jit
def _embed_kernel(
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    first_id: tl.tensor,
    shard: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    local = tl.load(ids_ptr + token) - first_id
    is_here = (local >= 0) & (local < shard)
    row = tl.load(table_ptr + local * width + columns, mask=inside & is_here, other=0.0)
    tl.store(rows_ptr + token * width + columns, row, mask=inside)
