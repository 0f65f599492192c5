"""Linear layers whose rows keep their bits whatever the batch.

A matrix library picks its kernel, and with it the order of a sum, by the number of rows. So rows
are padded to a ladder of heights, and only heights are used that were proven, on this machine and
for this weight's shape, to give a row the bits that it has at the lowest one. On the CPU the
product is oneDNN's over a packed weight, which keeps its order nearly everywhere (MKL, behind
`torch.nn.functional.linear`, does not); where it is absent the plain product climbs as far as it
is proven to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

SMALL_HEIGHTS = (2, 4, 8, 16)
"""Proven when a weight is packed. If they differ, 16 alone is used; and if even there a row's bits
depend on its place, rows are computed one by one."""
TALL_HEIGHTS = (32, 48, 64, 96, 128, 192, 256)
"""Each proven when it is first used, against pieces of a height that is."""
_HEIGHTS = (*SMALL_HEIGHTS, *TALL_HEIGHTS)

Linear = Callable[[Tensor], Tensor]
"""x [tokens, in] -> [tokens, out]."""
Proofs = dict[tuple[torch.Size, torch.dtype], dict[int, bool]]
"""By shape and dtype of a weight: which heights keep a row's bits."""


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, proofs: Proofs) -> Linear:
    """Return x W^T, rounded, + bias, rounded; the caller may drop `weight` [out, in] afterwards.

    `proofs` is shared by the weights of a model: equal shapes are proven once.
    """
    use_onednn = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    product = packed_product(weight) if use_onednn else plain_product(weight)
    exact = ExactLinear(product, weight, proofs.setdefault((weight.shape, weight.dtype), {}))
    return exact if bias is None else lambda x: exact(x) + bias


def pack_head(weight: Tensor, *, proofs: Proofs) -> Linear:
    """Return the exact product with `weight` [out, in] whose sums are kept: fp32 whatever `x` is.

    The products are those of the dtype of `weight`; nothing is rounded to it afterwards.
    """
    product = pack_linear(weight.to(torch.float32), proofs=proofs)
    return lambda x: product(x.to(torch.float32))


def packed_product(weight: Tensor) -> Linear:
    """oneDNN over a weight packed once; from two rows up."""
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), None)
    return lambda x: product(x, packed, None, "none", [], "")


def plain_product(weight: Tensor) -> Linear:
    """Whatever torch's matrix product does on this device."""
    transposed = weight.T
    return lambda x: x @ transposed


class ExactLinear:
    """`product`, called at proven heights only. `proven` may be shared with equal weights."""

    def __init__(self, product: Linear, weight: Tensor, proven: dict[int, bool]) -> None:
        self._product = product
        self._out_features, self._in_features = weight.shape
        self._dtype, self._device = weight.dtype, weight.device
        self._proven = proven
        self._single: dict[int, int] = {}  # rows -> height, where one product does
        if not proven:
            proven.update(self._prove_small())

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        height = self._single.get(len(x))
        if height is not None:
            return self._at_height(x, height)
        parts = [
            self._at_height(x[start:stop], height) for start, stop, height in self._cut(len(x))
        ]
        if len(parts) == 1:
            self._single[len(x)] = self._height_for(len(x))
            return parts[0]
        return torch.cat(parts) if parts else x.new_empty(0, self._out_features)

    def _prove_small(self) -> dict[int, bool]:
        tallest = SMALL_HEIGHTS[-1]
        if not self._is_same_at_every_place(tallest):
            # What is always exact: each row by itself.
            return dict.fromkeys(SMALL_HEIGHTS, False) | {1: True}
        alike = all(self._agree(tallest, height) for height in SMALL_HEIGHTS[:-1])
        return dict.fromkeys(SMALL_HEIGHTS, alike) | {tallest: True}

    def _cut(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Cut `rows` into pieces, each with the proven height it is padded to."""
        start = 0
        while start < rows:
            height = self._height_for(rows - start)
            stop = min(start + height, rows)
            yield start, stop, height
            start = stop

    def _height_for(self, rows: int) -> int:
        """The lowest height that holds `rows` if it is proven, else the tallest proven below."""
        fitting = next((height for height in _HEIGHTS if height >= rows), _HEIGHTS[-1])
        below = (height for height in reversed(_HEIGHTS) if height <= fitting)
        return next(filter(self._is_proven, below), 1 if 1 in self._proven else SMALL_HEIGHTS[-1])

    def _is_proven(self, height: int) -> bool:
        if height not in self._proven:
            pieces = max(h for h, good in self._proven.items() if good and height % h == 0)
            self._proven[height] = self._agree(height, pieces)
        return self._proven[height]

    def _agree(self, height: int, piece: int) -> bool:
        """Whether every row of a product `height` rows high has its bits in pieces of `piece`."""
        x = self._trial(height)
        pieces = [self._product(part) for part in x.split(piece)]
        return torch.equal(self._product(x), torch.cat(pieces))

    def _is_same_at_every_place(self, height: int) -> bool:
        """Whether a row keeps its bits one row further down, and so anywhere."""
        x = self._trial(height)
        return torch.equal(self._product(x.roll(1, 0)), self._product(x).roll(1, 0))

    def _trial(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self._in_features, generator=generator)
        return x.to(self._dtype).to(self._device)

    def _at_height(self, x: Tensor, height: int) -> Tensor:
        rows = len(x)
        if rows == height:
            return self._product(x.contiguous())
        return self._product(torch.constant_pad_nd(x, (0, 0, 0, height - rows)))[:rows]
