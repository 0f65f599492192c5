"""Hybrids from files: ranks together hold the tensors of the file, in whatever form it has them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.closeness import assert_same_bits
from tests.models.test_checkpoint import mapped_kb
from tests.tiny import (
    DRAFTING,
    HYBRIDS,
    WRAPPERS,
    add_tensors,
    fuse_experts,
    write_checkpoint,
    write_wrapper,
)
from unisono.models.checkpoint import open_checkpoint
from unisono.models.config_reader import read_model_config
from unisono.models.fields import Fields
from unisono.models.headers import CheckpointError, check_weights, group_ignored, read_headers
from unisono.models.hybrid_config import with_drafter
from unisono.models.ledger import fill_weights
from unisono.models.overlay import overlay_part_of, overlay_parts
from unisono.models.partition import ModelPartition
from unisono.models.random_weights import fill_random, open_weights
from unisono.models.weight_specs import WeightSpec

OWN = ("embed_tokens", "lm_head")
WITH_EXPERTS = [name for name in HYBRIDS if name != "qwen3.5"]


@pytest.fixture(scope="module", params=HYBRIDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    write_checkpoint(request.param, directory)
    return directory


@pytest.fixture(scope="module", params=DRAFTING)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafting")
    write_checkpoint(request.param, directory, mtp=True)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(directory / "model.safetensors")


def save(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, directory / "model.safetensors")


def part_of(whole: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    if spec.dim is None:
        return whole
    rows = [row for start, stop in spec.ranges for row in range(start, stop)]
    return whole.index_select(spec.dim, torch.tensor(rows)).contiguous()


def everything(directory: Path, ranks: int) -> Iterator[tuple[int, WeightSpec, torch.Tensor]]:
    """(rank, spec, what it reads) of all ranks, the MTP layer too where there is one."""
    partition = ModelPartition.of(read_model_config(directory), ranks, drafts=True)
    for rank in range(ranks):
        with open_checkpoint(directory) as checkpoint:
            for spec in partition.weights(rank):
                yield rank, spec, checkpoint.read(spec)
            read = sum(checkpoint.nbytes(spec) for spec in partition.weights(rank))
            assert checkpoint.bytes_read == read


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_together_hold_the_tensors_of_the_file(saved: Path, ranks: int) -> None:
    assert_all_is_held(saved, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_that_draft_hold_the_mtp_layer_too(drafting: Path, ranks: int) -> None:
    assert any(name.startswith("mtp.") for name in tensors_of(drafting))
    assert_all_is_held(drafting, ranks)


def test_and_its_embedding_and_head_where_it_has_its_own(tmp_path: Path) -> None:
    model = write_checkpoint("qwen3.5", tmp_path, mtp=True)
    own = {f"mtp.{name}.weight": torch.randn(model.lm_head.weight.shape) for name in OWN}
    add_tensors(tmp_path, own)
    assert_all_is_held(tmp_path, 3)
    # Who does not draft does without.
    partition = ModelPartition.of(read_model_config(tmp_path), 3)
    assert {*own} < {*check_weights(read_headers(tmp_path), partition)}


def assert_all_is_held(saved: Path, ranks: int) -> None:
    tensors = tensors_of(saved)
    together = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for _, spec, part in everything(saved, ranks):
        assert_same_bits(spec.name, part, part_of(tensors[spec.name], spec))
        if spec.dim is None:
            together[spec.name] = part
            continue
        rows = [row for start, stop in spec.ranges for row in range(start, stop)]
        together[spec.name].index_copy_(spec.dim, torch.tensor(rows), part)
    assert together.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(name, together[name], tensor)


def test_the_parameters_are_those_of_transformers(saved: Path, tmp_path: Path) -> None:
    """By their names in memory, where experts are always fused."""
    name = next(key for key, (kind, _) in HYBRIDS.items() if kind == _kind(saved))
    want = dict(write_checkpoint(name, tmp_path).named_parameters())
    for _, spec, part in everything(saved, 1):
        found = want.get(spec.name)
        if found is None:
            prefix, expert, kind, _ = spec.name.rsplit(".", 3)
            fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
            found = want[f"{prefix}.{fused}"][int(expert)]
            half = len(found) // 2
            found = {"gate_proj": found[:half], "up_proj": found[half:]}.get(kind, found)
        assert_same_bits(spec.name, part, found.detach().contiguous())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_fused_experts_read_as_single_ones(name: str, ranks: int, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path, mtp=name in DRAFTING)
    apart = [(rank, spec.name, part) for rank, spec, part in everything(tmp_path, ranks)]
    config = read_model_config(tmp_path)
    assert any(key.startswith("mtp.layers.0.mlp.experts.") for _, key, _ in apart) == (
        name in DRAFTING
    )
    fuse_experts(tmp_path)
    assert any(key.endswith(".experts.gate_up_proj") for key in tensors_of(tmp_path))
    assert not any(".experts.0." in key for key in tensors_of(tmp_path))
    assert read_model_config(tmp_path) == config
    partition = ModelPartition.of(config, ranks, drafts=True)
    assert check_weights(read_headers(tmp_path), partition) == ()
    fused = everything(tmp_path, ranks)
    for (rank, key, want), (other_rank, spec, part) in zip(apart, fused, strict=True):
        assert (rank, key) == (other_rank, spec.name)
        assert_same_bits(key, part, want)


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages in /proc")
def test_of_fused_experts_only_the_pages_of_one_are_touched(tmp_path: Path) -> None:
    """The kernel's own count; it maps up to 2 MB around a touch."""
    file, each_kb = tmp_path / "model.safetensors", 8192
    name = "model.layers.0.mlp.experts."
    safetensors.torch.save_file({name + "gate_up_proj": torch.ones(4, 2048, 2048)}, file)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read(WeightSpec(f"{name}2.up_proj.weight", (1024, 2048)))
        mapped = mapped_kb(file)
    assert each_kb <= mapped + 8
    assert mapped <= each_kb + 2 * 2048 + 8


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_holds_the_text_model(name: str, mtp: bool, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "text", mtp=mtp)
    write_wrapper(name, tmp_path / "wrapper", mtp=mtp)
    stored = tensors_of(tmp_path / "wrapper")
    assert any(key.startswith("model.language_model.layers.0.") for key in stored)
    for (_, spec, part), (_, _, want) in zip(
        everything(tmp_path / "wrapper", 2), everything(tmp_path / "text", 2), strict=True
    ):
        assert_same_bits(spec.name, part, want)
    ignored = check_weights(
        read_headers(tmp_path / "wrapper"),
        ModelPartition.of(read_model_config(tmp_path / "wrapper"), 2, drafts=True),
    )
    assert {*ignored} == {key for key in stored if key.startswith("model.visual.")}
    assert ignored


@pytest.mark.parametrize("prefix", ["mtp.", "visual.", "model.visual."])
def test_what_only_some_families_hold_is_ignored_by_name(saved: Path, prefix: str) -> None:
    config, headers = read_model_config(saved), read_headers(saved)
    extra = {f"{prefix}layers.0.a.weight", f"{prefix}fc.weight"}
    headers.update(dict.fromkeys(extra, headers["model.norm.weight"]))
    partition = ModelPartition.of(config, 2)
    sees = config.family.startswith("qwen3_5")
    if sees or (prefix == "mtp." and config.family == "qwen3_next"):
        ignored = check_weights(headers, partition)
        assert {*ignored} == extra
        assert group_ignored(ignored) == {prefix: 2}
        return
    with pytest.raises(CheckpointError, match=f"2 not used by {config.family}: {prefix}"):
        check_weights(headers, partition)


def test_whoever_drafts_reads_one_mtp_layer_and_names_the_others(drafting: Path) -> None:
    config, headers = read_model_config(drafting), read_headers(drafting)
    plain, drafts = (ModelPartition.of(config, 2, drafts=asked) for asked in (False, True))
    mtp = {name for name in headers if name.startswith("mtp.")}
    assert {*check_weights(headers, plain)} == mtp
    assert check_weights(headers, drafts) == ()
    further = {f"mtp.layers.{i}.self_attn.o_proj.weight" for i in (1, 12)}
    headers.update(dict.fromkeys(further, headers["mtp.norm.weight"]))
    assert {*check_weights(headers, plain)} == mtp | further
    assert {*check_weights(headers, drafts)} == further


@pytest.mark.parametrize("name", ["output", "shared_head.head", "layers.0.x"])
def test_what_a_drafter_is_not_known_to_have_is_refused(name: str, drafting: Path) -> None:
    """B49: another head than the model's, left out, would cost every draft."""
    config, headers = read_model_config(drafting), read_headers(drafting)
    headers[f"mtp.{name}.weight"] = headers["model.embed_tokens.weight"]
    assert f"mtp.{name}.weight" in check_weights(headers, ModelPartition.of(config, 1))
    with pytest.raises(CheckpointError, match=f"1 not used by {config.family}: mtp.{name}.weight"):
        check_weights(headers, ModelPartition.of(config, 1, drafts=True))


@pytest.mark.parametrize(
    ("lost", "fields", "said"),
    [
        (r"mtp\.fc\.weight", {}, r"1 missing: mtp\.fc\.weight"),
        ("", {"mtp_use_dedicated_embeddings": True}, r"1 missing: mtp\.embed_tokens\.weight"),
        (r"mtp\.layers\..*", {}, r"\d+ missing: mtp\.layers\.0\."),
        (r"mtp\.(?!norm).*", {}, r"\d+ missing: mtp\.fc\.weight, "),
    ],
)
def test_an_mtp_layer_in_part_is_refused_where_it_is_to_draft(
    lost: str, fields: dict[str, Any], said: str, drafting: Path
) -> None:
    headers = read_headers(drafting)
    for name in [name for name in headers if re.fullmatch(lost, name)]:
        del headers[name]
    source = json.loads((drafting / "config.json").read_text())
    config = with_drafter(
        read_model_config(drafting), Fields({**source, **fields}, "config.json"), headers
    )
    check_weights(headers, ModelPartition.of(config, 1))
    with pytest.raises(CheckpointError, match=said):
        check_weights(headers, ModelPartition.of(config, 1, drafts=True))


def test_names_without_a_prefix_leave_the_mtp_layer_its_own(drafting: Path, tmp_path: Path) -> None:
    tensors = tensors_of(drafting)
    save(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert read_headers(tmp_path).keys() == tensors.keys()


def test_only_families_that_can_draft_have_mtp_layers(tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    add_tensors(tmp_path, {"mtp.layers.0.input_layernorm.weight": torch.zeros(72)})
    assert read_model_config(tmp_path).num_mtp_layers == 0


def test_other_tensors_are_refused_and_missing_ones_named(saved: Path) -> None:
    """B50: nothing is left as it was made. (FP8, which it is about, is refused by the config.)"""
    partition = ModelPartition.of(read_model_config(saved), 1)
    headers = read_headers(saved)
    norm = headers["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 not used by \w+: model.layers.9.x"):
        check_weights({**headers, "model.layers.9.x": norm}, partition)
    last = [*headers][-1]
    del headers[last]
    with pytest.raises(CheckpointError, match=f"1 missing: {last}"):
        check_weights(headers, partition)


@pytest.mark.parametrize(
    ("kind", "shape", "legal"),
    [
        ("gate_up_proj", (4, 6), "[experts, 2 * channels, hidden]"),
        ("gate_up_proj", (2, 3, 4), "[experts, 2 * channels, hidden]"),
        ("down_proj", (4, 6), "[experts, hidden, channels]"),
        ("down_proj", (0, 6, 4), "[experts, hidden, channels]"),
    ],
)
def test_fused_experts_of_another_shape(
    kind: str, shape: tuple[int, ...], legal: str, tmp_path: Path
) -> None:
    name = f"model.layers.0.mlp.experts.{kind}"
    save(tmp_path, {name: torch.zeros(shape)})
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    assert f"tensor {name} has shape {[*shape]}; legal: {legal}" in str(caught.value)


def test_an_expert_in_both_forms_is_refused(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts."
    tensors = {
        prefix + "down_proj": torch.zeros(2, 3, 4),
        prefix + "1.down_proj.weight": torch.zeros(3, 4),
    }
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"1\.down_proj\.weight is also a part of model\."):
        read_headers(tmp_path)


def test_parameters_of_another_dtype_than_the_stored_one(tmp_path: Path) -> None:
    """Files hold some numbers in float32 and others in bfloat16; targets decide."""
    write_checkpoint("qwen3-next", tmp_path)
    narrow = {
        name: tensor if "A_log" in name else tensor.to(torch.bfloat16)
        for name, tensor in tensors_of(tmp_path).items()
    }
    save(tmp_path, narrow)
    specs = list(ModelPartition.of(read_model_config(tmp_path), 4).weights(1))
    targets = {
        spec.name: torch.full(
            spec.local_shape, torch.nan, dtype=torch.float32 if spec.keeps_fp32 else torch.bfloat16
        )
        for spec in specs
    }
    assert any(spec.more for spec in specs)
    with open_checkpoint(tmp_path) as checkpoint:
        fill_weights(specs, targets, checkpoint, lambda *_: None)
    for spec in specs:
        want = part_of(narrow[spec.name], spec).to(targets[spec.name].dtype)
        assert_same_bits(spec.name, targets[spec.name], want)


@pytest.mark.parametrize("part", ["norm", "qk-norm"])
def test_an_overlay_keeps_what_it_does_not_name(saved: Path, part: str) -> None:
    assert_overlay(saved, part)


def test_an_overlay_reaches_the_norms_of_the_mtp_layer(drafting: Path) -> None:
    replaced = assert_overlay(drafting, "norm")
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm")
    assert {f"mtp.{name}.weight" for name in names} < replaced
    assert "mtp.layers.0.self_attn.q_norm.weight" not in replaced


def assert_overlay(saved: Path, part: str) -> set[str]:
    """Names of what was replaced."""
    config = read_model_config(saved)
    assert part in overlay_parts(config)
    specs = list(ModelPartition.of(config, 2, drafts=True).weights(1))
    filled = {spec.name: torch.full(spec.local_shape, torch.nan) for spec in specs}
    with open_weights(str(saved), "auto", frozenset([part]), torch.float32) as source:
        fill_weights(specs, filled, source, lambda *_: None)
    tensors, replaced = tensors_of(saved), set()
    for spec in specs:
        want = part_of(tensors[spec.name], spec)
        if overlay_part_of(spec.name) == part:
            replaced.add(spec.name)
            assert not torch.equal(filled[spec.name], want)
            want = torch.empty(spec.local_shape)
            fill_random(spec, want)
        assert_same_bits(spec.name, filled[spec.name], want)
    assert len(replaced) >= 2
    return replaced


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_weights_are_slices_of_one_model(saved: Path, ranks: int) -> None:
    assert_slices(saved, ranks)


def test_so_are_those_of_an_mtp_layer(drafting: Path) -> None:
    assert_slices(drafting, 3)


def assert_slices(saved: Path, ranks: int) -> None:
    config = read_model_config(saved)

    def filled(spec: WeightSpec) -> torch.Tensor:
        target = torch.full(spec.local_shape, torch.nan)
        fill_random(spec, target)
        return target

    alone, cut = (ModelPartition.of(config, size, drafts=True) for size in (1, ranks))
    whole = {spec.name: filled(spec) for spec in alone.weights(0)}
    assert whole.keys() == tensors_of(saved).keys()
    for rank in range(ranks):
        for spec in cut.weights(rank):
            assert_same_bits(spec.name, filled(spec), part_of(whole[spec.name], spec))


def _kind(directory: Path) -> str:
    """The architecture that config.json names, less its ending."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    return str(name).removesuffix("ForCausalLM")
