"""config.json of hybrids -> ModelConfig: every field, every class default, every refusal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests.tiny import HYBRIDS, VISION, WRAPPERS, write_checkpoint, write_wrapper
from unisono.models.config import ConfigError, ModelConfig
from unisono.models.config_reader import read_model_config

FAMILIES = {
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
}


def written(directory: Path, family: str, **fields: Any) -> Path:
    """A directory with a config.json of `fields` over SMALL; a field of ... is left out."""
    values = {"model_type": family, **SMALL, **fields}
    directory.mkdir(exist_ok=True)
    text = json.dumps({key: value for key, value in values.items() if value is not ...})
    (directory / "config.json").write_text(text)
    return directory


def read(directory: Path, family: str, **fields: Any) -> ModelConfig:
    return read_model_config(written(directory, family, **fields))


def wrapped(directory: Path, outer: dict[str, Any], **inner: Any) -> ModelConfig:
    """A wrapper of a small qwen3_5 with these fields at either level."""
    text = {"model_type": "qwen3_5_text", **SMALL, **inner}
    values = {"model_type": "qwen3_5", "text_config": text, "vision_config": VISION, **outer}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


@pytest.mark.parametrize("name", HYBRIDS)
def test_reads_what_transformers_writes(name: str, tmp_path: Path) -> None:
    oracle = write_checkpoint(name, tmp_path)
    config, want = read_model_config(tmp_path), oracle.config
    assert config.family == want.model_type.removesuffix("_text")
    assert config.vocab_size == want.vocab_size
    assert config.hidden_size == want.hidden_size
    assert config.intermediate_size == getattr(want, "intermediate_size", 0)
    assert config.num_layers == want.num_hidden_layers
    assert config.num_heads == want.num_attention_heads
    assert config.num_kv_heads == want.num_key_value_heads
    assert config.head_dim == want.head_dim
    assert config.tie_word_embeddings == want.tie_word_embeddings
    assert config.qk_norm
    assert not config.qkv_bias
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert (config.sliding_windows, config.num_mtp_layers) == ((), 0)
    assert config.rope.theta == want.rope_parameters["rope_theta"]
    assert config.rope.rope_type == "default"
    layers = oracle.model.layers
    assert [config.is_delta(i) for i in range(len(layers))] == [
        hasattr(layer, "linear_attn") for layer in layers
    ]
    assert [config.has_experts(i) for i in range(len(layers))] == [
        hasattr(layer.mlp, "experts") for layer in layers
    ]
    gated = name != "qwen3-moe"
    assert (config.zero_centred_norms, config.attn_output_gate) == (gated, gated)
    assert config.rope.rotary_dim == config.head_dim // (4 if gated else 1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_delta_nets_and_experts_of_what_transformers_writes(name: str, tmp_path: Path) -> None:
    want = write_checkpoint(name, tmp_path).config
    config = read_model_config(tmp_path)
    if name == "qwen3-moe":
        assert config.delta is None
    else:
        assert asdict(config.delta) == {  # type: ignore[call-overload]
            "num_key_heads": want.linear_num_key_heads,
            "num_value_heads": want.linear_num_value_heads,
            "key_head_dim": want.linear_key_head_dim,
            "value_head_dim": want.linear_value_head_dim,
            "conv_width": want.linear_conv_kernel_dim,
            "is_grouped": name == "qwen3-next",
        }
    if name == "qwen3.5":
        assert config.experts is None
        return
    assert asdict(config.experts) == {  # type: ignore[call-overload]
        "num_experts": want.num_experts,
        "num_experts_per_tok": want.num_experts_per_tok,
        "width": want.moe_intermediate_size,
        "shared_width": getattr(want, "shared_expert_intermediate_size", 0),
        "renormalise": getattr(want, "norm_topk_prob", True),
        "dense_layers": tuple(getattr(want, "mlp_only_layers", ())),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_class_defaults(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    config, want = read_model_config(tmp_path), getattr(transformers, FAMILIES[family])()
    assert config.vocab_size == want.vocab_size
    assert config.hidden_size == want.hidden_size
    assert config.intermediate_size == getattr(want, "intermediate_size", 0)
    assert config.num_layers == want.num_hidden_layers
    assert config.num_heads == want.num_attention_heads
    assert config.num_kv_heads == want.num_key_value_heads
    assert config.head_dim == getattr(want, "head_dim", 64)
    assert config.rms_norm_eps == want.rms_norm_eps
    assert config.max_position_embeddings == want.max_position_embeddings
    assert config.tie_word_embeddings == want.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    partial = want.rope_parameters.get("partial_rotary_factor", 1.0)
    assert config.rope.rotary_dim == int(config.head_dim * partial)
    assert config.rope.theta == want.rope_parameters["rope_theta"]
    kinds = getattr(want, "layer_types", None)
    if family == "qwen3_moe":
        assert (kinds, config.delta, config.delta_layers) == (None, None, ())
    else:
        assert config.delta_layers == tuple(kind == "linear_attention" for kind in kinds)
        assert config.delta is not None
        assert config.delta.num_key_heads == want.linear_num_key_heads
        assert config.delta.num_value_heads == want.linear_num_value_heads
        assert config.delta.key_head_dim == want.linear_key_head_dim
        assert config.delta.value_head_dim == want.linear_value_head_dim
        assert config.delta.conv_width == want.linear_conv_kernel_dim
    if family == "qwen3_5":
        assert config.experts is None
        return
    assert config.experts is not None
    assert config.experts.num_experts == want.num_experts
    assert config.experts.num_experts_per_tok == want.num_experts_per_tok
    assert config.experts.width == want.moe_intermediate_size
    assert config.experts.shared_width == getattr(want, "shared_expert_intermediate_size", 0)
    assert config.experts.renormalise == getattr(want, "norm_topk_prob", True)
    assert config.experts.dense_layers == ()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_reads_as_the_text_model_in_it(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "text")
    write_wrapper(name, tmp_path / "wrapper")
    outer = json.loads((tmp_path / "wrapper" / "config.json").read_text())
    assert "text_config" in outer
    assert "hidden_size" not in outer
    assert read_model_config(tmp_path / "wrapper") == read_model_config(tmp_path / "text")


def test_fields_of_either_level_of_a_wrapper(tmp_path: Path) -> None:
    plain = wrapped(tmp_path, {})
    assert (plain.tie_word_embeddings, plain.eos_token_ids) == (False, ())
    for outer, inner in (({"tie_word_embeddings": True}, {}), ({}, {"tie_word_embeddings": True})):
        assert wrapped(tmp_path, outer, **inner).tie_word_embeddings
    # transformers ties the wrapper by the wrapper's own word.
    outer = {"tie_word_embeddings": False}
    assert not wrapped(tmp_path, outer, tie_word_embeddings=True).tie_word_embeddings
    for name in ("dtype", "torch_dtype"):
        assert wrapped(tmp_path, {name: "bfloat16"}).dtype == "bfloat16"
        assert wrapped(tmp_path, {}, **{name: "bfloat16"}).dtype == "bfloat16"
    assert wrapped(tmp_path, {"dtype": None}, dtype="float16").dtype == "float16"
    assert wrapped(tmp_path, {"bos_token_id": 5}).bos_token_id == 5
    assert wrapped(tmp_path, {}, bos_token_id=6).bos_token_id == 6


def test_all_ids_that_end_an_answer_count(tmp_path: Path) -> None:
    assert wrapped(tmp_path, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert wrapped(tmp_path, {}, eos_token_id=8).eos_token_ids == (8,)
    assert wrapped(tmp_path, {"eos_token_id": [7, 8]}, eos_token_id=8).eos_token_ids == (8, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert wrapped(tmp_path, {"eos_token_id": 7}, eos_token_id=8).eos_token_ids == (8, 7, 9)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_a_quantised_wrapper_is_refused_by_either_level(name: str, tmp_path: Path) -> None:
    for outer, inner in (({name: {"quant_method": "fp8"}}, {}), ({}, {name: {"a": 1}})):
        with pytest.raises(ConfigError, match=f"{name} \\(method '(fp8|unnamed)'\\) is not"):
            wrapped(tmp_path, outer, **inner)


def test_another_model_in_a_wrapper_is_refused(tmp_path: Path) -> None:
    words = "text_config: model_type is 'qwen3_next'; legal in a qwen3_5: qwen3_5, qwen3_5_text$"
    with pytest.raises(ConfigError, match=words):
        wrapped(tmp_path, {}, model_type="qwen3_next")
    with pytest.raises(ConfigError, match="text_config is 3; it must be an object"):
        read(tmp_path, "qwen3_5", text_config=3)


def test_a_text_model_by_either_name(tmp_path: Path) -> None:
    for family in ("qwen3_5", "qwen3_5_moe"):
        one = read(tmp_path, family, num_experts=4, num_experts_per_tok=2)
        assert one == read(tmp_path, f"{family}_text", num_experts=4, num_experts_per_tok=2)
        assert one.family == family


def test_kinds_of_layers(tmp_path: Path) -> None:
    def layers(**fields: Any) -> str:
        config = read(tmp_path, "qwen3_5", **fields)
        assert config.is_hybrid == (config.delta is not None)
        assert config.num_kv_layers == sum(not config.is_delta(i) for i in range(4))
        return "".join("d" if config.is_delta(i) else "a" for i in range(4))

    assert layers() == "ddda"
    assert layers(full_attention_interval=2) == "dada"
    assert layers(full_attention_interval=1) == "aaaa"
    assert layers(full_attention_interval=3) == "ddad"
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert layers(layer_types=kinds) == layers(layer_types=kinds, full_attention_interval=2)
    assert layers(layer_types=kinds) == "adda"
    assert layers(layer_types=["full_attention"] * 4) == "aaaa"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_which_layers_have_experts(family: str, tmp_path: Path) -> None:
    def layers(**fields: Any) -> str:
        config = read(tmp_path, family, **fields)
        return "".join("e" if config.has_experts(i) else "." for i in range(4))

    assert layers() == "eeee"
    assert layers(mlp_only_layers=None) == "eeee"
    assert layers(mlp_only_layers=[0, 3]) == ".ee."
    assert layers(decoder_sparse_step=2) == ".e.e"
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == "...e"
    none = ({"num_experts": 0}, {"decoder_sparse_step": 5}, {"mlp_only_layers": [0, 1, 2, 3]})
    for fields in none:
        assert read(tmp_path, family, **fields).experts is None


def test_the_number_of_experts_by_either_name(tmp_path: Path) -> None:
    def count(family: str, **fields: Any) -> int:
        experts = read(tmp_path, family, num_experts_per_tok=2, **fields).experts
        assert experts is not None
        return experts.num_experts

    assert count("qwen3_moe", num_experts=6) == 6
    assert count("qwen3_moe", num_local_experts=7) == 7
    assert count("qwen3_next", num_experts=8) == 8


def test_the_weights_of_the_chosen_experts(tmp_path: Path) -> None:
    def renormalises(family: str, **fields: Any) -> bool:
        experts = read(tmp_path, family, **fields).experts
        assert experts is not None
        return experts.renormalise

    assert not renormalises("qwen3_moe")
    assert renormalises("qwen3_moe", norm_topk_prob=True)
    assert renormalises("qwen3_next")
    assert not renormalises("qwen3_next", norm_topk_prob=False)
    assert renormalises("qwen3_5_moe", norm_topk_prob=True)


def test_rotary_channels(tmp_path: Path) -> None:
    def channels(family: str, **fields: Any) -> int:
        return read(tmp_path, family, **fields).rope.rotary_dim

    assert channels("qwen3_moe") == 16
    assert channels("qwen3_next") == 4
    assert channels("qwen3_next", partial_rotary_factor=0.5) == 8
    assert channels("qwen3_5", rope_parameters={"partial_rotary_factor": 1.0}) == 16
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert channels("qwen3_5", rope_parameters=rope) == 4
    assert read(tmp_path, "qwen3_5") == read(tmp_path, "qwen3_5", rope_parameters=rope)


def test_head_dim_absent(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3_moe", head_dim=...).head_dim == 16
    assert read(tmp_path, "qwen3_moe", head_dim=None).head_dim == 16
    assert read(tmp_path, "qwen3_next", head_dim=...).head_dim == 256


def test_biases(tmp_path: Path) -> None:
    for family in FAMILIES:
        config = read(tmp_path, family, attention_bias=True, mlp_bias=True)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)


def test_sliding_windows_of_qwen3_moe_are_those_of_every_layer(tmp_path: Path) -> None:
    def windows(**fields: Any) -> tuple[int, ...]:
        return read(tmp_path, "qwen3_moe", **fields).sliding_windows

    assert windows(sliding_window=6) == ()
    assert windows(sliding_window=6, use_sliding_window=True, max_window_layers=2) == (6,) * 4
    assert windows(use_sliding_window=True) == (4096,) * 4
    assert windows(sliding_window=None, use_sliding_window=True) == ()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_tensors_say_how_many_layers_draft(layers: int, tmp_path: Path) -> None:
    directory = written(tmp_path, "qwen3_5", mtp_num_hidden_layers=1, num_nextn_predict_layers=3)
    assert read_model_config(directory).num_mtp_layers == 0
    names = [f"mtp.layers.{i}.{part}.weight" for i in range(layers) for part in ("a", "b")]
    for others, count in (([], layers), (["mtp.fc.weight"], max(layers, 1))):
        every = [*names, *others, "model.embed_tokens.weight"]
        tensors = {name: torch.zeros(2) for name in every}
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        # One without a layer is there in part, and what it lacks is named where it is to draft.
        assert read_model_config(directory).num_mtp_layers == count


def test_where_weights_are_random_there_is_the_drafter_that_is_announced(tmp_path: Path) -> None:
    def drafter(family: str, **fields: Any) -> tuple[int, bool]:
        config = read_model_config(written(tmp_path, family, **fields), use_headers=False)
        return config.num_mtp_layers, config.mtp_embedding

    assert drafter("qwen3_5", mtp_num_hidden_layers=2) == (2, False)
    assert drafter("qwen3_5", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True) == (1, 1)
    assert drafter("qwen3_5", mtp_use_dedicated_embeddings=True) == (0, False)
    assert drafter("qwen3_next", num_nextn_predict_layers=1) == (1, False)
    assert drafter("qwen3_moe", num_nextn_predict_layers=1) == (0, False)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("own", [(), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_the_tensors_say_what_a_drafter_has_of_its_own(
    own: tuple[str, ...], announced: bool, tmp_path: Path
) -> None:
    """B49: by key. An embedding that is announced and not there could not be replaced: it is
    missing (tests/models/test_hybrid_loading.py)."""
    written(tmp_path, "qwen3_5", mtp_use_dedicated_embeddings=announced)
    names = ["model.embed_tokens", "mtp.layers.0.a", *(f"mtp.{name}" for name in own)]
    tensors = {f"{name}.weight": torch.zeros(2) for name in names}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    config = read_model_config(tmp_path)
    found = (config.num_mtp_layers, config.mtp_embedding, config.mtp_head)
    assert found == (1, announced or "embed_tokens" in own, "lm_head" in own)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False; legal for qwen3_5: t"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window is True; legal for qwen3"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; legal: swish"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; legal: float"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; legal: silu"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "full_attention or linear_attent"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention"] * 4},
            "at least one of 4 layers must be full_attention",
        ),
        ("qwen3_5", {"full_attention_interval": 5}, "full_attention_interval is 5; at least one"),
        ("qwen3_5", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        (
            "qwen3_5",
            {"linear_num_key_heads": 4, "linear_num_value_heads": 6},
            "6 linear value heads do not divide into 4 linear key heads",
        ),
        ("qwen3_5", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ("qwen3_5", {"linear_value_head_dim": "8"}, "linear_value_head_dim is '8'"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be"),
        ("qwen3_next", {"num_experts": 4}, "num_experts_per_tok 10 is above num_experts 4"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 129},
            "num_experts_per_tok 129 is above num_ex",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"mlp_only_layers": [1, "2"]}, "mlp_only_layers is [1, '2']; it must be a"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1; it must be a list of whole"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (
            "qwen3_5_moe",
            {"norm_topk_prob": False},
            "norm_topk_prob is False; legal for qwen3_5_",
        ),
        ("qwen3_5_moe", {"num_experts": 0}, "num_experts is 0; it must be a whole number of at"),
        (
            "qwen3_5_moe",
            {"mlp_only_layers": [0]},
            "mlp_only_layers is [0]; every layer of a qwen3",
        ),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; every layer of a q"),
        ("qwen3_5", {"architectures": ["Qwen3_5MoeForCausalLM"]}, "legal: Qwen3_5ForConditionalG"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": 1}, "mtp_use_dedicated_embeddings is 1"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "mrope"}}, "rope_type 'mrope' is not supp"),
        ("qwen3_5", {"partial_rotary_factor": 0.1}, "1 rotary channels of head_dim 16"),
        ("qwen3_vl", {}, "model_type 'qwen3_vl' is not supported; legal: llama, qwen2, qwen3, q"),
    ],
    ids=str,
)
def test_refusals_name_field_value_and_rule(
    family: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, family, **fields)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert str(tmp_path) in message


def test_what_published_checkpoints_say_beside_is_accepted(tmp_path: Path) -> None:
    plain = read(tmp_path, "qwen3_5")
    assert plain == read(
        tmp_path,
        "qwen3_5",
        attn_output_gate=True,
        output_gate_type="swish",
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        mlp_only_layers=[],
        use_sliding_window=False,
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        attention_dropout=0.0,
        router_aux_loss_coef=0.001,
    )
