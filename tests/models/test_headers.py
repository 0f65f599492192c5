"""Headers of safetensors checkpoints: which file holds what, and every way it can be damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.tiny import write_checkpoint
from unisono.models.config import ConfigError
from unisono.models.config_reader import read_model_config
from unisono.models.headers import (
    INDEX,
    CheckpointError,
    check_weights,
    has_safetensors,
    read_headers,
    read_safetensors_header,
    same_bytes,
)
from unisono.models.partition import ModelPartition

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def save(file: Path, **tensors: torch.Tensor) -> Path:
    safetensors.torch.save_file(tensors, file)
    return file


def raw(file: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header (an object, or bytes as they are) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + text + data)
    return file


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def index(directory: Path, places: Mapping[str, object]) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save(tmp_path / ONE, a=torch.zeros(2, 3), b=torch.zeros(4))
    save(tmp_path / TWO, c=torch.zeros(5, dtype=torch.bfloat16))
    index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    return tmp_path


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    file = save(tmp_path / "model.safetensors", a=torch.arange(6.0).view(2, 3), b=torch.ones(4))
    headers = read_headers(tmp_path)
    assert {name: (info.dtype, info.shape) for name, info in headers.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F32", (4,)),
    }
    data = file.read_bytes()[headers["a"].start : headers["a"].stop]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [*range(6)]


def test_reads_shards(shards: Path) -> None:
    headers = read_headers(shards)
    assert {name: info.file.name for name, info in headers.items()} == {
        "a": ONE,
        "b": ONE,
        "c": TWO,
    }
    (shards / INDEX).unlink()
    assert read_headers(shards) == headers


def test_other_weight_files_are_left_alone(shards: Path) -> None:
    save(shards / "consolidated.safetensors", a=torch.zeros(9))
    save(shards / "adapter_model.safetensors", a=torch.zeros(9))
    (shards / "pytorch_model.bin").write_bytes(b"x")
    assert read_headers(shards)["a"].shape == (2, 3)


def test_the_index_decides_between_two_copies(shards: Path) -> None:
    save(shards / TWO, a=torch.zeros(9), c=torch.zeros(5))
    assert read_headers(shards)["a"].shape == (2, 3)
    index(shards, {"a": TWO, "b": ONE, "c": TWO})
    assert read_headers(shards)["a"].shape == (9,)


def test_two_copies_without_an_index_are_refused(shards: Path) -> None:
    save(shards / TWO, a=torch.zeros(9))
    (shards / INDEX).unlink()
    assert f"{TWO}: tensor a is also in {ONE}" in refusal(shards)


def test_missing_shards_are_listed(shards: Path) -> None:
    """B79: with an index and without."""
    (shards / TWO).unlink()
    assert f"1 of 2 shards are missing: {TWO}" in refusal(shards)
    (shards / INDEX).unlink()
    assert f"1 of 2 shards are missing: {TWO}" in refusal(shards)


@pytest.mark.parametrize("total", ["²", "9" * 12])
def test_a_name_that_counts_no_shards_is_a_file_like_others(shards: Path, total: str) -> None:
    (shards / INDEX).unlink()
    (shards / ONE).unlink()
    (shards / TWO).rename(shards / f"model-00001-of-{total}.safetensors")
    assert "c" in read_headers(shards)


def test_a_stale_index_names_file_and_tensor(shards: Path) -> None:
    """B79."""
    index(shards, {"a": ONE, "b": ONE, "c": TWO, "d": TWO})
    assert f"{TWO}: holds no tensor d, which {INDEX} places there" in refusal(shards)
    index(shards, {"a": TWO, "b": ONE, "c": TWO})
    assert f"{TWO}: holds no tensor a" in refusal(shards)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_bad_index_is_refused(text: str, shards: Path) -> None:
    (shards / INDEX).write_text(text)
    assert INDEX in refusal(shards)


@pytest.mark.parametrize("place", ["../model.safetensors", "sub/x.safetensors", "", 3])
def test_an_index_reaches_no_other_directory(place: object, shards: Path) -> None:
    index(shards, {"a": place})
    assert "places tensor a in" in refusal(shards)


def test_directories_without_weights(tmp_path: Path) -> None:
    """B79: empty, other formats, a directory of such a name."""
    assert not has_safetensors(tmp_path)
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    message = refusal(tmp_path)
    assert "found pytorch_model.bin" in message
    assert "safetensors files only" in message
    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors: Is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent")


@pytest.mark.parametrize("cut", [1, 1 << 20])
def test_a_truncated_file_names_the_first_tensor_lost(cut: int, tmp_path: Path) -> None:
    """B81: by a byte and by a MiB."""
    file = save(tmp_path / "model.safetensors", a=torch.zeros(300_000), b=torch.zeros(8))
    os.truncate(file, file.stat().st_size - cut)
    message = refusal(tmp_path)
    assert str(file) in message
    assert "truncated: tensor" in message
    # The library lays a and b out in an order of its own; the one named is the first to suffer.
    assert ("tensor a ends" in message) or (cut == 1 and "tensor b ends" in message)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_file_cut_inside_its_header(size: int, tmp_path: Path) -> None:
    """B81."""
    file = save(tmp_path / "model.safetensors", a=torch.zeros(8))
    os.truncate(file, size)
    assert f"{file}: damaged or truncated: a header of" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "the header is not valid JSON"),
        (b"\xff\xfe", b"", "the header is not valid JSON"),
        ([], b"", "the header is not a JSON object"),
        ({"a": 3}, b"", "entry of tensor a is not an object"),
        ({"a": entry([1], 0, 4, "F12")}, bytes(4), "tensor a has unknown dtype 'F12'; legal: BOOL"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "tensor a has a bad shape"),
        ({"a": entry([-1], 0, 4)}, bytes(4), "tensor a has a bad shape"),
        ({"a": entry([2], 0, 4)}, bytes(4), "tensor a of F32 [2] is 8 bytes, its offsets say 4"),
        ({"a": entry([1], 4, 0)}, bytes(4), "its offsets say -4"),
        ({"a": entry([1], 0, 4), "b": entry([2], 2, 10)}, bytes(10), "b overlaps tensor a"),
        (
            {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
            bytes(12),
            "b leaves a gap after tensor a",
        ),
        ({"a": entry([1], 4, 8)}, bytes(8), "tensor a leaves a gap after the header"),
        ({"a": entry([4], 0, 16)}, bytes(12), "truncated: tensor a ends at byte"),
        ({"a": entry([1], 0, 4)}, bytes(9), "5 bytes follow tensor a"),
        (b'{"a":' + b"[" * 100_000, b"", "the header is not valid JSON"),
        (b'{"a":{},"a":{}}', b"", "tensor a is in the header twice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_headers(header: object, data: bytes, words: str, tmp_path: Path) -> None:
    """B81."""
    file = raw(tmp_path / "model.safetensors", header, data)
    message = refusal(tmp_path)
    assert str(file) in message
    assert words in message


def test_a_huge_header_length_takes_no_memory(tmp_path: Path) -> None:
    """B81."""
    raw(tmp_path / "model.safetensors", {}, length=2**63)
    assert "a header of 9223372036854775808 bytes in a file of 10" in refusal(tmp_path)


def test_a_shared_tensor_is_found_under_both_names(tmp_path: Path) -> None:
    shared = torch.nn.Module()
    shared.one = torch.nn.Linear(3, 2, bias=False)
    shared.two = torch.nn.Linear(3, 2, bias=False)
    shared.two.weight = shared.one.weight
    safetensors.torch.save_model(shared, str(tmp_path / "model.safetensors"))
    headers = read_headers(tmp_path)
    assert {*headers} == {"one.weight", "two.weight"}
    assert same_bytes(headers["one.weight"], headers["two.weight"])


def test_same_bytes(tmp_path: Path) -> None:
    left = torch.arange(3_000_000, dtype=torch.float32)
    right = left.clone()
    right[-1] = 0
    file = tmp_path / "model.safetensors"
    save(file, a=left, b=left.clone(), c=right, d=left.clone().view(2, -1))
    headers = read_safetensors_header(file)
    assert same_bytes(headers["a"], headers["b"])
    assert not same_bytes(headers["a"], headers["c"])
    assert not same_bytes(headers["a"], headers["d"])


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_wrapper_prefixes(prefix: str, tmp_path: Path) -> None:
    head = "language_model.lm_head.weight" if prefix.endswith(".model.") else "lm_head.weight"
    names = [prefix + "embed_tokens.weight", prefix + "layers.0.mlp.up_proj.weight", head]
    tensors = {name: torch.zeros(n + 1) for n, name in enumerate(names)}
    save(tmp_path / "model.safetensors", **tensors)
    headers = read_headers(tmp_path)
    usual = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert [headers[name].shape for name in usual] == [(1,), (2,), (3,)]
    assert [headers[name].name for name in usual] == names


def rewritten(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Add, replace or (None) remove tensors of a checkpoint of one file."""
    file = directory / "model.safetensors"
    tensors = {**safetensors.torch.load_file(file), **change}
    safetensors.torch.save_file({n: t for n, t in tensors.items() if t is not None}, file)


@pytest.mark.parametrize("name", ["llama", "llama-bias-llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tiny_models_are_covered(name: str, ranks: int, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    config = read_model_config(tmp_path)
    assert check_weights(read_headers(tmp_path), ModelPartition.of(config, ranks)) == ()


def test_coverage_lists_missing_unused_and_misshapen(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    partition = ModelPartition.of(read_model_config(tmp_path), 2)
    rewritten(
        tmp_path,
        {
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.zeros(8, 9),
            "model.layers.1.extra": torch.zeros(1),
            "model.layers.1.input_layernorm.weight": torch.zeros(72, dtype=torch.int8),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        check_weights(read_headers(tmp_path), partition)
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 not used by llama: model.layers.1.extra" in message
    assert "mlp.up_proj.weight has shape [8, 9], the configuration says [136, 72]" in message
    assert "and 1 more faults" in message
    assert "\n" not in message
    assert isinstance(caught.value, ConfigError)


def test_ignored_tensors_are_named(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    head = safetensors.torch.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewritten(tmp_path, {inverse: torch.zeros(4), "lm_head.weight": head.clone()})
    config = read_model_config(tmp_path)
    assert config.tie_word_embeddings
    headers = read_headers(tmp_path)
    assert {*check_weights(headers, ModelPartition.of(config, 1))} == {inverse, "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"1 not used by llama: .*inv_freq"):
        check_weights(headers, ModelPartition.of(config, 1), ignored=())


def test_a_head_of_its_own_is_no_orphan(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    rewritten(tmp_path, {"lm_head.weight": torch.ones(199, 72)})
    config = read_model_config(tmp_path)
    assert not config.tie_word_embeddings
    assert check_weights(read_headers(tmp_path), ModelPartition.of(config, 1)) == ()


def test_quantised_weights_without_a_scheme_are_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewritten(tmp_path, {name: torch.zeros(136, 72, dtype=torch.float8_e4m3fn)})
    partition = ModelPartition.of(read_model_config(tmp_path), 1)
    with pytest.raises(CheckpointError, match=f"{name} is stored as F8_E4M3; legal: F32"):
        check_weights(read_headers(tmp_path), partition)
