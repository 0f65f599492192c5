"""Shapes are the published models: parameter counts as published, fields as transformers names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from unisono.models.config import ConfigError, RopeConfig, max_model_len_limit
from unisono.models.config_reader import read_model_config
from unisono.models.overlay import overlay_parts
from unisono.models.partition import ModelPartition
from unisono.models.shapes import PREFIX, SHAPES, is_shape, shape_config

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
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
        ("qwen3-30b-a3b", 1e6, 1e-6, 40960, False, (32, 4, 128)),
        ("qwen3-next-80b-a3b", 1e7, 1e-6, 262144, False, (16, 2, 256)),
        ("qwen3.5-27b", 1e7, 1e-6, 262144, False, (24, 4, 256)),
        ("qwen3.5-35b-a3b", 1e7, 1e-6, 262144, False, (16, 2, 256)),
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
    assert config.rope.rotary_dim == config.head_dim // (4 if config.is_hybrid else 1)
    assert overlay_parts(config) == (("norm", "qk-norm") if "qwen" in name else ("norm",))


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        (
            "qwen3-30b-a3b",
            "Qwen3Moe",
            {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True},
        ),
        ("qwen3-next-80b-a3b", "Qwen3Next", {}),
        (
            "qwen3.5-27b",
            "Qwen3_5",
            {
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 64,
                "num_attention_heads": 24,
                "linear_num_value_heads": 48,
            },
        ),
        ("qwen3.5-35b-a3b", "Qwen3_5Moe", {}),
    ],
)
def test_hybrids_are_what_transformers_builds(
    name: str, kind: str, fields: dict[str, int], tmp_path: Path
) -> None:
    """Its class defaults are those of one published model each; tensors have no memory."""
    classes = "TextConfig" if hasattr(transformers, f"{kind}TextConfig") else "Config"
    config = getattr(transformers, kind + classes)(**fields)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert sum(tensor.numel() for tensor in model.parameters()) == PARAMETERS[name]
    config.save_pretrained(tmp_path)
    written = read_model_config(tmp_path)
    published = {
        "rope": SHAPES[name].rope,
        "max_position_embeddings": SHAPES[name].max_position_embeddings,
        "dtype": "bfloat16",
        "bos_token_id": SHAPES[name].bos_token_id,
        "eos_token_ids": SHAPES[name].eos_token_ids,
        # No layer has an MLP of this width.
        "intermediate_size": SHAPES[name].intermediate_size,
    }
    assert replace(written, **published) == SHAPES[name]


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
