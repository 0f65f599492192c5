"""The gated delta rule, by the formula: a state that is read, corrected and faded token by token.

For each value head, with a state S [values, keys], a key k, a value v and a query q:
S <- exp(g) S;  S <- S + beta (v - S k) k^T;  o = S q.
"""

import torch
from torch import Tensor

NORM_EPS = 1e-6


def gates(b: Tensor, a: Tensor, decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = decay * softplus(a + dt_bias) and beta = sigmoid(b), both [..., heads] fp32.

    a, b [..., heads]; decay = -exp(A_log) and dt_bias [heads] fp32. beta is rounded to the dtype of
    `b`. Written with exp and log1p, whose bits do not depend on where in a vector a number lies.
    """
    x = a.float() + dt_bias
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    beta = torch.exp(-b.float()).add_(1.0).reciprocal_()
    return decay * softplus, beta.to(b.dtype).float()


def unit_heads(mixed: Tensor, num_key_heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    """Split what left the convolution into q and k of length 1 (q * key_dim^-0.5), and v, in fp32.

    mixed [tokens, channels] = [q of all key heads | k of all | v of all value heads] ->
    q, k [tokens, key heads, key_dim], v [tokens, value heads, value_dim].
    """
    keys = num_key_heads * key_dim
    q, k, v = mixed.float().tensor_split((keys, 2 * keys), dim=1)
    q, k = (_unit(x.reshape(len(x), num_key_heads, key_dim)) for x in (q, k))
    return [q * key_dim**-0.5, k, v.unflatten(1, (-1, value_dim))]


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one token into `state` [..., values, keys], in place.

    q, k [..., keys], v [..., values], fade = exp(g) and beta [...]; all fp32. Returns o and
    u = beta (v - S k), which was written for k, [..., values].
    """
    state.mul_(fade[..., None, None])
    update = (v - _read(state, k)) * beta[..., None]
    _write(state, k, update)
    return _read(state, q), update


def replay(state: Tensor, k: Tensor, update: Tensor, fade: Tensor) -> None:
    """Take a token into `state` in place, by what `step` found: bit for bit what `step` did."""
    state.mul_(fade[..., None, None])
    _write(state, k, update)


def _write(state: Tensor, k: Tensor, update: Tensor) -> None:
    state.add_(update[..., :, None] * k[..., None, :])


def _read(state: Tensor, x: Tensor) -> Tensor:
    """The product of each state with a vector, as a sum of torch's own along the keys: the bits of
    a library's product follow its shape."""
    return (state * x[..., None, :]).sum(-1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(NORM_EPS))
