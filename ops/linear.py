"""Linear layers whose rows keep their bits whatever the batch.

CPU: oneDNN over a packed weight. It accumulates each row in one order at every row count from two
up (MKL, behind `torch.nn.functional.linear`, does not), and one row is padded to two. Every
weight shape is probed when it is packed; where a row's bits move (another processor, another
build) or oneDNN is absent, rows are computed in tiles of a fixed number of rows instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE_ROWS = 16
"""Rows of the fixed tile where the packed product is not row-exact."""
_PROBE_ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 64)

Linear = Callable[[Tensor], Tensor]
"""x [tokens, in] -> [tokens, out], no bias."""


def pack_linear(weight: Tensor, proven: dict[tuple[object, ...], bool]) -> Linear:
    """Return the product with `weight` [out, in]; the caller may drop `weight` afterwards.

    `proven` remembers which (shape, dtype) were probed, so that a model of equal layers is
    probed once a shape.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return tiled_linear(weight)
    packed = packed_linear(weight)
    key = (weight.shape, weight.dtype)
    if key not in proven:
        proven[key] = rows_are_exact(packed, weight)
    return packed if proven[key] else tiled_linear(weight)


def packed_linear(weight: Tensor) -> Linear:
    """oneDNN over a weight packed once."""
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), None)

    def apply(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return product(x.expand(2, -1).contiguous(), packed, None, "none", [], "")[:1]
        return product(x.contiguous(), packed, None, "none", [], "")

    return apply


def tiled_linear(weight: Tensor) -> Linear:
    """The same product in tiles of TILE_ROWS rows, the last padded with zeros."""
    transposed = weight.T

    def apply(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % TILE_ROWS))
        tiles = [tile @ transposed for tile in padded.split(TILE_ROWS)]
        return torch.cat(tiles)[:rows] if tiles else x.new_empty(0, weight.shape[0])

    return apply


def rows_are_exact(linear: Linear, weight: Tensor) -> bool:
    """Whether the first rows of a batch have the bits they have in smaller batches."""
    generator = torch.Generator().manual_seed(0)
    rows = max(_PROBE_ROWS)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
    whole = linear(x)
    return all(
        torch.equal(linear(x[rows - count :]), whole[rows - count :]) for count in _PROBE_ROWS
    )
