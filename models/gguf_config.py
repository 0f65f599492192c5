"""Metadata of a GGUF file -> ModelConfig. Torch-free; keys are those that llama.cpp writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unisono.models.config import ConfigError, ModelConfig, RopeConfig
from unisono.models.fields import Fields, check_config, head_dim_of
from unisono.models.gguf import GgufFile, open_gguf
from unisono.models.registry import family_of_gguf

_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LAYER = "model.layers.0."


def read_gguf_config(path: Path) -> ModelConfig:
    """Read the ModelConfig of a GGUF file; biases and tying follow from the tensors it has.

    Raises ConfigError naming the field. Tensors are float32 once unpacked, so that is the dtype.
    """
    with open_gguf(path) as gguf:
        family = family_of_gguf(gguf.metadata.get("general.architecture"), str(path))
        prefix = f"{gguf.metadata['general.architecture']}."
        own = {
            key.removeprefix(prefix): value
            for key, value in gguf.metadata.items()
            if key.startswith(prefix)
        }
        return _read(gguf, family, Fields(own, f"{path}: {prefix}*"))


def _read(gguf: GgufFile, family: str, fields: Fields) -> ModelConfig:
    hidden = fields.whole("embedding_length")
    heads = fields.whole("attention.head_count")
    length = fields.whole("context_length")
    head_dim = head_dim_of(fields, "attention.key_length", hidden, heads)
    _refuse_unsupported(fields, length, head_dim)
    tokens = Fields(gguf.metadata, str(gguf.path))
    names = (f"tokenizer.ggml.{name}" for name in _STOPS)
    stops = [token for name in names for token in tokens.token_ids(name)]
    has = gguf.tensors.__contains__
    return check_config(
        ModelConfig(
            family=family,
            vocab_size=_vocab_size(gguf),
            hidden_size=hidden,
            intermediate_size=fields.whole("feed_forward_length"),
            num_layers=fields.whole("block_count"),
            num_heads=heads,
            num_kv_heads=fields.whole("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=length,
            rope=_read_rope(gguf, family, fields, head_dim, length),
            tie_word_embeddings=not has("lm_head.weight"),
            qkv_bias=has(_LAYER + "self_attn.q_proj.bias"),
            o_bias=has(_LAYER + "self_attn.o_proj.bias"),
            mlp_bias=has(_LAYER + "mlp.down_proj.bias"),
            qk_norm=family == "qwen3",
            bos_token_id=tokens.whole_or_none("tokenizer.ggml.bos_token_id", least=0),
            eos_token_ids=tuple(dict.fromkeys(stops)),
        ),
        str(gguf.path),
    )


def _vocab_size(gguf: GgufFile) -> int:
    """Rows of the embedding: the count in the metadata, where there is one, may differ."""
    info = gguf.tensors.get("model.embed_tokens.weight")
    if info is None or len(info.shape) != 2 or not info.shape[0]:
        raise ConfigError(f"{gguf.path}: has no token_embd.weight with a row for each token")
    return info.shape[0]


def _refuse_unsupported(fields: Fields, length: int, head_dim: int) -> None:
    """Refuse what changes the arithmetic and no family here knows."""
    if fields.whole("expert_count", 0, least=0):
        raise fields.fault("expert_count", "mixtures of experts are not supported; legal: 0")
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise fields.fault("attention.value_length", f"it must be the key length {head_dim}")
    window = fields.whole_or_none("attention.sliding_window", least=0)
    if window and window < length:
        raise fields.fault("attention.sliding_window", f"legal: 0, or the context length {length}")


def _read_rope(
    gguf: GgufFile, family: str, fields: Fields, head_dim: int, length: int
) -> RopeConfig:
    plain = RopeConfig(
        theta=fields.number("rope.freq_base", 10000.0),
        rotary_dim=fields.whole("rope.dimension_count", head_dim),
    )
    # As llama.cpp reads it: linear where no type is given; older files have the factor elsewhere.
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "linear" and factor == 1.0:
        kind = "none"
    if family == "llama" and plain.rotary_dim != head_dim:
        # The interleaving of rotary halves would mean something else then.
        raise fields.fault("rope.dimension_count", f"it must be the head dimension {head_dim}")
    divisors = _frequency_divisors(gguf, plain.rotary_dim // 2)
    if kind not in ("none", "linear", "yarn"):
        raise fields.fault("rope.scaling.type", "legal: none, linear, yarn")
    if factor < 1.0:
        raise fields.fault("rope.scaling.factor", "it must be at least 1")
    if divisors and kind != "none":
        raise fields.fault("rope.scaling.type", "legal beside rope_freqs.weight: none")
    if divisors:
        # Frequencies divided one by one at every length: longrope with one list and no scale.
        return replace(
            plain,
            rope_type="longrope",
            original_max_position_embeddings=length,
            attention_factor=1.0,
            short_factor=divisors,
            long_factor=divisors,
        )
    if kind == "yarn":
        return _read_yarn(plain, fields, factor, length)
    return replace(plain, rope_type="linear", factor=factor) if kind == "linear" else plain


def _read_yarn(plain: RopeConfig, fields: Fields, factor: float, length: int) -> RopeConfig:
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if fields.number(f"rope.scaling.{name}", 1.0, zero=True) != 1.0:
            raise fields.fault(f"rope.scaling.{name}", "legal: 1")
    if fields.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True):
        raise fields.fault("rope.scaling.yarn_log_multiplier", "legal: 0")
    if plain.theta <= 1.0:
        raise fields.fault("rope.freq_base", "it must be above 1 for yarn")
    return replace(
        plain,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=fields.whole(
            "rope.scaling.original_context_length", length
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", plain.beta_fast),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", plain.beta_slow),
    )


def _frequency_divisors(gguf: GgufFile, pairs: int) -> tuple[float, ...]:
    """rope_freqs.weight, in which llama 3.1 files carry their rope scaling; () without it."""
    info = gguf.tensors.get("rope_freqs.weight")
    if info is None:
        return ()
    if info.shape != (pairs,):
        raise ConfigError(
            f"{gguf.path}: rope_freqs.weight has shape {[*info.shape]}; it must be [{pairs}]"
        )
    return tuple(gguf.rows("rope_freqs.weight", 0, pairs).tolist())
