"""Rotary position embedding, half style: channel i is paired with channel i + rotary_dim / 2."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), in fp32, rounded once.

    x [tokens, heads, head_dim]; cos, sin [tokens, 1, rotary_dim / 2] fp32. Channels from
    rotary_dim on pass through.
    """
    half = cos.shape[-1]
    wide = x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)
