"""Tiny random checkpoints, written by transformers, with every tensor randomised.

Default initialisation (ones for norms, zeros for biases) hides faults; so do round sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BASE = {
    "vocab_size": 199,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 2,
}
LONG = 32768
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
NINE_OVER_THREE = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}


def rope(rope_type: str, theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **fields}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**NINE_OVER_THREE, "intermediate_size": 136, "tie_word_embeddings": True}),
    "llama-untied-1003": (
        "Llama",
        {
            **NINE_OVER_THREE,
            "intermediate_size": 136,
            "vocab_size": 1003,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama-bias-llama3": (
        "Llama",
        {
            "hidden_size": 72,
            "intermediate_size": 120,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama-linear": ("Llama", {**LLAMA, "rope_parameters": rope("linear", factor=4.0)}),
    "llama-dynamic": (
        "Llama",
        {
            **LLAMA,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
            "rope_parameters": rope("dynamic", factor=6.0),
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            **LLAMA,
            "num_key_value_heads": 2,
            "rope_parameters": rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=32),
        },
    ),
    "llama-longrope": (
        "Llama",
        {
            **LLAMA,
            "num_key_value_heads": 2,
            "rope_parameters": rope(
                "longrope",
                factor=4.0,
                original_max_position_embeddings=32,
                short_factor=[1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5],
                long_factor=[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
            ),
        },
    ),
    "long": ("Llama", {**LLAMA, "max_position_embeddings": LONG, "vocab_size": 300}),
    "qwen2": (
        "Qwen2",
        {
            "hidden_size": 56,
            "intermediate_size": 152,
            "num_hidden_layers": 3,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": rope("default", 1e6),
        },
    ),
    "qwen2-sliding": (
        "Qwen2",
        {
            **LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (
        "Qwen3",
        {
            "hidden_size": 64,
            "intermediate_size": 100,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": rope("default", 1e6),
        },
    ),
    "qwen3-bias-untied-1003": (
        "Qwen3",
        {
            "hidden_size": 48,
            "intermediate_size": 136,
            "vocab_size": 1003,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}


def oracle_model(name: str, seed: int = 0) -> Any:
    """The transformers model of a configuration, fp32, every tensor random."""
    import transformers

    kind, fields = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **fields})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in key:
                tensor.copy_(1.0 + 0.3 * noise)
            elif tensor.dim() == 1:
                tensor.copy_(0.3 * noise)
            else:
                # Logits spread over several units, so that the arg-max has a margin.
                tensor.copy_(noise / tensor.shape[1] ** 0.5 * (2.0 if "embed" in key else 1.0))
    return model


def write_checkpoint(name: str, directory: Path, seed: int = 0, **save: Any) -> Any:
    """Save the configuration's model under `directory`; return the transformers model."""
    model = oracle_model(name, seed)
    model.save_pretrained(directory, **save)
    return model


def random_ids(count: int, vocab_size: int = 199, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()
