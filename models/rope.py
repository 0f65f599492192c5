"""Rotary frequencies of every variant, and the table of cosines and sines of a run.

Frequencies are fixed at start from `max_model_len`, the variants that depend on a length
included: a key's rotation never depends on how long its request has become. The arithmetic
follows transformers step by step, so that the bits are equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unisono.models.config import RopeConfig


def rope_frequencies(
    rope: RopeConfig, head_dim: int, max_model_len: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Return the inverse frequencies, float32 [rotary_dim / 2], and the scale of cos and sin.

    dynamic: for the longer of max_model_len and max_position_embeddings. longrope: the long
    factors iff max_model_len is beyond the original length. ValueError for an unknown variant.
    """
    assert rope.rotary_dim <= head_dim
    match rope.rope_type:
        case "default":
            return _plain(rope), 1.0
        case "linear":
            return _plain(rope) / rope.factor, 1.0
        case "dynamic":
            return _dynamic(
                rope, max(max_model_len, max_position_embeddings), max_position_embeddings
            )
        case "llama3":
            return _llama3(rope), 1.0
        case "yarn":
            return _yarn(rope), _yarn_scale(rope)
        case "longrope":
            return _longrope(rope, max_model_len), _longrope_scale(rope)
        case unknown:
            raise ValueError(f"rope_type {unknown!r} is not known")


def rope_table(
    rope: RopeConfig, head_dim: int, max_model_len: int, max_position_embeddings: int
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position, each float32 [max_model_len, rotary_dim / 2]."""
    inverse, scale = rope_frequencies(rope, head_dim, max_model_len, max_position_embeddings)
    angles = torch.arange(max_model_len).float()[:, None] * inverse
    return angles.cos() * scale, angles.sin() * scale


def _powers(rope: RopeConfig, theta: float) -> Tensor:
    """theta ^ (2i / rotary_dim)"""
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float()
    return theta ** (steps / rope.rotary_dim)


def _plain(rope: RopeConfig) -> Tensor:
    return 1.0 / _powers(rope, rope.theta)


def _dynamic(rope: RopeConfig, length: int, max_position: int) -> tuple[Tensor, float]:
    """theta' = theta (s L / max_position - (s - 1)) ^ (d / (d - 2))"""
    dim = rope.rotary_dim
    stretch = rope.factor * length / max_position - (rope.factor - 1)
    return 1.0 / _powers(rope, rope.theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(rope: RopeConfig) -> Tensor:
    """Short waves stay, long ones are slowed by the factor, those between are blended."""
    inverse, trained = _plain(rope), rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    slowed = torch.where(wavelength > trained / low, inverse / rope.factor, inverse)
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * slowed / rope.factor + blend * slowed
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeConfig) -> Tensor:
    """Channels that turn often keep their frequency, slow ones are divided by the factor."""
    dim, trained = rope.rotary_dim, rope.original_max_position_embeddings

    def channel(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = _powers(rope, rope.theta)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_scale(rope: RopeConfig) -> float:
    def grown(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


def _longrope(rope: RopeConfig, max_model_len: int) -> Tensor:
    beyond = max_model_len > rope.original_max_position_embeddings
    divisors = torch.tensor(rope.long_factor if beyond else rope.short_factor, dtype=torch.float32)
    return 1.0 / (divisors * _powers(rope, rope.theta))


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    trained = rope.original_max_position_embeddings
    return math.sqrt(1 + math.log(rope.factor) / math.log(trained))
