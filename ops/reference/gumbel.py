"""Gumbel noise by counting: a number for (seed, position, vocabulary id), whoever asks for it.

The token at a position is the arg-max of logits / T + noise, which draws id i with the
probability softmax(logits / T)[i] exactly. No generator has a state, so that neither company nor
place, rank count or resumption of a request can change what it is given.
"""

import torch
from torch import Tensor

from unisono.ops.reference.sampling import argmax_keys

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_ROWS = 8
"""Rows taken at once: the noise of a whole batch in float64 would not fit a cache."""


def gumbel_noise(seeds: Tensor, positions: Tensor, first_id: int, num_ids: int) -> Tensor:
    """Noise [rows, num_ids] fp64 for vocabulary ids first_id + j.

    seeds, positions [rows] int64. noise = -log(-log(u)) with u = (k + 1/2) / 2^52, k the upper 52
    bits of splitmix64: strictly inside (0, 1), so that the noise is finite.
    """
    ids = torch.arange(first_id, first_id + num_ids, device=seeds.device)
    return -(-_uniform(seeds[:, None], positions[:, None], ids).log()).log()


def chance(seeds: Tensor, positions: Tensor) -> Tensor:
    """A number in (0, 1) for each of seeds and positions [rows] int64, [rows] fp64.

    It is that of id -1, which no token has: all noise of the same seeds is independent of it.
    """
    return _uniform(seeds, positions, torch.full_like(seeds, -1))


def add_noise(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_id: int
) -> Tensor:
    """Return fp32(logits + temperature * noise), [rows, shard] like `logits`.

    logits [rows, shard] fp32, whose column j is vocabulary id first_id + j; temperature [rows]
    fp64; seeds and positions [rows] int64. The arg-max is that of logits / temperature + noise, but
    no small temperature can overflow, and 0 leaves a row its logits. -inf stays -inf and NaN stays
    NaN.
    """
    noisy = torch.empty_like(logits)
    for first in range(0, len(logits), _ROWS):
        part = slice(first, first + _ROWS)
        noise = gumbel_noise(seeds[part], positions[part], first_id, logits.shape[1])
        noisy[part] = (logits[part].double() + temperature[part, None] * noise).float()
    return noisy


def noisy_argmax_keys(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_id: int,
    num_ids: int,
) -> Tensor:
    """`argmax_keys(add_noise(...), first_id, num_ids)`, [rows] int64.

    Arguments as in the two; a temperature of 0 is allowed and leaves the row its logits.
    """
    noisy = add_noise(logits, temperature, seeds, positions, first_id)
    return argmax_keys(noisy, first_id, num_ids)


def _uniform(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    start = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    bits = _mix(start + (ids + 1) * _GOLDEN)
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap around on every device."""
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count of the 64 bits without a sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
