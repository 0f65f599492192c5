"""Numbers that depend on a seed and an index alone: the same bits on every device.

Integer mixing in wrapping int32, then one exact conversion to fp32; there is no state, so that any
part of a tensor can be made without the rest of it.
"""

from __future__ import annotations

from torch import Tensor

LIMIT = 65535
"""Largest absolute value."""
STD = 26754.9
"""Standard deviation: that of the sum of two uniform 16-bit numbers, sqrt((2^32 - 1) / 6)."""
_MIX_1 = 0x21F0AAAD
_MIX_2 = 0xD35A2D97 - (1 << 32)


def random_values(indices: Tensor, seeds: tuple[int, int]) -> Tensor:
    """Return a whole number in [-LIMIT, LIMIT] for each index, fp32, triangular around zero.

    indices: int32 of any shape, overwritten; an index from 2^31 on is given modulo 2^32. seeds:
    two int32. Two tensors whose first seeds lie close do not share a run of numbers: the second
    seed enters between the rounds.
    """
    x = indices.bitwise_xor_(seeds[0])
    x.bitwise_xor_(_shifted(x, 16)).mul_(_MIX_1).add_(seeds[1])
    x.bitwise_xor_(_shifted(x, 15)).mul_(_MIX_2)
    x.bitwise_xor_(_shifted(x, 15))
    # The upper half counts from -32768, the lower from 0: together they are symmetric around 0.
    return ((x >> 16) + (x & 0xFFFF)).add_(1 - (1 << 15)).float()


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count of the 32 bits without a sign."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)
