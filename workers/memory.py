"""How much KV memory a rank can offer: measured after loading, sent as a result."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from unisono.models.partition import ModelPartition
from unisono.workers.config import BLOCK_SIZE, WorkerConfig

_KV_SHARE = 0.25
"""Part of the host's free memory that the KV caches of its ranks may take together."""


class OutOfMemory(RuntimeError):
    """The rank cannot hold what it was asked to; says by how much and what helps."""


def block_bytes(partition: ModelPartition, rank: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block on `rank`, all layers, keys and values."""
    config = partition.config
    per_token = 2 * config.num_layers * partition.kv_heads.size(rank) * config.head_dim
    return per_token * BLOCK_SIZE * dtype.itemsize


def offer_blocks(
    config: WorkerConfig, bytes_of_block: int, available: int, environ: Mapping[str, str]
) -> int:
    """Blocks this rank can offer beside block 0; `available` is the host's free memory in bytes.

    Raises OutOfMemory where an explicit size does not fit, or not even one block does.
    """
    ranks_here = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.kv_tokens:
        wanted = -(-config.kv_tokens // BLOCK_SIZE)
        fits = available // ranks_here // bytes_of_block
        if wanted > fits:
            raise OutOfMemory(
                f"kv_tokens={config.kv_tokens} takes {_gib(wanted * bytes_of_block)} on each of "
                f"{ranks_here} ranks, {_gib(available // ranks_here)} are free; at most "
                f"{fits * BLOCK_SIZE} tokens fit: lower --kv-tokens"
            )
        return wanted
    share = int(available * _KV_SHARE) // ranks_here
    blocks = min(
        config.max_requests * -(-config.max_model_len // BLOCK_SIZE), share // bytes_of_block
    )
    if blocks < 1:
        raise OutOfMemory(
            f"one KV block of {BLOCK_SIZE} tokens takes {_gib(bytes_of_block)}, {_gib(share)} are "
            f"free for it: free memory, or give --kv-tokens {BLOCK_SIZE} to use what there is"
        )
    return blocks


def available_bytes() -> int:
    """Memory of the host that can be taken without swapping, within the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = "".join(_lines("/sys/fs/cgroup/memory.max")).strip()
    used = "".join(_lines("/sys/fs/cgroup/memory.current")).strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(int(limit) - int(used), 0))
    return available


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
