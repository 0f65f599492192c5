"""Checkpoint -> ModelConfig: config.json and generation_config.json, or a GGUF file.

Torch-free. Class defaults, field names and the order in which two spellings win are those of
transformers 4 and 5; what would change the arithmetic and is not supported is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unisono.models.config import ConfigError, ModelConfig, RopeConfig
from unisono.models.config_defaults import DEFAULTS
from unisono.models.fields import Fields, check_config, head_dim_of
from unisono.models.gguf_config import read_gguf_config
from unisono.models.headers import has_safetensors, read_headers, same_bytes
from unisono.models.hybrid_config import (
    WITH_DELTA_NETS,
    text_fields,
    with_drafter,
    with_hybrid_fields,
)
from unisono.models.registry import family_of
from unisono.models.tensor_info import TensorInfo

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Stored dtype of a tensor -> its name in a configuration."""


def read_model_config(path: Path, *, use_headers: bool = True) -> ModelConfig:
    """Read the configuration of the checkpoint at `path`: a directory or a GGUF file.

    Weights are not read, their headers are: they say whether the checkpoint has a head of its
    own, and a drafter. Without `use_headers`, where weights will be random, the weight files of a
    directory are not looked at. Raises ConfigError (CheckpointError for the headers) with one line.
    """
    if path.is_dir():
        return _read_directory(path, use_headers)
    if path.suffix == ".safetensors" and path.is_file():
        raise ConfigError(f"{path}: a weight file; give the directory that holds its config.json")
    if path.is_file():
        return read_gguf_config(path)
    raise ConfigError(f"{path}: not found; a model is a checkpoint directory or a .gguf file")


def _read_directory(directory: Path, use_headers: bool) -> ModelConfig:
    where = directory / "config.json"
    top = Fields(_read_json_object(where), str(where))
    family = family_of(top.text("model_type"), top.texts("architectures") or (), top.where)
    fields = text_fields(top, family)
    config = _read_fields(family, fields, _read_generation_config(directory))
    # A directory without weights can still be inspected; loading it is what fails.
    headers = read_headers(directory) if use_headers and has_safetensors(directory) else {}
    config = with_drafter(_settle_head(config, headers), fields, headers if use_headers else None)
    return _settle_dtype(config, fields, headers)


def _read_json_object(path: Path) -> Mapping[str, object]:
    """Read a JSON object. Raises ConfigError naming the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; a checkpoint directory holds one") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def _read_fields(family: str, fields: Fields, generation: Fields) -> ModelConfig:
    """Everything that config.json itself decides."""
    _refuse_unsupported(fields, family)
    default = DEFAULTS[family]
    hidden = fields.whole("hidden_size", default.hidden_size)
    heads = fields.whole("num_attention_heads", default.num_heads)
    layers = fields.whole("num_hidden_layers", default.num_layers)
    length = fields.whole("max_position_embeddings", default.max_position_embeddings)
    if default.head_dim is None:
        head_dim = head_dim_of(fields, "head_dim", hidden, heads)
    else:
        head_dim = fields.whole("head_dim", default.head_dim)
    attention_bias = family != "qwen2" and fields.flag("attention_bias", False)
    config = ModelConfig(
        family=family,
        vocab_size=fields.whole("vocab_size", default.vocab_size),
        hidden_size=hidden,
        intermediate_size=default.intermediate_size
        and fields.whole("intermediate_size", default.intermediate_size),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.whole_or_none("num_key_value_heads", default.num_kv_heads) or heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=length,
        rope=_read_rope(fields, head_dim, length, default.partial_rotary_factor),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family not in ("llama", "qwen2"),
        sliding_windows=_read_windows(fields, family, layers),
        bos_token_id=_read_bos(fields, default.bos_token_id),
        eos_token_ids=_read_eos(fields, generation, default.eos_token_id),
    )
    return check_config(with_hybrid_fields(config, fields), fields.where)


def _refuse_unsupported(fields: Fields, family: str) -> None:
    """Refuse what changes the arithmetic and the family does not know."""
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fault("hidden_act", "legal: silu")
    if family in WITH_DELTA_NETS:
        for name, legal in (("attn_output_gate", True), ("use_sliding_window", False)):
            if fields.flag(name, legal) is not legal:
                raise fields.fault(name, f"legal for {family}: {str(legal).lower()}")
    for name in ("quantization_config", "compression_config"):
        if fields.values.get(name):
            method = fields.mapping(name).get("quant_method", "unnamed")
            raise ConfigError(
                f"{fields.where}: {name} (method {method!r}) is not supported; give a checkpoint "
                "in float32, bfloat16 or float16, or a GGUF file"
            )


def _read_generation_config(directory: Path) -> Fields:
    path = directory / "generation_config.json"
    return Fields(_read_json_object(path) if path.exists() else {}, str(path))


def _read_eos(fields: Fields, generation: Fields, default: int | None) -> tuple[int, ...]:
    """Union of both files in order; the class default only where neither has the field."""
    name = "eos_token_id"
    if name not in fields and name not in generation:
        return () if default is None else (default,)
    return tuple(dict.fromkeys(fields.token_ids(name) + generation.token_ids(name)))


def _read_bos(fields: Fields, default: int | None) -> int | None:
    ids = fields.token_ids("bos_token_id")
    return default if "bos_token_id" not in fields else ids[0] if ids else None


def _read_windows(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Sliding windows of the qwen families: only where use_sliding_window says so."""
    if family == "llama" or family in WITH_DELTA_NETS:
        return ()
    slides = fields.flag("use_sliding_window", False)
    window = fields.whole_or_none("sliding_window", 4096) if slides else None
    types = fields.texts("layer_types")
    if types is None and family == "qwen3_moe":
        sliding = [window is not None] * layers
    elif types is None:
        first = fields.whole("max_window_layers", 28, least=0)
        sliding = [window is not None and layer >= first for layer in range(layers)]
    else:
        if len(types) != layers or not {*types} <= {"full_attention", "sliding_attention"}:
            raise fields.fault(
                "layer_types",
                f"it must name full_attention or sliding_attention for each of {layers} layers",
            )
        sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding):
        return ()
    if window is None:
        raise fields.fault("layer_types", "sliding_attention needs use_sliding_window and a window")
    return tuple(window if narrow else 0 for narrow in sliding)


def _read_rope(top: Fields, head_dim: int, max_position: int, default_partial: float) -> RopeConfig:
    """Both spellings: a value in the rope object wins over the top level, then the default."""
    name = "rope_scaling" if top.mapping("rope_scaling") else "rope_parameters"
    rope = Fields(top.mapping(name), f"{top.where}: {name}")
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"{rope.where}: {key} is an object; one rope for all layers is legal")
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{rope.where}: rope_type {rope_type!r} is not supported; "
            f"legal: {', '.join(ROPE_TYPES)}"
        )
    theta = (rope if "rope_theta" in rope else top).number("rope_theta", 10000.0)
    source = rope if rope.values.get("partial_rotary_factor") is not None else top
    partial = source.number_or_none("partial_rotary_factor")
    rotary_dim = int(head_dim * (default_partial if partial is None else partial))
    plain = RopeConfig(rope_type=rope_type, theta=theta, rotary_dim=rotary_dim)
    if rope_type == "default":
        return plain
    if rope_type in ("linear", "dynamic"):
        return replace(plain, factor=_stretch(rope))
    source = top if top.values.get("original_max_position_embeddings") is not None else rope
    original = source.whole_or_none("original_max_position_embeddings", least=2) or max_position
    trained = replace(plain, original_max_position_embeddings=original)
    readers = {"llama3": _read_llama3, "yarn": _read_yarn, "longrope": _read_longrope}
    return readers[rope_type](trained, rope, max_position)


def _stretch(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.fault("factor", "it must be at least 1")
    return factor


def _read_llama3(trained: RopeConfig, rope: Fields, max_position: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.fault("high_freq_factor", f"it must be above low_freq_factor {low:g}")
    return replace(trained, factor=_stretch(rope), low_freq_factor=low, high_freq_factor=high)


def _read_yarn(trained: RopeConfig, rope: Fields, max_position: int) -> RopeConfig:
    """Without a factor: how far the positions reach beyond the original length."""
    if trained.theta <= 1.0:
        raise ConfigError(f"{rope.where}: rope_theta {trained.theta:g} must be above 1 for yarn")
    whole = max_position / trained.original_max_position_embeddings
    return replace(
        trained,
        factor=whole if rope.values.get("factor") is None else _stretch(rope),
        beta_fast=rope.number_or_none("beta_fast", zero=True) or trained.beta_fast,
        beta_slow=rope.number_or_none("beta_slow", zero=True) or trained.beta_slow,
        truncate=rope.flag("truncate", True),
        mscale=rope.number_or_none("mscale", zero=True) or 0.0,
        mscale_all_dim=rope.number_or_none("mscale_all_dim", zero=True) or 0.0,
        attention_factor=rope.number_or_none("attention_factor"),
    )


def _read_longrope(trained: RopeConfig, rope: Fields, max_position: int) -> RopeConfig:
    factor = rope.number_or_none("factor")
    pairs = trained.rotary_dim // 2
    return replace(
        trained,
        factor=max_position / trained.original_max_position_embeddings
        if factor is None
        else factor,
        attention_factor=rope.number_or_none("attention_factor"),
        short_factor=rope.numbers("short_factor", pairs),
        long_factor=rope.numbers("long_factor", pairs),
    )


def _settle_head(config: ModelConfig, headers: Mapping[str, TensorInfo]) -> ModelConfig:
    """Let the checkpoint say whether the embedding is the head.

    Without a head of its own it is. A tied configuration beside a head with other values is wrong
    about itself: the head that is there is used, as transformers does.
    """
    embedding, head = headers.get("model.embed_tokens.weight"), headers.get("lm_head.weight")
    if embedding is None:
        return config
    tied = head is None or (config.tie_word_embeddings and same_bytes(embedding, head))
    return replace(config, tie_word_embeddings=tied)


def _settle_dtype(
    config: ModelConfig, fields: Fields, headers: Mapping[str, TensorInfo]
) -> ModelConfig:
    """`dtype` (transformers 5) or `torch_dtype` (4); silent: what the embedding is stored in."""
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name)
    if dtype is None:
        stored = headers.get("model.embed_tokens.weight")
        dtype = DTYPES.get(stored.dtype, config.dtype) if stored else config.dtype
    if dtype.removeprefix("torch.") not in DTYPES.values():
        raise fields.fault(name, f"legal: {', '.join(DTYPES.values())}")
    return replace(config, dtype=dtype.removeprefix("torch."))
