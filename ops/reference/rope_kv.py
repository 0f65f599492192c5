"""What becomes of the heads of a layer before attention: norm, rotation, the way to the cache."""

import torch
from torch import Tensor

from unisono.ops.reference.norm import rms_norm
from unisono.ops.reference.rotary import apply_rope


def rope_and_write_kv(
    heads: Tensor,
    num_heads: int,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and rotate q and k, write k and v into the cache, return q [tokens, num_heads, dim].

    heads [tokens, num_heads + 2 * kv_heads, dim]: q, then k, then v; it may be a part of wider
    rows. head_norms [num_heads + kv_heads, dim] is the weight of the RMS norm of each head of q
    and k, as in `rms_norm`, or None where the model has none. cos, sin as in `apply_rope`; norm
    and rotation each round once to the dtype of `heads`. Caches and slot_mapping as in `write_kv`.
    """
    num_turning = heads.shape[1] - k_cache.shape[1]
    turning = heads[:, :num_turning]
    if head_norms is not None:
        turning = rms_norm(turning, head_norms, eps)
    turned = apply_rope(turning, cos, sin)
    write_kv(turned[:, num_heads:], heads[:, num_turning:], k_cache, v_cache, slot_mapping)
    return turned[:, :num_heads]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [tokens, kv_heads, dim] into caches [blocks, kv_heads, block_size, dim].

    slot_mapping [tokens] int64 is block * block_size + offset of each token.
    """
    block_size = k_cache.shape[2]
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offset = slot_mapping - block * block_size
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v
