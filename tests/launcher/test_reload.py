"""Which weights may take the place of those that run, and what is said of the others."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.launcher.fakes import write_checkpoint
from unisono.launcher.model_source import resolve_model
from unisono.launcher.reload import reload_order
from unisono.launcher.resolve import prepare
from unisono.models.config import ConfigError
from unisono.models.headers import CheckpointError
from unisono.runtime.protocol import Reload
from unisono.workers.config import WorkerConfig


@pytest.fixture
def running(tmp_path: Path) -> WorkerConfig:
    model = str(write_checkpoint(tmp_path / "running"))
    return prepare(model, {"device": "cpu"}, {}).worker


def test_weights_of_the_same_shapes_are_taken_whatever_ends_an_answer(
    running: WorkerConfig, tmp_path: Path
) -> None:
    eos = replace(running.model, eos_token_ids=(2, 7))  # as a tokenizer adds to them
    other = write_checkpoint(tmp_path / "other", eos_token_id=[3, 4], dtype="float16")
    order = reload_order(str(other), replace(running, model=eos))
    assert order == Reload(path=str(other), load_format="auto")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 72}, "hidden_size is 72, and the model that runs has 36: choose weights "),
        ({"num_hidden_layers": 3}, "num_layers is 3, and the model that runs has 2: "),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, and the model that runs has 1e-06: "),
        ({"rope_theta": 5e5}, "rope is RopeConfig("),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and "),
    ],
    ids=str,
)
def test_another_model_is_refused_by_the_field(
    running: WorkerConfig, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    other = write_checkpoint(tmp_path / "other", **changes)
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{other}: {said}')}.*$"):
        reload_order(str(other), running)


def test_weights_without_a_drafter_do_where_nothing_drafts(tmp_path: Path) -> None:
    source = resolve_model("tiny-mtp").path
    plain, drafting = (
        prepare("tiny-mtp", {"device": "cpu", "speculate": drafts}, {}).worker for drafts in (0, 2)
    )
    shutil.copytree(source, tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    kept = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, file)
    tuned = str(tmp_path / "tuned")
    assert reload_order(tuned, plain) == Reload(path=tuned, load_format="auto")
    with pytest.raises(CheckpointError, match="num_mtp_layers is 0, and the model that runs has 1"):
        reload_order(tuned, drafting)
    # Of several layers the first drafts alone.
    both = replace(drafting, model=replace(drafting.model, num_mtp_layers=2))
    assert reload_order("tiny-mtp", both).load_format == "auto"


def test_files_that_are_missing_or_damaged_are_refused(
    running: WorkerConfig, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other")
    file = other / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"^.*: truncated: .*$"):
        reload_order(str(other), running)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"^.*: no model.safetensors and no .*$"):
        reload_order(str(other), running)
    (other / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"^model .* without config.json; choose .*$"):
        reload_order(str(other), running)
    with pytest.raises(CheckpointError, match=r"^model '' is empty; choose .*$"):
        reload_order("", running)


def test_random_weights_are_those_of_a_shape_or_of_the_model_itself(
    running: WorkerConfig, tmp_path: Path
) -> None:
    shape = "shape:smollm2-135m"
    worker = prepare(shape, {"device": "cpu"}, {}).worker
    assert reload_order(shape, worker) == Reload(path=shape, load_format="random")
    own = replace(running, load_format="random")
    assert reload_order(own.model_path, own).load_format == "random"
    other = str(write_checkpoint(tmp_path / "other"))
    assert reload_order(other, own).load_format == "auto"
    with pytest.raises(ConfigError, match="vocab_size is 49152"):
        reload_order(shape, running)
