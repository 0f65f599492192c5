"""Weights that do not fit are refused before they are read, with numbers and what helps."""

from __future__ import annotations

import re

import pytest
import torch

from tests.launcher.fakes import tiny_model
from unisono.models.partition import ModelPartition
from unisono.models.shapes import shape_config
from unisono.workers.memory import OutOfMemory
from unisono.workers.weight_memory import check_weights, weight_bytes

GIB = 2**30
BF16, FP32 = torch.bfloat16, torch.float32


def large(ranks: int = 1) -> ModelPartition:
    return ModelPartition.of(shape_config("shape:qwen3-32b"), ranks)


def refusal(partition: ModelPartition, dtype: torch.dtype, kind: str, free: int) -> str:
    with pytest.raises(OutOfMemory) as caught:
        check_weights(partition, 0, dtype, kind, free)
    return str(caught.value)


def test_a_gpu_keeps_what_is_read_and_a_cpu_its_head_in_float32() -> None:
    for tied in (True, False):
        partition = ModelPartition.of(tiny_model(tie_word_embeddings=tied), 2)
        read = sum(spec.num_elements for spec in partition.weights(1))
        head = partition.vocab.size(1) * 36
        assert weight_bytes(partition, 1, BF16, "cuda") == 2 * read
        assert weight_bytes(partition, 1, FP32, "cuda") == 4 * read
        assert weight_bytes(partition, 1, BF16, "cpu") == 2 * read + head * (4 if tied else 2)
        assert weight_bytes(partition, 1, FP32, "cpu") == 4 * read + head * (4 if tied else 0)


def test_what_keeps_fp32_is_counted_so() -> None:
    partition = ModelPartition.of(shape_config("shape:qwen3.5-27b"), 2)
    specs = list(partition.weights(1))
    wide = sum(spec.num_elements for spec in specs if spec.keeps_fp32)
    count = sum(spec.num_elements for spec in specs)
    # Two norms a layer and two of its 16 attention layers' heads, the last one; A_log, dt_bias and
    # the norm of 48 delta nets.
    assert wide == 64 * 2 * 5120 + 16 * 2 * 256 + 5120 + 48 * (2 * 24 + 128)
    assert weight_bytes(partition, 1, BF16, "cuda") == 2 * count + 2 * wide
    assert weight_bytes(partition, 1, FP32, "cuda") == 4 * count


def test_weights_that_just_fit_are_loaded_and_one_byte_less_is_too_little() -> None:
    needed = weight_bytes(large(), 0, BF16, "cuda")
    check_weights(large(), 0, BF16, "cuda", needed)
    refusal(large(), BF16, "cuda", needed - 1)


def test_on_gpus_more_ranks_help_and_a_narrower_dtype() -> None:
    assert refusal(large(), BF16, "cuda", int(23.5 * GIB)) == (
        "rank 0 needs 61.02 GiB for its weights and 23.50 GiB are free: use --tp 3 "
        "(20.89 GiB a rank) or a GPU with more than 61.02 GiB free"
    )
    said = refusal(large(), FP32, "cuda", 80 * GIB)
    assert re.search(
        r"--tp 2 \(61\.\d\d GiB a rank\), --dtype bfloat16 \(61.02 GiB a rank\) or", said
    )


@pytest.mark.parametrize("free", [2 * GIB, 9 * GIB, 23 * GIB, 50 * GIB])
def test_the_rank_count_that_is_named_fits_and_no_smaller_one_does(free: int) -> None:
    said = refusal(large(), BF16, "cuda", free)
    count = int(re.search(r"--tp (\d+)", said)[1])  # type: ignore[index]
    check_weights(large(count), 0, BF16, "cuda", int(free * 0.9))
    refusal(large(count - 1), BF16, "cuda", int(free * 0.9))


def test_where_nothing_else_helps_only_more_memory_is_named() -> None:
    model = ModelPartition.of(tiny_model(), 1)
    said = refusal(model, BF16, "cuda", 1000)
    assert said.partition(": ")[2].startswith("use a GPU with more than")


def test_on_a_host_more_ranks_do_not_help() -> None:
    said = refusal(large(2), FP32, "cpu", 40 * GIB)
    assert "--tp" not in said
    assert "and 40.00 GiB are free for it on this host: use --dtype bfloat16" in said
    assert refusal(large(2), FP32, "cpu", 8 * GIB).endswith(
        "use a host with more than 122.05 GiB free"
    )
