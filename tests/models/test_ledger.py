"""Every parameter is filled exactly once, or the names are told before anything is copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.closeness import assert_same_bits
from tests.tiny import write_checkpoint
from unisono.models.checkpoint import Checkpoint, open_checkpoint
from unisono.models.config_reader import read_model_config
from unisono.models.headers import CheckpointError
from unisono.models.ledger import fill_weights
from unisono.models.partition import ModelPartition
from unisono.models.weight_specs import WeightSpec

SPECS = [
    WeightSpec("a", (4, 3), 0, 1, 3),
    WeightSpec("b", (2, 6), 1, 2, 6),
    WeightSpec("c", (5,)),
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shapes = {"a": (4, 3), "b": (2, 6), "c": (5,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def targets(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.local_shape, torch.nan, dtype=dtype) for spec in SPECS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fills_and_converts(dtype: torch.dtype, directory: Path) -> None:
    whole = safetensors.torch.load_file(directory / "model.safetensors")
    filled = targets(dtype)
    heard: list[tuple[int, int]] = []
    with open_checkpoint(directory) as checkpoint:
        fill_weights(iter(SPECS), filled, checkpoint, lambda *now: heard.append(now))
    assert_same_bits("a", filled["a"], whole["a"][1:3].to(dtype))
    assert_same_bits("b", filled["b"], whole["b"][:, 2:6].to(dtype).contiguous())
    assert_same_bits("c", filled["c"], whole["c"].to(dtype))
    assert heard == [(0, 76), (24, 76), (56, 76), (76, 76)]


def test_targets_may_be_views_of_a_fused_parameter(directory: Path) -> None:
    whole = safetensors.torch.load_file(directory / "model.safetensors")
    fused = torch.nn.Parameter(torch.zeros(4, 3))
    specs = [WeightSpec("a", (4, 3), 0, 0, 2)]
    with open_checkpoint(directory) as checkpoint:
        fill_weights(specs, {"a": fused[2:]}, checkpoint, lambda *_: None)
    assert_same_bits("view", fused.detach()[2:], whole["a"][:2])
    assert not fused.detach()[:2].any()


def refusal(checkpoint: Checkpoint, specs: list[WeightSpec], given: dict[str, torch.Tensor]) -> str:
    with pytest.raises(CheckpointError) as caught:
        fill_weights(specs, given, checkpoint, lambda *_: None)
    assert checkpoint.bytes_read == 0
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_names_and_shapes_must_match_one_to_one(directory: Path) -> None:
    with open_checkpoint(directory) as checkpoint:
        message = refusal(checkpoint, [*SPECS, SPECS[0]], targets())
        assert "1 named twice: a" in message
        message = refusal(checkpoint, SPECS, {"a": targets()["a"]})
        assert "2 without a parameter: b, c" in message
        message = refusal(checkpoint, SPECS[:1], targets())
        assert "2 parameters never filled: b, c" in message
        message = refusal(checkpoint, SPECS, {**targets(), "b": torch.zeros(2, 6)})
        assert "1 with a parameter of another shape: b [2, 6] for [2, 4]" in message
        unknown = WeightSpec("d", (5,))
        message = refusal(checkpoint, [*SPECS, unknown], {**targets(), "d": torch.zeros(5)})
        assert "d: the checkpoint holds no such tensor" in message


def test_many_names_are_counted(directory: Path) -> None:
    extra = {f"x{n}": torch.zeros(1) for n in range(7)}
    with open_checkpoint(directory) as checkpoint:
        message = refusal(checkpoint, SPECS, {**targets(), **extra})
    assert "7 parameters never filled: x0, x1, x2, ..." in message


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_whole_model_over_two_ranks(name: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(name, tmp_path).state_dict()
    partition = ModelPartition.of(read_model_config(tmp_path), 2)
    for rank in range(2):
        specs = list(partition.weights(rank))
        filled = {spec.name: torch.full(spec.local_shape, torch.nan) for spec in specs}
        with open_checkpoint(tmp_path) as checkpoint:
            fill_weights(specs, filled, checkpoint, lambda *_: None)
        for spec in specs:
            whole = tensors[spec.name]
            want = (
                whole
                if spec.dim is None
                else whole.narrow(spec.dim, spec.start, spec.stop - spec.start)
            )
            assert_same_bits(spec.name, filled[spec.name], want.contiguous())
