"""Start-up proof that this machine's matrix products keep a row's bits, and what to do if not."""

from __future__ import annotations

import torch

from unisono.ops.attention import NARROW, PAGE, VECTOR, WIDE


def attention_threads(head_dim: int) -> int:
    """Return 0 where the products of `ops/attention.py` are exact on all threads, else 1.

    With many threads and few products the library cuts a tile between threads, and a part of
    fewer than four rows goes another way with other bits.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return 0
    generator = torch.Generator().manual_seed(0)
    products, width = 2 * threads + 1, -(-head_dim // VECTOR) * VECTOR
    q = torch.randn(products, WIDE, width, generator=generator)
    k = torch.randn(products, PAGE, width, generator=generator)
    scores, values = _tile_products(q, k)
    for count in range(1, products + 1):
        for first, height in ((0, NARROW), (WIDE - NARROW - 3, NARROW), (0, WIDE)):
            rows = slice(first, first + height)
            part = _tile_products(q[:count, rows].contiguous(), k[:count])
            if not torch.equal(part[0], scores[:count, rows]):
                return 1
            if not torch.equal(part[1], values[:count, rows]):
                return 1
    return 0


def _tile_products(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two products of attention, q k^T and then its result times k."""
    scores = torch.bmm(q, k.transpose(1, 2))
    return scores, torch.bmm(scores, k)
