"""How near the other token was, where rank counts drew another one. Pure.

A drawn token is the arg-max of logits / T + noise, and the noise is a number for (seed of the
request, position, id) that no rank count changes. So a token may be another one only where two of
these sums are nearly equal. The noise is stated here once more, in whole numbers of Python: what
ranks make of it (ops/reference/gumbel.py, ops/kernels/gumbel.py) is what is put to the test.
"""

from __future__ import annotations

import math

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise(seed: int, position: int, token_id: int) -> float:
    """Gumbel noise -log(-log(u)), u = (k + 1/2) / 2^52 with k the upper 52 bits of splitmix64."""
    start = _mixed(seed + _GOLDEN) + (position + 1) * _GOLDEN
    bits = _mixed(_mixed(start & _BITS) + (token_id + 1) * _GOLDEN)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


def _mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x &= _BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31
