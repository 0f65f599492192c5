"""Shapes are the published models: parameter counts as published, fields as transformers names."""

from __future__ import annotations

import re

import pytest

from unisono.models.config import ConfigError, RopeConfig, max_model_len_limit
from unisono.models.overlay import overlay_parts
from unisono.models.partition import ModelPartition
from unisono.models.shapes import PREFIX, SHAPES, is_shape, shape_config

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}


def test_every_shape_is_counted() -> None:
    assert PARAMETERS.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_the_parameters_are_as_many_as_published(name: str) -> None:
    config = shape_config(PREFIX + name)
    specs = ModelPartition.of(config, 1).weights(0)
    assert sum(spec.num_elements for spec in specs) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "theta", "eps", "length", "tied", "heads"),
    [
        ("qwen3-0.6b", 1e6, 1e-6, 40960, True, (16, 8, 128)),
        ("qwen3-8b", 1e6, 1e-6, 40960, False, (32, 8, 128)),
        ("qwen3-14b", 1e6, 1e-6, 40960, False, (40, 8, 128)),
        ("qwen3-32b", 1e6, 1e-6, 40960, False, (64, 8, 128)),
        ("llama-3.1-8b", 5e5, 1e-5, 131072, False, (32, 8, 128)),
        ("smollm2-135m", 1e5, 1e-5, 8192, True, (9, 3, 64)),
    ],
)
def test_what_the_count_does_not_show(
    name: str, theta: float, eps: float, length: int, tied: bool, heads: tuple[int, int, int]
) -> None:
    config = SHAPES[name]
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (
        theta,
        eps,
        tied,
    )
    assert max_model_len_limit(config) == length
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads
    assert config.rope.rotary_dim == config.head_dim
    assert overlay_parts(config) == (("norm", "qk-norm") if "qwen" in name else ("norm",))


def test_llama_3_1_stretches_its_rope() -> None:
    assert SHAPES["llama-3.1-8b"].rope == RopeConfig(
        rope_type="llama3",
        theta=5e5,
        rotary_dim=128,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


@pytest.mark.parametrize("name", ["shape:", "shape:qwen3", "shape:Qwen3-8B"])
def test_unknown_shapes_are_refused_with_the_legal_ones(name: str) -> None:
    assert is_shape(name)
    legal = ", ".join(PREFIX + each for each in SHAPES)
    with pytest.raises(ConfigError, match=re.escape(f"{name!r} is no known shape; choose {legal}")):
        shape_config(name)
