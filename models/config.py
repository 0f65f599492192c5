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
class DeltaConfig:
    """A gated delta net: a recurrent layer in the place of attention."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`: value head v reads key head v // (their ratio)."""
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Taps of the causal convolution before it, the token's own among them."""
    is_grouped: bool = False
    """How the checkpoint lays out its projections: by key head (qwen3_next), or q, k, v each whole
    (qwen3_5)."""

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return (
            2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of gated MLPs: each token takes the few that its router likes best."""

    num_experts: int
    num_experts_per_tok: int
    width: int
    """Channels of one expert."""
    shared_width: int = 0
    """Channels of the expert that every token takes, behind a gate of its own; 0: there is none."""
    renormalise: bool = True
    """The weights of the chosen ones are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have an ordinary MLP instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the llama kind, as its checkpoint describes it."""

    family: str
    """A key of `models.registry.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Channels of the MLP; 0 in families that have experts in every layer."""
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

    zero_centred_norms: bool = False
    """Norms multiply by 1 + weight, in fp32. The norm inside a delta net does not."""
    attn_output_gate: bool = False
    """Attention's output is multiplied by sigmoid of a gate, whose rows lie beside each head's in
    q_proj."""
    delta: DeltaConfig | None = None
    delta_layers: tuple[bool, ...] = ()
    """Whether layer i is a gated delta net; empty: none is."""
    experts: ExpertsConfig | None = None
    num_mtp_layers: int = 0
    """Layers of its own that draft tokens (multi-token prediction), where the checkpoint has
    them. The first is used: attention, with an MLP of the kind that layer 0 has."""
    mtp_embedding: bool = False
    """That layer reads tokens from an embedding of its own, not from the model's."""
    mtp_head: bool = False
    """What it makes goes through a head of its own, not through the model's."""

    @property
    def is_hybrid(self) -> bool:
        """Whether requests have a recurrent state beside their KV."""
        return any(self.delta_layers)

    @property
    def num_kv_layers(self) -> int:
        """Layers with a KV cache."""
        return self.num_layers - sum(self.delta_layers)

    def is_delta(self, layer: int) -> bool:
        """Whether `layer` is a gated delta net; else it is attention."""
        return bool(self.delta_layers) and self.delta_layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

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
