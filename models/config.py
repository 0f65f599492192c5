"""What a model is: every field of a checkpoint's configuration that changes the arithmetic.

Torch-free. `models/config_reader.py` reads it from config.json or from a GGUF file; a field that
would change the maths and is not known is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass


class ConfigError(ValueError):
    """An option or a file of the user is wrong. The message is one line: value, rule, choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Formulas: `models/rope.py`."""

    rope_type: str = "default"
    """default, linear, dynamic, llama3, yarn or longrope."""
    theta: float = 10000.0
    rotary_dim: int
    """Channels of a head that rotate; the rest pass through."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Length the frequencies were trained for (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    """Scale of cos and sin as the checkpoint gives it; None: from the formula of the variant."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the llama kind, as its checkpoint describes it."""

    family: str
    """llama, qwen2 or qwen3: a key of `models.registry.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    """Keys a query of layer i may see, itself included; 0: all. Empty: 0 for every layer."""
    dtype: str = "float32"
    """The checkpoint's own: float32, bfloat16 or float16."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config.json and generation_config.json name."""

    def window_of(self, layer: int) -> int:
        """Return the sliding window of `layer` in keys; 0 where it sees everything."""
        return self.sliding_windows[layer] if self.sliding_windows else 0


def max_model_len_limit(config: ModelConfig) -> int:
    """Return the most tokens, prompt and answer together, that the position embedding serves.

    max_position_embeddings; linear, dynamic and yarn stretch the original length by `factor`.
    """
    rope, length = config.rope, config.max_position_embeddings
    if rope.rope_type not in ("linear", "dynamic", "yarn"):
        return length
    original = rope.original_max_position_embeddings or length
    return max(length, int(original * rope.factor))
