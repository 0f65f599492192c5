"""Frequencies and tables have the bits of transformers, for every variant, past every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.closeness import assert_same_bits
from unisono.models.config import RopeConfig
from unisono.models.rope import rope_frequencies, rope_table

HEAD_DIM, MAX_POSITION, ORIGINAL = 16, 128, 32
SHORT = [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5]
LONG = [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
LISTS = {"short_factor": SHORT, "long_factor": LONG}
TRAINED = {"original_max_position_embeddings": ORIGINAL}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default-theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e7},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, **TRAINED},
    "yarn-exact-bounds": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        **TRAINED,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        **TRAINED,
    },
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, **TRAINED},
    "yarn-no-stretch": {"rope_type": "yarn", "factor": 1.0, **TRAINED},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **LISTS, **TRAINED},
    "longrope-attention": {
        "rope_type": "longrope",
        "factor": 4.0,
        "attention_factor": 1.1,
        **LISTS,
        **TRAINED,
    },
    "longrope-no-stretch": {"rope_type": "longrope", "factor": 1.0, **LISTS, **TRAINED},
}


def ours(variant: dict[str, Any], rotary_dim: int = HEAD_DIM) -> RopeConfig:
    fields = {key: value for key, value in variant.items() if key != "rope_theta"}
    for name in LISTS:
        if name in fields:
            fields[name] = tuple(fields[name])
    return RopeConfig(theta=variant.get("rope_theta", 10000.0), rotary_dim=rotary_dim, **fields)


def oracle(variant: dict[str, Any], max_position: int = MAX_POSITION) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 10000.0, **variant},
    )


def oracle_table(variant: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of one forward over positions 0 to `length`, the first half of the channels."""
    embedding = LlamaRotaryEmbedding(oracle(variant))
    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


# Below the original length, above it, at max_position and past it.
@pytest.mark.parametrize("length", [21, ORIGINAL, ORIGINAL + 1, MAX_POSITION, 300])
@pytest.mark.parametrize("name", VARIANTS)
def test_table_equals_transformers(name: str, length: int) -> None:
    want = oracle_table(VARIANTS[name], length)
    got = rope_table(ours(VARIANTS[name]), HEAD_DIM, length, MAX_POSITION)
    for what, ours_, theirs in zip(("cos", "sin"), got, want, strict=True):
        assert ours_.shape == (length, HEAD_DIM // 2)
        assert_same_bits(f"{name} {what}", ours_, theirs.contiguous())


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("default")])
def test_part_of_the_channels_rotates(name: str) -> None:
    variant = {**VARIANTS[name], "partial_rotary_factor": 0.5}
    for key in LISTS:
        if key in variant:
            variant[key] = variant[key][:4]
    want, scale = ROPE_INIT_FUNCTIONS[variant["rope_type"]](oracle(variant), seq_len=300)
    del variant["partial_rotary_factor"]
    got, got_scale = rope_frequencies(ours(variant, rotary_dim=8), HEAD_DIM, 300, MAX_POSITION)
    assert got.shape == (4,)
    assert got_scale == scale
    assert_same_bits(name, got, want)


def test_dynamic_is_plain_up_to_max_position_and_grows_past_it() -> None:
    rope, plain = ours(VARIANTS["dynamic"]), ours({"rope_type": "default", "rope_theta": 5e7})
    base, _ = rope_frequencies(plain, HEAD_DIM, 128, 128)
    assert_same_bits("within", rope_frequencies(rope, HEAD_DIM, 64, 128)[0], base)
    past, _ = rope_frequencies(rope, HEAD_DIM, 129, 128)
    assert bool((past[1:] < base[1:]).all())
    assert past[0] == base[0]


def test_longrope_decides_once_from_the_longest_request() -> None:
    rope = ours(VARIANTS["longrope"])
    base, _ = rope_frequencies(ours({"rope_type": "default"}), HEAD_DIM, 8, 128)
    for length, divisors in ((ORIGINAL, SHORT), (ORIGINAL + 1, LONG)):
        got, scale = rope_frequencies(rope, HEAD_DIM, length, 128)
        torch.testing.assert_close(got, base / torch.tensor(divisors))
        assert scale == pytest.approx((1 + 4.0**0 * 1.3862943611198906 / 3.4657359027997265) ** 0.5)


def test_table_does_not_depend_on_the_default_dtype() -> None:
    want = rope_table(ours(VARIANTS["longrope"]), HEAD_DIM, 64, 128)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = rope_table(ours(VARIANTS["longrope"]), HEAD_DIM, 64, 128)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours_, theirs in zip(got, want, strict=True):
        assert_same_bits("table", ours_, theirs)


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="'spiral' is not known"):
        rope_frequencies(RopeConfig(rope_type="spiral", rotary_dim=8), 8, 16, 16)
