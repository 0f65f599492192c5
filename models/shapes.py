"""Published models by name, without a file: configurations only. Torch-free.

A shape has no checkpoint and no tokenizer; its weights are random (`models/random_weights.py`).
"""

from __future__ import annotations

from typing import Any

from unisono.models.config import ConfigError, ModelConfig, RopeConfig

PREFIX = "shape:"
"""What the name of a model that is a shape begins with."""
_QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope": RopeConfig(theta=1e6, rotary_dim=128),
    "qk_norm": True,
    "dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_ids": (151645, 151643),
}
SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
    "qwen3-8b": ModelConfig(
        hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, **_QWEN3
    ),
    "qwen3-14b": ModelConfig(
        hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40, **_QWEN3
    ),
    "qwen3-32b": ModelConfig(
        hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64, **_QWEN3
    ),
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=RopeConfig(
            rope_type="llama3",
            theta=500000.0,
            rotary_dim=128,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=100000.0, rotary_dim=64),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
}


def is_shape(model: str) -> bool:
    """Whether `model` names a shape rather than files."""
    return model.startswith(PREFIX)


def shape_config(model: str) -> ModelConfig:
    """Return the configuration of "shape:NAME". Raises ConfigError naming the shapes there are."""
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        legal = ", ".join(PREFIX + each for each in SHAPES)
        raise ConfigError(f"model {model!r} is no known shape; choose {legal}")
    return SHAPES[name]
