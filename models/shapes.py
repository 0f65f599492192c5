"""Published models by name, without a file: configurations only. Torch-free.

A shape has no checkpoint and no tokenizer; its weights are random (`models/random_weights.py`).
"""

from __future__ import annotations

from typing import Any

from unisono.models.config import (
    ConfigError,
    DeltaConfig,
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
)

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


def _delta(num_value_heads: int, is_grouped: bool = False) -> DeltaConfig:
    return DeltaConfig(
        num_key_heads=16,
        num_value_heads=num_value_heads,
        key_head_dim=128,
        value_head_dim=128,
        conv_width=4,
        is_grouped=is_grouped,
    )


def _three_of_four(num_layers: int) -> tuple[bool, ...]:
    """Layers that are gated delta nets: every fourth is attention."""
    return tuple(layer % 4 != 3 for layer in range(num_layers))


_HYBRID: dict[str, Any] = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope": RopeConfig(theta=1e7, rotary_dim=64),
    "qk_norm": True,
    "dtype": "bfloat16",
    "zero_centred_norms": True,
    "attn_output_gate": True,
}
_QWEN3_5: dict[str, Any] = {
    "vocab_size": 248320,
    "bos_token_id": None,
    "eos_token_ids": (248046, 248044),
    **_HYBRID,
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
    "qwen3-30b-a3b": ModelConfig(
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        experts=ExpertsConfig(num_experts=128, num_experts_per_tok=8, width=768),
        **{**_QWEN3, "family": "qwen3_moe", "num_kv_heads": 4},
    ),
    "qwen3-next-80b-a3b": ModelConfig(
        family="qwen3_next",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5120,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
        delta=_delta(32, is_grouped=True),
        delta_layers=_three_of_four(48),
        experts=ExpertsConfig(num_experts=512, num_experts_per_tok=10, width=512, shared_width=512),
        **_HYBRID,
    ),
    "qwen3.5-27b": ModelConfig(
        family="qwen3_5",
        hidden_size=5120,
        intermediate_size=17408,
        num_layers=64,
        num_heads=24,
        num_kv_heads=4,
        delta=_delta(48),
        delta_layers=_three_of_four(64),
        **_QWEN3_5,
    ),
    "qwen3.5-35b-a3b": ModelConfig(
        family="qwen3_5_moe",
        hidden_size=2048,
        intermediate_size=0,
        num_layers=40,
        num_heads=16,
        num_kv_heads=2,
        delta=_delta(32),
        delta_layers=_three_of_four(40),
        experts=ExpertsConfig(num_experts=256, num_experts_per_tok=8, width=512, shared_width=512),
        **_QWEN3_5,
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
