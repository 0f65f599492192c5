"""GGUF files, written here with the library: config, tensors of every rank, tokenizer, damage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.closeness import assert_close, assert_same_bits
from tests.tiny import BASE
from unisono.models.checkpoint import open_checkpoint
from unisono.models.config import ConfigError, ModelConfig, RopeConfig
from unisono.models.config_reader import read_model_config
from unisono.models.gguf import GgufTokenizerData, open_gguf, read_gguf_tokenizer
from unisono.models.headers import CheckpointError, check_weights, read_headers
from unisono.models.ledger import fill_weights
from unisono.models.partition import ModelPartition
from unisono.models.rope import rope_frequencies

# Rows are multiples of the 32 elements of a block.
SIZES = {
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen2": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
QUANTISED = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
FLAT = (Kind.F32, Kind.F16, Kind.BF16)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Fields = Mapping[str, Any]


def oracle(family: str, **fields: Any) -> Any:
    """A transformers model with every tensor random."""
    values = {**BASE, "intermediate_size": 64, **SIZES[family], **fields}
    kind = CLASSES[family]
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**values)
    )
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    return model.eval()


def gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{leaf}"
    return f"{NAMES[stem]}.{leaf}"


def interleaved(name: str, values: numpy.ndarray, head_dim: int) -> numpy.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    if not any(part in name for part in ("q_proj", "k_proj")):
        return values
    heads = values.shape[0] // head_dim
    halves = values.reshape(heads, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(
    path: Path,
    family: str,
    model: Any,
    kind: Callable[[str], Kind] = lambda name: Kind.F32,
    scalars: Fields | None = None,
    tensors: Mapping[str, numpy.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Write `model` as a GGUF file; return the float32 tensors that reading must give."""
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (scalars or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    expected = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        stored = kind(name) if values.ndim == 2 else Kind.F32
        data = quantize(values, stored)
        expected[name] = torch.from_numpy(dequantize(data, stored).reshape(values.shape))
        if family == "llama":
            data = interleaved(name, data, head_dim)
        writer.add_tensor(gguf_name(name), numpy.ascontiguousarray(data), raw_dtype=stored)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def read_rank(path: Path, config: ModelConfig, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    specs = list(ModelPartition.of(config, ranks).weights(rank))
    filled = {spec.name: torch.full(spec.local_shape, torch.nan) for spec in specs}
    with open_checkpoint(path) as checkpoint:
        fill_weights(specs, filled, checkpoint, lambda *_: None)
        assert checkpoint.bytes_read == sum(map(checkpoint.nbytes, specs))
    return filled


def assert_ranks_read(path: Path, expected: dict[str, torch.Tensor], ranks: int) -> None:
    config = read_model_config(path)
    assert check_weights(read_headers(path), ModelPartition.of(config, ranks)) == ()
    for rank in range(ranks):
        filled = read_rank(path, config, ranks, rank)
        assert {*filled} == {*expected}
        for spec in ModelPartition.of(config, ranks).weights(rank):
            want = expected[spec.name]
            if spec.dim is not None:
                want = want.narrow(spec.dim, spec.start, spec.stop - spec.start)
            assert_same_bits(spec.name, filled[spec.name], want.contiguous())


@pytest.mark.parametrize("stored", [*QUANTISED, *FLAT], ids=lambda kind: kind.name)
def test_every_type_over_ranks(stored: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # Three ranks cut the 64 columns of down_proj in the middle of a block: 32, 16, 16.
    model = oracle("llama", tie_word_embeddings=True)
    expected = write(path, "llama", model, lambda name: stored)
    for ranks in (1, 2, 3):
        assert_ranks_read(path, expected, ranks)


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_over_ranks(family: str, tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kinds = {"v_proj": Kind.Q5_1, "down_proj": Kind.Q4_1, "embed_tokens": Kind.Q8_0}
    expected = write(
        path,
        family,
        oracle(family, tie_word_embeddings=tied),
        lambda name: next((k for part, k in kinds.items() if part in name), Kind.Q4_0),
    )
    for ranks in (1, 2):
        assert_ranks_read(path, expected, ranks)


def test_llama_biases_are_interleaved_with_their_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = oracle("llama", attention_bias=True, mlp_bias=True)
    expected = write(path, "llama", model)
    config = read_model_config(path)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert_ranks_read(path, expected, 3)


@pytest.mark.parametrize("family", SIZES)
def test_equals_transformers_reading_the_same_file(family: str, tmp_path: Path) -> None:
    model = oracle(family, head_dim=128) if family == "qwen3" else oracle(family)
    write(tmp_path / "model.gguf", family, model, lambda name: Kind.Q8_0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    config = read_model_config(tmp_path / "model.gguf")
    ours = read_rank(tmp_path / "model.gguf", config, 1, 0)
    for name, tensor in theirs.state_dict().items():
        if name in ours:
            assert_same_bits(name, ours[name], tensor)
    assert {*ours} <= {*theirs.state_dict()}
    assert config.rms_norm_eps == theirs.config.rms_norm_eps
    assert config.rope.theta == theirs.config.rope_parameters["rope_theta"]
    assert config.num_kv_heads == theirs.config.num_key_value_heads
    assert config.max_position_embeddings == theirs.config.max_position_embeddings


def test_only_the_blocks_of_a_rank_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", oracle("llama", tie_word_embeddings=True), lambda name: Kind.Q8_0)
    headers, config = read_headers(path), read_model_config(path)
    weights = {name: info for name, info in headers.items() if len(info.shape) == 2}
    whole = sum(info.stop - info.start for info in weights.values())
    taken = []
    with open_checkpoint(path) as checkpoint:
        for rank in range(3):
            specs = ModelPartition.of(config, 3).weights(rank)
            taken.append(sum(checkpoint.nbytes(spec) for spec in specs if spec.name in weights))
        # Columns 48 to 64 of down_proj lie in the second block of each of its 96 rows.
        specs = {spec.name: spec for spec in ModelPartition.of(config, 3).weights(2)}
        down = specs["model.layers.0.mlp.down_proj.weight"]
        assert (down.start, down.stop) == (48, 64)
        assert checkpoint.nbytes(down) == 96 * 34
    # The ranks share the blocks that a cut goes through, and nothing else.
    assert whole <= sum(taken) < 1.1 * whole
    assert max(taken) < 0.45 * whole


def test_config_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    scalars = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }
    write(path, "qwen3", oracle("qwen3", head_dim=32), scalars=scalars)
    assert read_model_config(path) == ModelConfig(
        family="qwen3",
        vocab_size=199,
        hidden_size=64,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=float(numpy.float32(1e-6)),
        max_position_embeddings=128,
        rope=RopeConfig(rotary_dim=32),
        qk_norm=True,
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )


def config_with(tmp_path: Path, family: str = "llama", **scalars: Any) -> ModelConfig:
    path = tmp_path / "model.gguf"
    named = {f"{family}.{key.replace('__', '.')}": value for key, value in scalars.items()}
    write(path, family, oracle(family), scalars=named)
    return read_model_config(path)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    assert config_with(tmp_path, **linear).rope == RopeConfig(
        rope_type="linear", rotary_dim=16, factor=4.0
    )
    assert config_with(tmp_path, rope__scale_linear=4.0).rope.factor == 4.0
    none = {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}
    assert config_with(tmp_path, **none).rope == RopeConfig(rotary_dim=16)
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
        "rope__scaling__yarn_beta_fast": 16.0,
    }
    assert config_with(tmp_path, "qwen2", **yarn).rope == RopeConfig(
        rope_type="yarn",
        rotary_dim=16,
        factor=4.0,
        original_max_position_embeddings=32,
        beta_fast=16.0,
    )


def test_frequency_divisors_are_the_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp's converter turns the scaling of llama 3.1 into one divisor per channel pair."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = oracle("llama", rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    plain, _ = rope_frequencies(RopeConfig(theta=500000.0, rotary_dim=16), 16, 128, 128)
    path = tmp_path / "model.gguf"
    write(path, "llama", model, tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    config = read_model_config(path)
    ignored = check_weights(read_headers(path), ModelPartition.of(config, 2))
    assert ignored == ("rope_freqs.weight",)
    for length in (16, 128, 500):
        got, scale = rope_frequencies(config.rope, 16, length, 128)
        assert_close("frequencies", got, scaled, rms_ratio=1e-7)
        assert scale == 1.0


@pytest.mark.parametrize(
    ("scalars", "words"),
    [
        (
            {"rope__scaling__type": "longrope"},
            "type is 'longrope'; legal: none, linear, yarn",
        ),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.5}, "at least 1"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "legal: 1"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8; it must be the head dim"),
        ({"expert_count": 8}, "expert_count is 8; mixtures of experts are not supported"),
        ({"attention__value_length": 64}, "value_length is 64; it must be the key length 16"),
        ({"attention__sliding_window": 64}, "sliding_window is 64"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    scalars: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(tmp_path, **scalars)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def small(path: Path, architecture: str = "llama", **strings: str) -> Path:
    """A file with one tensor and little metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in strings.items():
        writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", numpy.arange(64, dtype=numpy.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architecture 'phi3' is not supported; legal: llama, "):
        read_model_config(small(tmp_path / "model.gguf", "phi3"))
    with pytest.raises(ConfigError, match=r"llama\.\*: embedding_length is missing"):
        read_model_config(small(tmp_path / "model.gguf"))


def test_unknown_tensors_are_orphans(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra = {"blk.0.attn_sinks.weight": numpy.ones(4, numpy.float32)}
    write(path, "llama", oracle("llama"), tensors=extra)
    partition = ModelPartition.of(read_model_config(path), 1)
    with pytest.raises(CheckpointError, match=r"1 not used by llama: blk\.0\.attn_sinks\.weight"):
        check_weights(read_headers(path), partition)


@pytest.mark.parametrize("cut", [1, 100])
def test_a_truncated_file_names_the_tensor(cut: int, tmp_path: Path) -> None:
    path = small(tmp_path / "model.gguf")
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(CheckpointError, match=r"truncated: tensor token_embd\.weight ends at byte"):
        read_headers(path)


def test_a_file_cut_anywhere_in_its_head_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path / "model.gguf", note="text")
    whole = path.read_bytes()
    with open_gguf(path) as opened:
        data = opened.tensors["model.embed_tokens.weight"].start
    for size in range(data):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_headers(path)


def patched(path: Path, at: int, data: bytes) -> str:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_heads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    huge = (2**62).to_bytes(8, "little")
    assert "not a GGUF file" in patched(small(path), 0, b"GGML")
    assert "GGUF version 1 is not supported; legal: 2, 3" in patched(small(path), 4, b"\x01")
    assert str(path) in patched(small(path), 8, huge)
    assert "damaged or truncated" in patched(small(path), 16, huge)
    assert "damaged or truncated" in patched(small(path), 24, huge)
    name = small(path).read_bytes().index(b"token_embd.weight")
    after = name + len(b"token_embd.weight")
    assert "has 9 dimensions" in patched(small(path), after, b"\x09")
    assert "truncated: tensor token_embd.weight" in patched(small(path), after + 4, huge)
    assert "has type 250, which is not known" in patched(small(path), after + 20, b"\xfa")
    assert "has type I32, which is not known" in patched(small(path), after + 20, b"\x1a")
    assert "is not UTF-8" in patched(small(path), name, b"\xff")
    small(path, **{"split.x": "y"})
    at = path.read_bytes().index(b"split.x")
    assert "metadata of unknown type" in patched(path, at + len(b"split.x"), b"\x63")


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="one part of a split GGUF"):
        read_headers(tmp_path / "model.gguf")


def test_tokenizer_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<unk>", "é", "Ġa", "\n"])
    writer.add_token_types([2, 1, 1, 3])
    writer.add_token_scores([0.0, -1.5, 2.0, 0.25])
    writer.add_token_merges(["Ġ a", "é \n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_chat_template("{{ messages }}\n")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_tokenizer(path) == GgufTokenizerData(
        model="gpt2",
        pre="smollm",
        tokens=("<unk>", "é", "Ġa", "\n"),
        scores=(0.0, -1.5, 2.0, 0.25),
        token_types=(2, 1, 1, 3),
        merges=("Ġ a", "é \n"),
        bos_token_id=1,
        eos_token_id=0,
        eot_token_id=2,
        unknown_token_id=0,
        padding_token_id=3,
        add_bos_token=False,
        add_eos_token=None,
        add_space_prefix=True,
        chat_template="{{ messages }}\n",
    )


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        read_gguf_tokenizer(small(tmp_path / "model.gguf"))
