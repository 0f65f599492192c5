"""config.json -> ModelConfig: both styles, every class default, and every refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests.tiny import CONFIGS, oracle_model
from unisono.models.config import (
    ConfigError,
    ModelConfig,
    RopeConfig,
    max_model_len_limit,
)
from unisono.models.config_reader import read_model_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
}


def written(directory: Path, family: str = "llama", **fields: Any) -> Path:
    """A directory with a config.json of `fields` over SMALL; a field of ... is left out."""
    values = {"model_type": family, **SMALL, **fields}
    directory.mkdir(exist_ok=True)
    text = json.dumps({key: value for key, value in values.items() if value is not ...})
    (directory / "config.json").write_text(text)
    return directory


def read(directory: Path, family: str = "llama", **fields: Any) -> ModelConfig:
    return read_model_config(written(directory, family, **fields))


def refusal(directory: Path, family: str = "llama", **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(directory, family, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.mark.parametrize("name", CONFIGS)
def test_reads_what_transformers_writes(name: str, tmp_path: Path) -> None:
    model = oracle_model(name)
    model.save_pretrained(tmp_path)
    config, oracle = read_model_config(tmp_path), model.config
    assert config.family == oracle.model_type
    assert config.vocab_size == oracle.vocab_size
    assert config.hidden_size == oracle.hidden_size
    assert config.intermediate_size == oracle.intermediate_size
    assert config.num_layers == oracle.num_hidden_layers
    assert config.num_heads == oracle.num_attention_heads
    assert config.num_kv_heads == oracle.num_key_value_heads
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
    assert config.rms_norm_eps == oracle.rms_norm_eps
    assert config.max_position_embeddings == oracle.max_position_embeddings
    assert config.tie_word_embeddings == oracle.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.dtype == "float32"
    names = dict(model.named_parameters())
    prefix = "model.layers.1."
    assert config.qkv_bias == (prefix + "self_attn.q_proj.bias" in names)
    assert config.o_bias == (prefix + "self_attn.o_proj.bias" in names)
    assert config.mlp_bias == (prefix + "mlp.up_proj.bias" in names)
    assert config.qk_norm == (prefix + "self_attn.q_norm.weight" in names)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    assert [config.window_of(i) for i in range(config.num_layers)] == [w or 0 for w in windows]
    rope = oracle.rope_parameters
    assert (config.rope.rope_type, config.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    for field in ("factor", "low_freq_factor", "original_max_position_embeddings"):
        if field in rope:
            assert getattr(config.rope, field) == rope[field]
    for field in ("short_factor", "long_factor"):
        assert list(getattr(config.rope, field)) == rope.get(field, [])


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")]
)
def test_class_defaults(family: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    config = read_model_config(tmp_path)
    oracle = getattr(transformers, f"{kind}Config")()
    assert config.vocab_size == oracle.vocab_size
    assert config.hidden_size == oracle.hidden_size
    assert config.intermediate_size == oracle.intermediate_size
    assert config.num_layers == oracle.num_hidden_layers
    assert config.num_heads == oracle.num_attention_heads
    assert config.num_kv_heads == oracle.num_key_value_heads
    assert config.head_dim == getattr(oracle, "head_dim", 4096 // 32)
    assert config.rms_norm_eps == oracle.rms_norm_eps
    assert config.max_position_embeddings == oracle.max_position_embeddings
    assert config.bos_token_id == oracle.bos_token_id
    eos = oracle.eos_token_id
    assert config.eos_token_ids == (() if eos is None else (eos,))
    assert config.tie_word_embeddings == oracle.tie_word_embeddings
    assert config.rope == RopeConfig(rotary_dim=config.head_dim, theta=10000.0)
    assert config.sliding_windows == ()


def test_both_styles_read_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = read(
        tmp_path / "old",
        torch_dtype="bfloat16",
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", **scaling},
    )
    oldest = read(
        tmp_path / "oldest",
        torch_dtype="torch.bfloat16",
        rope_theta=500000,
        rope_scaling={"type": "llama3", **scaling},
    )
    new = read(
        tmp_path / "new",
        dtype="bfloat16",
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
    )
    assert old == oldest == new
    assert new.rope.theta == 500000.0
    assert new.dtype == "bfloat16"


def test_the_rope_object_wins_over_the_top_level(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        rope_theta=7.0,
        partial_rotary_factor=0.25,
        rope_parameters={"rope_theta": 9.0, "partial_rotary_factor": 0.5},
    )
    assert (config.rope.theta, config.rope.rotary_dim) == (9.0, 8)
    config = read(tmp_path, rope_theta=7.0, partial_rotary_factor=0.25, rope_scaling=None)
    assert (config.rope.theta, config.rope.rotary_dim) == (7.0, 4)


def test_original_length_at_top_level_wins_and_defaults_to_max_position(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    absent = read(tmp_path, max_position_embeddings=128, rope_scaling=rope)
    assert absent.rope.original_max_position_embeddings == 128
    inside = {**rope, "original_max_position_embeddings": 32}
    assert read(tmp_path, rope_scaling=inside).rope.original_max_position_embeddings == 32
    both = read(tmp_path, rope_scaling=inside, original_max_position_embeddings=64)
    assert both.rope.original_max_position_embeddings == 64


def test_yarn_and_longrope_derive_the_factor(tmp_path: Path) -> None:
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    yarn = read(tmp_path, **lengths, rope_scaling={"rope_type": "yarn", "factor": None})
    assert yarn.rope.factor == 4.0
    lists = {"short_factor": [1.0] * 8, "long_factor": [2] * 8}
    long = read(tmp_path, **lengths, rope_scaling={"rope_type": "longrope", **lists})
    assert long.rope.factor == 4.0
    assert long.rope.long_factor == (2.0,) * 8


def test_yarn_fields(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 16,
        "beta_slow": None,
        "truncate": False,
        "mscale": 0.5,
        "mscale_all_dim": 1,
        "attention_factor": 1.25,
    }
    assert read(tmp_path, max_position_embeddings=64, rope_parameters=rope).rope == RopeConfig(
        rope_type="yarn",
        rotary_dim=16,
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=16.0,
        beta_slow=1.0,
        truncate=False,
        mscale=0.5,
        mscale_all_dim=1.0,
        attention_factor=1.25,
    )


def test_eos_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    directory = written(tmp_path, eos_token_id=[151645, 7])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 151643]}')
    assert read_model_config(directory).eos_token_ids == (151645, 7, 151643)
    # The class default (2) stands only where neither file has a word.
    written(tmp_path)
    assert read_model_config(directory).eos_token_ids == (7, 151643)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_model_config(directory).eos_token_ids == (2,)
    written(tmp_path, eos_token_id=None)
    assert read_model_config(directory).eos_token_ids == ()


def test_kv_heads_absent_or_null(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=...).num_kv_heads == 4
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4
    assert read(tmp_path, "qwen3", num_key_value_heads=None).num_kv_heads == 4
    # The constant of the qwen classes, not the number of heads.
    wide = {"num_attention_heads": 64, "hidden_size": 512, "num_key_value_heads": ...}
    assert read(tmp_path, "qwen2", **wide).num_kv_heads == 32


def test_head_dim_absent_or_null(tmp_path: Path) -> None:
    assert read(tmp_path).head_dim == 16
    assert read(tmp_path, head_dim=None).head_dim == 16
    assert read(tmp_path, head_dim=24).head_dim == 24
    assert read(tmp_path, "qwen2", head_dim=None).head_dim == 16
    assert read(tmp_path, "qwen3").head_dim == 128
    assert "head_dim is None" in refusal(tmp_path, "qwen3", head_dim=None)


def test_biases_follow_the_family(tmp_path: Path) -> None:
    def biases(family: str, **fields: Any) -> tuple[bool, bool, bool]:
        config = read(tmp_path, family, **fields)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    both = {"attention_bias": True, "mlp_bias": True}
    assert biases("llama") == (False, False, False)
    assert biases("llama", **both) == (True, True, True)
    assert biases("qwen2") == (True, False, False)
    assert biases("qwen2", **both) == (True, False, False)
    assert biases("qwen3") == (False, False, False)
    assert biases("qwen3", **both) == (True, True, False)


def test_sliding_windows(tmp_path: Path) -> None:
    def windows(**fields: Any) -> tuple[int, ...]:
        return read(tmp_path, "qwen2", num_hidden_layers=4, **fields).sliding_windows

    on = {"use_sliding_window": True}
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(sliding_window=6, max_window_layers=2) == ()
    assert windows(sliding_window=0, use_sliding_window=False) == ()
    assert windows(**on, sliding_window=6, max_window_layers=2) == (0, 0, 6, 6)
    assert windows(**on, max_window_layers=3) == (0, 0, 0, 4096)
    assert windows(**on, sliding_window=6, max_window_layers=0) == (6, 6, 6, 6)
    assert windows(**on, sliding_window=6) == ()
    assert windows(**on, sliding_window=None, max_window_layers=0) == ()
    assert windows(**on, sliding_window=6, layer_types=kinds) == (6, 0, 6, 0)
    assert read(tmp_path, "llama", sliding_window=6, use_sliding_window=True).window_of(1) == 0


def test_sliding_windows_that_cannot_be_meant(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert "use_sliding_window" in refusal(tmp_path, "qwen3", layer_types=kinds)
    assert "2 layers" in refusal(tmp_path, "qwen3", layer_types=kinds[:1])
    assert "chunked" in refusal(tmp_path, "qwen2", layer_types=["chunked_attention"] * 2)


def test_architectures_name_the_family_where_model_type_is_absent(tmp_path: Path) -> None:
    config = read(tmp_path, model_type=..., architectures=["Qwen2ForCausalLM"])
    assert config.family == "qwen2"
    assert read(tmp_path, architectures=None).family == "llama"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported; legal: llama, qwen2"),
        ({"model_type": ..., "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"model_type": ...}, "legal: llama, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "legal: LlamaForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; legal: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "method 'awq'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads do not divide"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "64 is not a multiple of 5"),
        ({"head_dim": 15}, "15 rotary channels"),
        ({"dtype": "float8_e4m3fn"}, "legal: float32, bfloat16, float16"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, None]}, "eos_token_id is [1, None]"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope' is not supported; legal:"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "above low_freq_factor 4",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": []}},
            "short_factor is [1.0]; it must be a list of 8 numbers",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention is an object"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"partial_rotary_factor": 1.5}, "24 rotary channels of head_dim 16"),
    ],
    ids=str,
)
def test_refusals_name_field_value_and_rule(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, **fields)


def test_harmless_fields_are_accepted(tmp_path: Path) -> None:
    plain = read(tmp_path)
    assert plain == read(
        tmp_path,
        pretraining_tp=2,
        attention_dropout=0.1,
        quantization_config=None,
        rope_scaling=None,
        use_cache=False,
        initializer_range=0.1,
        transformers_version="4.30.0",
        _name_or_path="anything",
    )


@pytest.mark.parametrize("text", ["{", "[1]", "\ufeff{}", '{"hidden_size": 1' + "0" * 5000 + "}"])
def test_bad_json_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_generation_config_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not valid JSON"):
        read_model_config(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: not found; a model is a checkpoint directory"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        read_model_config(tmp_path)
    named = tmp_path / "model.safetensors"
    named.mkdir()
    with pytest.raises(ConfigError, match=r"model\.safetensors/config\.json: not found"):
        read_model_config(named)
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="give the directory"):
        read_model_config(file)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        read_model_config(text)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: Is a directory"):
        read_model_config(tmp_path)


def with_weights(directory: Path, tied: bool, **tensors: torch.Tensor) -> ModelConfig:
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    written(directory, tie_word_embeddings=tied)
    safetensors.torch.save_file(
        {names[key]: tensor for key, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return read_model_config(directory)


def test_the_checkpoint_decides_whether_the_embedding_is_the_head(tmp_path: Path) -> None:
    embed = torch.arange(12.0).view(4, 3)
    assert with_weights(tmp_path, False, embed=embed, head=embed + 1).tie_word_embeddings is False
    assert with_weights(tmp_path, False, embed=embed).tie_word_embeddings is True
    assert with_weights(tmp_path, True, embed=embed).tie_word_embeddings is True
    copy = embed.clone()
    assert with_weights(tmp_path, True, embed=embed, head=copy).tie_word_embeddings is True
    copy[3, 2] = -1
    assert with_weights(tmp_path, True, embed=embed, head=copy).tie_word_embeddings is False


def test_dtype_falls_back_on_the_embedding(tmp_path: Path) -> None:
    embed = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert with_weights(tmp_path, True, embed=embed).dtype == "bfloat16"


def test_longest_request(tmp_path: Path) -> None:
    def limit(**rope: Any) -> int:
        lists = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
        llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        fields = {**rope, **lists, **llama3}
        return max_model_len_limit(
            read(tmp_path, max_position_embeddings=128, rope_parameters=fields)
        )

    assert limit(rope_type="default") == 128
    assert limit(rope_type="linear", factor=2.5) == 320
    assert limit(rope_type="dynamic", factor=6.0) == 768
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) == 256
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=16) == 128
    assert limit(rope_type="llama3", factor=8.0, original_max_position_embeddings=64) == 128
    assert limit(rope_type="longrope", factor=8.0, original_max_position_embeddings=64) == 128
