"""Paged attention by torch's flash attention: the keys of each row gathered, then one call a row.

Its kernels add up in another order for one query than for many, so a decoded token's bits are not
a prompt's: for comparison, and for `--numerics fast` only. No window; head_dim to MAX_HEAD_DIM.
Reference: `ops/reference/attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from unisono.ops.attention import PAGE, AttentionShape

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class FlashRow:
    """Queries of one request: the last `count` of its `num_keys` positions."""

    count: int
    num_keys: int
    blocks: Tensor  # [pages] of the keys, in order


def plan_attention(
    shape: AttentionShape,
    starts: Sequence[int],
    counts: Sequence[int],
    block_table: Tensor,
    window: int = 0,
) -> tuple[FlashRow, ...]:
    """Lay out the rows of a step: row i has queries at positions [starts[i], starts[i]+counts[i]).

    block_table [rows, blocks] int64 on the device of the cache. The keys of the step itself are
    already in the cache. `window` must be 0 and the heads at most MAX_HEAD_DIM wide: the launcher
    has refused other models.
    """
    assert window == 0, f"a window of {window} keys"
    assert shape.head_dim <= MAX_HEAD_DIM, f"heads of {shape.head_dim}"
    return tuple(
        FlashRow(count, start + count, block_table[row, : -(-(start + count) // PAGE)])
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Sequence[FlashRow], scale: float
) -> Tensor:
    """Attention of the step's queries over the paged cache.

    q [T, heads, head_dim]; caches [blocks, kv_heads, PAGE, head_dim] of the dtype of q, which is
    bfloat16 or float16 on a GPU. Returns [T, heads, head_dim]. Raises RuntimeError where torch
    has no flash attention for that.
    """
    out, token = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for row in plan:
            span = slice(token, token + row.count)
            out[span] = _attend(q[span], k_cache, v_cache, row, scale)
            token += row.count
    return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, row: FlashRow, scale: float) -> Tensor:
    """q [count, heads, head_dim] of one row -> the same shape."""
    # This loads torch's compiler, which takes longer than all the rest of torch.
    from torch.nn.attention.bias import causal_lower_right

    k, v = (_gathered(cache, row) for cache in (k_cache, v_cache))
    # One query sees all keys. torch cannot draw this mask for more unless it knows its shape.
    mask = None if row.count == 1 else causal_lower_right(row.count, row.num_keys)
    heads = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return heads[0].transpose(0, 1)


def _gathered(cache: Tensor, row: FlashRow) -> Tensor:
    """[1, kv_heads, num_keys, head_dim]."""
    pages = cache.index_select(0, row.blocks).transpose(0, 1)
    return pages.flatten(1, 2)[None, :, : row.num_keys]
