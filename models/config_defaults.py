"""What the configuration class of each family assumes where config.json is silent. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDefaults:
    """Of a mixture of experts."""

    num_experts: int
    num_experts_per_tok: int
    width: int
    shared_width: int = 0
    """0: the family has no shared expert, whatever config.json says."""
    renormalise: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Of a family."""

    vocab_size: int
    hidden_size: int = 4096
    intermediate_size: int
    """0: the family has experts in every layer, and the field is not read."""
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None
    """None: one per query head."""
    head_dim: int | None
    """None: hidden_size / heads."""
    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 1.0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    experts: ExpertDefaults | None = None


DEFAULTS = {
    "llama": Defaults(
        vocab_size=32000,
        intermediate_size=11008,
        num_kv_heads=None,
        head_dim=None,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen2": Defaults(vocab_size=151936, intermediate_size=22016, num_kv_heads=32, head_dim=None),
    "qwen3": Defaults(vocab_size=151936, intermediate_size=22016, num_kv_heads=32, head_dim=128),
    "qwen3_moe": Defaults(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=24,
        num_kv_heads=4,
        head_dim=None,
        experts=ExpertDefaults(
            num_experts=128, num_experts_per_tok=8, width=768, renormalise=False
        ),
    ),
    "qwen3_next": Defaults(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        experts=ExpertDefaults(
            num_experts=512, num_experts_per_tok=10, width=512, shared_width=512
        ),
    ),
    "qwen3_5": Defaults(
        vocab_size=248320,
        intermediate_size=12288,
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        partial_rotary_factor=0.25,
    ),
    "qwen3_5_moe": Defaults(
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=0,
        num_layers=40,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        experts=ExpertDefaults(num_experts=256, num_experts_per_tok=8, width=512, shared_width=512),
    ),
}
"""By family."""
