"""A rank's part of each tensor is what slicing the whole gives, and no other byte is read."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.closeness import assert_same_bits
from tests.tiny import write_checkpoint
from unisono.models.checkpoint import open_checkpoint
from unisono.models.config_reader import read_model_config
from unisono.models.headers import CheckpointError
from unisono.models.partition import ModelPartition
from unisono.models.weight_specs import WeightSpec


def part_of(whole: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    if spec.dim is None:
        return whole
    return whole.narrow(spec.dim, spec.start, spec.stop - spec.start).contiguous()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_rank_reads_its_slices(ranks: int, shards: int, tmp_path: Path) -> None:
    size = "20KB" if shards > 1 else "1GB"
    model = write_checkpoint(
        "llama-bias-llama3" if ranks < 3 else "llama", tmp_path, max_shard_size=size
    )
    assert len([*tmp_path.glob("*.safetensors")]) >= shards
    partition = ModelPartition.of(read_model_config(tmp_path), ranks)
    tensors = model.state_dict()
    for rank in range(ranks):
        with open_checkpoint(tmp_path) as checkpoint:
            for spec in partition.weights(rank):
                got = checkpoint.read(spec)
                assert_same_bits(spec.name, got, part_of(tensors[spec.name], spec))
            wanted = sum(spec.num_elements * 4 for spec in partition.weights(rank))
            assert checkpoint.bytes_read == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_stored_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randn(6, 10).to(dtype)
    safetensors.torch.save_file({"w": whole}, tmp_path / "model.safetensors")
    spec = WeightSpec("w", (6, 10), 1, 3, 8)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.dtype_of("w") == dtype
        assert_same_bits("part", checkpoint.read(spec), whole[:, 3:8].contiguous())
        assert checkpoint.nbytes(spec) == 30 * dtype.itemsize == checkpoint.bytes_read
        target = torch.zeros(6, 5, dtype=torch.bfloat16)
        checkpoint.copy_into(spec, target)
        assert_same_bits("converted", target, whole[:, 3:8].to(torch.bfloat16).contiguous())


@pytest.mark.parametrize("padding", range(8))
def test_a_header_of_any_length(padding: int, tmp_path: Path) -> None:
    """Tensors of a hand-written file need not lie on a multiple of their element size."""
    whole = torch.randn(3, 4)
    header = b'{"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}' + b" " * padding
    data = len(header).to_bytes(8, "little") + header + whole.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same_bits("all", checkpoint.read(WeightSpec("w", (3, 4))), whole)
        rows = checkpoint.read(WeightSpec("w", (3, 4), 0, 1, 3))
        assert_same_bits("rows", rows, whole[1:3])
        columns = checkpoint.read(WeightSpec("w", (3, 4), 1, 1, 2))
        assert_same_bits("columns", columns, whole[:, 1:2].contiguous())


def test_what_was_read_outlives_the_checkpoint_and_may_be_written(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_checkpoint(tmp_path) as checkpoint:
            got = checkpoint.read(WeightSpec("w", (4,)))
    got += 1
    assert got.tolist() == [2, 2, 2, 2]
    assert safetensors.torch.load_file(tmp_path / "model.safetensors")["w"].tolist() == [1] * 4


def test_a_spec_the_checkpoint_cannot_serve(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(4, 2), "q": torch.ones(4, dtype=torch.int8)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match="absent: the checkpoint holds no such tensor"):
            checkpoint.read(WeightSpec("absent", (4,)))
        with pytest.raises(
            CheckpointError, match=r"tensor w has shape \[4, 2\], expected \[4, 3\]"
        ):
            checkpoint.nbytes(WeightSpec("w", (4, 3)))
        with pytest.raises(CheckpointError, match=r"its part has shape \[2, 2\], the target has"):
            checkpoint.copy_into(WeightSpec("w", (4, 2), 0, 0, 2), torch.zeros(4, 2))
        with pytest.raises(CheckpointError, match="q is stored as I8; legal: F64, F32"):
            checkpoint.read(WeightSpec("q", (4,)))


def mapped_kb(file: Path) -> int:
    """Resident kilobytes of this process's mapping of `file`."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", text)
    assert found, f"{file} is not mapped"
    return int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages in /proc")
def test_only_the_pages_of_the_rank_are_touched(tmp_path: Path) -> None:
    """The kernel's own count of what a rank of four maps; it maps up to 2 MB around a touch."""
    file = tmp_path / "model.safetensors"
    shape, quarter_kb = (4096, 2048), 8192
    safetensors.torch.save_file({"w": torch.ones(shape)}, file)
    with open_checkpoint(tmp_path) as checkpoint:
        assert mapped_kb(file) == 0
        checkpoint.read(WeightSpec("w", shape, 0, 1024, 2048))
        mapped = mapped_kb(file)
    assert quarter_kb <= mapped + 8
    assert mapped <= quarter_kb + 2 * 2048 + 8
