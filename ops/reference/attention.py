"""Causal grouped-query attention, by the formula: one row at a time, fp32."""

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the keys each query may see.

    q [tokens, heads, head_dim] at `positions` [tokens]; k, v [keys, kv_heads, head_dim] of one
    request, key j at position j. Query i sees keys with positions[i] - window < j <= positions[i]
    (window 0: all earlier ones and itself). Query head h uses KV head h // (heads / kv_heads).
    slopes [heads] (ALiBi): slope * (j - positions[i]) is added to the scaled score.
    """
    group = q.shape[1] // k.shape[1]
    wide_k = k.float().repeat_interleave(group, dim=1)
    wide_v = v.float().repeat_interleave(group, dim=1)
    # A copy, since the bits of a library's product may follow where in memory its operand begins.
    wide_q = q.clone().float()
    scores = torch.einsum("thd,khd->htk", wide_q, wide_k) * scale
    key = torch.arange(k.shape[0], device=q.device)
    if slopes is not None:
        distance = (key[None, :] - positions[:, None]).float()
        scores = scores + slopes.float()[:, None, None] * distance
    hidden = key[None, :] > positions[:, None]
    if window:
        hidden |= key[None, :] <= positions[:, None] - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htk,khd->thd", weights, wide_v).to(q.dtype)
