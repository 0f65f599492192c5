"""What the weights of a rank will take, and a refusal with numbers before the first is read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unisono.models.partition import ModelPartition, legal_rank_counts
from unisono.workers.config import CARD_SHARE
from unisono.workers.memory import OutOfMemory, gib


def weight_bytes(partition: ModelPartition, rank: int, dtype: torch.dtype, kind: str) -> int:
    """Bytes that the weights of `rank` take once they are packed for `kind`, cpu or cuda."""
    total = sum(spec.nbytes(dtype.itemsize) for spec in partition.weights(rank))
    if kind == "cpu":
        # The head is packed in float32, beside the embedding where the two are tied.
        config = partition.config
        replaced = 0 if config.tie_word_embeddings else dtype.itemsize
        total += partition.vocab.size(rank) * config.hidden_size * (4 - replaced)
    return total


def check_weights(
    partition: ModelPartition, rank: int, dtype: torch.dtype, kind: str, free: int
) -> None:
    """Raise OutOfMemory, saying what helps, if the weights of `rank` exceed its `free` bytes."""
    needed = weight_bytes(partition, rank, dtype, kind)
    if needed <= free:
        return
    *others, last = _remedies(partition, dtype, kind, free, needed)
    helps = f"{', '.join(others)} or {last}" if others else last
    whose = "" if kind == "cuda" else " for it on this host"
    raise OutOfMemory(
        f"rank {rank} needs {gib(needed)} for its weights and {gib(free)} are free{whose}: "
        f"use {helps}"
    )


def _remedies(
    partition: ModelPartition, dtype: torch.dtype, kind: str, free: int, needed: int
) -> Iterator[str]:
    room = int(free * CARD_SHARE)  # something must be left for the KV cache
    config, ranks = partition.config, partition.ranks
    # On the CPU the ranks share one memory: more of them would need as much.
    more = [] if kind == "cpu" else [n for n in legal_rank_counts(config) if n > ranks]
    for count in more:
        each = weight_bytes(ModelPartition.of(config, count), 0, dtype, kind)
        if each <= room:
            yield f"--tp {count} ({gib(each)} a rank)"
            break
    each = weight_bytes(partition, 0, torch.bfloat16, kind)
    if dtype.itemsize > torch.bfloat16.itemsize and each <= room:
        yield f"--dtype bfloat16 ({gib(each)} a rank)"
    if kind == "cuda":
        yield f"a GPU with more than {gib(needed)} free"
    else:
        yield f"a host with more than {gib(needed * ranks)} free"
