"""Weights are dropped before others are read, and nothing of the former ones stays."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.tiny import write_checkpoint
from unisono.models.config_reader import read_model_config
from unisono.models.headers import CheckpointError
from unisono.models.interface import Build
from unisono.models.partition import ModelPartition
from unisono.ops import dispatch
from unisono.ops.comm import solo_group
from unisono.workers import weights as module
from unisono.workers.config import WorkerConfig
from unisono.workers.kv_cache import KVCache
from unisono.workers.reporter import Reporter
from unisono.workers.state_pool import StatePool
from unisono.workers.weights import Weights

CPU = torch.device("cpu")


class Quiet:
    """Of a Reporter what loading calls; keeps the phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def enter(self, phase: str) -> None:
        self.phases.append(phase)

    def progress(self, done: int, total: int) -> None:
        pass


def owner_of(path: Path, *, drafts: bool = False) -> Weights:
    model = read_model_config(path)
    config = WorkerConfig(model_path=str(path), model=model, max_model_len=64)
    ops = dispatch.resolve(CPU, model.head_dim, "tiled")
    build = Build(ops, solo_group(), torch.float32, CPU)
    partition = ModelPartition.of(model, 1, drafts=drafts)
    return Weights(config, partition, build, cast(Reporter, Quiet()))


@pytest.fixture(params=["qwen3", "qwen3.5", "qwen3-next"])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    found = [tmp_path / "own", tmp_path / "other"]
    for seed, path in enumerate(found):
        write_checkpoint(request.param, path, seed)
    return found


def everything(model: Any) -> list[weakref.ref[Any]]:
    """The model, its layers and every tensor that it can be asked for."""
    tensors = [model.embed.weight, model.norm.weight, *(x.input_norm.weight for x in model.layers)]
    return [weakref.ref(each) for each in (model, model.head, *model.layers, *tensors)]


def test_dropped_weights_are_gone_and_loaded_ones_compute(paths: list[Path]) -> None:
    owner = owner_of(paths[0])
    hidden = torch.randn(3, owner.config.hidden_size)
    logits = []
    for number, path in enumerate((paths[0], paths[1], paths[0]), start=1):
        owner.load(str(path), "auto")
        assert owner.generation == number
        with torch.inference_mode():
            logits.append(owner.logits(hidden))
        gone = everything(owner._model)
        assert all(each() is not None for each in gone)
        owner.drop()
        assert [each() for each in gone] == [None] * len(gone)
        with pytest.raises(AssertionError, match="a step without weights"):
            owner.logits(hidden)
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])


def test_the_layer_that_drafts_is_loaded_again_with_the_others(tmp_path: Path) -> None:
    """B24: of zeros its drafts would all be wrong, and every answer still right."""
    paths = [tmp_path / "own", tmp_path / "other"]
    for seed, path in enumerate(paths):
        write_checkpoint("qwen3-next", path, seed, mtp=True)
    owner = owner_of(paths[0], drafts=True)
    pairs = torch.randn(3, 2 * owner.config.hidden_size)
    hidden = torch.randn(3, owner.config.hidden_size)
    found = []
    for path in (paths[0], paths[1], paths[0]):
        owner.load(str(path), "auto")
        with torch.inference_mode():
            mixed = cast(Any, owner._model).mtp.fc(pairs)
            found.append(torch.cat((mixed, owner.draft_logits(hidden)), dim=1))
        owner.drop()
    assert torch.equal(found[0], found[2])
    assert not (found[0] == found[1]).any()
    assert found[0].abs().min() > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_what_is_ignored_is_logged_once(
    drafts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint("qwen3.5", tmp_path, mtp=True)
    with caplog.at_level("INFO"):
        owner_of(tmp_path, drafts=drafts).load(str(tmp_path), "auto")
    said = [each for each in caplog.messages if "ignored" in each]
    assert said == ([] if drafts else ["ignored: 15 tensors under mtp."])


def test_the_former_weights_are_gone_before_others_are_read(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(paths[0])
    owner.load(str(paths[0]), "auto")
    gone = everything(owner._model)
    built = module.model_class(owner.config.family)

    def build(*arguments: Any) -> Any:
        assert [each() for each in gone] == [None] * len(gone)
        return built(*arguments)

    monkeypatch.setattr(module, "model_class", lambda family: build)
    owner.load(str(paths[1]), "auto")
    assert owner.generation == 2


def test_what_cannot_be_read_leaves_none_and_the_next_load_is_whole(paths: list[Path]) -> None:
    owner = owner_of(paths[0])
    owner.load(str(paths[0]), "auto")
    with pytest.raises(CheckpointError):
        owner.load(str(paths[0] / "nowhere"), "auto")
    assert owner._model is None
    assert owner.generation == 1
    owner.load(str(paths[1]), "auto")
    assert owner.generation == 2


def test_released_caches_hold_nothing_and_are_new_when_they_are_taken_again(
    paths: list[Path],
) -> None:
    model = read_model_config(paths[0])
    part = (ModelPartition.of(model, 1), 0, torch.float32)
    owners: list[Any] = [KVCache(*part, CPU)]
    if model.is_hybrid:
        owners.append(StatePool(*part, torch.float32, CPU))
    for owner in owners:
        owner.allocate(3)
        fields = ("k", "v") if isinstance(owner, KVCache) else ("conv", "state")
        tensors = [weakref.ref(getattr(layer, f)) for layer in owner.layers for f in fields]
        assert tensors
        owner.release()
        assert owner.layers == []
        assert [each() for each in tensors] == [None] * len(tensors)
        owner.allocate(3)
        assert owner.generation == 2
