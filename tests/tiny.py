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


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
}
MROPE = rope(
    "default",
    1e7,
    partial_rotary_factor=0.25,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {
            **NINE_OVER_THREE,
            **DELTA,
            "intermediate_size": 100,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [2],
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            **LLAMA,
            **DELTA,
            "vocab_size": 1003,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": MROPE,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **NINE_OVER_THREE,
            **DELTA,
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 36,
            "rope_parameters": MROPE,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **NINE_OVER_THREE,
            "intermediate_size": 136,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
            "rope_parameters": rope("default", 1e6),
        },
    ),
}
"""Beside CONFIGS: layers of several kinds, experts."""
WRAPPERS = ("qwen3.5", "qwen3.5-moe")
"""Hybrids that are published inside a model that can see."""
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
}


def oracle_model(name: str, seed: int = 0) -> Any:
    """The transformers model of a configuration, fp32, every tensor random."""
    import transformers

    kind = (CONFIGS | HYBRIDS)[name][0]
    model = getattr(transformers, f"{kind}ForCausalLM")(_oracle_config(name)).eval()
    return _randomise(model, seed)


def write_checkpoint(name: str, directory: Path, seed: int = 0, **save: Any) -> Any:
    """Save the configuration's model under `directory`; return the transformers model."""
    model = oracle_model(name, seed)
    model.save_pretrained(directory, **save)
    return model


def write_wrapper(name: str, directory: Path, seed: int = 0) -> Any:
    """Save the same model as part of one that can see; return that one."""
    import transformers

    kind, text = HYBRIDS[name][0], oracle_model(name, seed)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.config.to_dict(),
        vision_config=VISION,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    _randomise(model, seed + 1)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(directory)
    return model


def fuse_experts(directory: Path) -> None:
    """Rewrite a saved checkpoint with the experts of a layer in two tensors."""
    import safetensors.torch

    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    fused: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        expert, part, _ = rest.split(".")
        fused.setdefault(prefix, {}).setdefault(int(expert), {})[part] = tensors.pop(name)
    assert fused
    for prefix, experts in fused.items():
        each = [experts[i] for i in range(len(experts))]
        gate_up = [torch.cat((parts["gate_proj"], parts["up_proj"])) for parts in each]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.experts.down_proj"] = torch.stack([p["down_proj"] for p in each])
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def _oracle_config(name: str) -> Any:
    import transformers

    kind, fields = (CONFIGS | HYBRIDS)[name]
    kind += "TextConfig" if name in WRAPPERS else "Config"
    return getattr(transformers, kind)(**{**BASE, **fields})


def _randomise(model: Any, seed: int) -> Any:
    zero_centred = model.config.model_type.startswith(("qwen3_next", "qwen3_5"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in key:
                around = 0.0 if zero_centred and "linear_attn" not in key else 1.0
                tensor.copy_(around + 0.3 * noise)
            elif key.endswith("A_log"):
                # With the steps below a state keeps between a half and nearly all of itself.
                tensor.copy_(0.7 * noise)
            elif key.endswith("dt_bias"):
                tensor.copy_(noise - 2.0)
            elif tensor.dim() == 1:
                tensor.copy_(0.3 * noise)
            else:
                # Logits spread over several units, so that the arg-max has a margin; so does
                # the choice of experts.
                sharp = "embed" in key or key.endswith("mlp.gate.weight")
                tensor.copy_(noise / tensor.shape[-1] ** 0.5 * (2.0 if sharp else 1.0))
    return model


def random_ids(count: int, vocab_size: int = 199, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()
