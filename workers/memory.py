"""How much memory a rank can offer for KV and states: measured after loading, sent as a result."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from unisono.models.partition import ModelPartition
from unisono.workers.config import BLOCK_SIZE, CARD_SHARE, HOST_SHARE, WorkerConfig

LEAST_SNAPSHOTS = 8
"""Of recurrent states, where there is a prefix cache and memory for them."""


class OutOfMemory(RuntimeError):
    """The rank cannot hold what it was asked to; says by how much and what helps."""


def block_bytes(partition: ModelPartition, rank: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block on `rank`, all layers with attention, keys and values."""
    per_token = partition.num_kv_layers * partition.kv_elements(rank)
    return per_token * BLOCK_SIZE * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that the KV cache of one rank, and its recurrent states, may take."""

    share: int
    """Within --memory-utilization; negative by what other things take beyond it."""
    most: int
    """Whatever the share, more does not fit."""
    per_utilization: float
    """Bytes that `share` grows by if the utilization grows by 1."""
    utilization: float
    what: str
    """Whose share it is, for a message."""

    def without(self, taken: int) -> Budget:
        """What is left beside `taken` bytes of recurrent states."""
        return replace(
            self,
            share=self.share - taken,
            most=self.most - taken,
            what=f"{self.what.rstrip(',')}, less {gib(taken)} of recurrent states,",
        )


def host_budget(free: int, ranks: int, utilization: float) -> Budget:
    """The budget of each of `ranks` on a host of `free` bytes after their weights are loaded."""
    used = utilization or HOST_SHARE
    return Budget(
        share=int(free * used) // ranks,
        most=free // ranks,
        per_utilization=free / ranks,
        utilization=used,
        what=f"the host's {gib(free)} free for {ranks} rank{'s' * (ranks > 1)}",
    )


def card_budget(
    *, total: int, free: int, weights: int, activations: int, graphs: int, utilization: float
) -> Budget:
    """The budget of a rank that has a card for itself.

    `free` of its `total` bytes are left after the `weights` are loaded; the largest step takes
    `activations` on top, and CUDA graphs `graphs`. What others hold of the card counts against
    neither share nor weights, but may not be had.
    """
    used = utilization or CARD_SHARE
    most = max(free - activations - graphs, 0)
    return Budget(
        share=min(int(total * used) - weights - activations - graphs, most),
        most=most,
        per_utilization=total,
        utilization=used,
        what=f"the card's {gib(total)}, less {gib(weights)} of weights, {gib(activations)} for a "
        f"step and {gib(graphs)} for graphs,",
    )


def offer(
    config: WorkerConfig, snapshots: bool, bytes_of_block: int, bytes_of_state: int, budget: Budget
) -> tuple[int, int]:
    """KV blocks beside block 0 and recurrent states beside state 0 that this rank can offer.

    `snapshots`: some states are to be kept for cached prefixes. Raises OutOfMemory like
    `offer_blocks` and `offer_states`.
    """
    states = 0
    if bytes_of_state:
        states = offer_states(config, snapshots, bytes_of_block, bytes_of_state, budget)
        budget = budget.without((states + 1) * bytes_of_state)
        config = replace(config, max_requests=min(config.max_requests, states))
    return offer_blocks(config, bytes_of_block, budget), states


def offer_blocks(config: WorkerConfig, bytes_of_block: int, budget: Budget) -> int:
    """Blocks this rank can offer beside block 0.

    Raises OutOfMemory where an explicit size does not fit, or not even one block does.
    """
    if config.kv_tokens:
        wanted = -(-config.kv_tokens // BLOCK_SIZE)
        fits = max(budget.most // bytes_of_block, 0)
        if wanted > fits:
            raise OutOfMemory(
                f"--kv-tokens {config.kv_tokens} takes {gib(wanted * bytes_of_block)} of memory "
                f"on this rank and {gib(max(budget.most, 0))} can be had "
                f"({budget.what.rstrip(',')}): lower it to {fits * BLOCK_SIZE}, or free "
                f"{gib(wanted * bytes_of_block - budget.most)}"
            )
        return wanted
    if budget.share < bytes_of_block:
        raise OutOfMemory(_no_block(bytes_of_block, budget))
    blocks = config.max_requests * -(-config.max_model_len // BLOCK_SIZE)
    return min(blocks, budget.share // bytes_of_block)


def offer_states(
    config: WorkerConfig, snapshots: bool, bytes_of_block: int, bytes_of_state: int, budget: Budget
) -> int:
    """Recurrent states this rank can offer beside state 0; at least one, whether it fits or not.

    Unless asked for: one for each request and, with `snapshots`, as many of these, at most half of
    the budget. Raises OutOfMemory where an explicit number does not fit beside the KV cache.
    """
    kv = bytes_of_block * max(-(-config.kv_tokens // BLOCK_SIZE), 1)
    if not config.state_slots:
        room = min(budget.share // 2, budget.share - bytes_of_block, budget.most - kv)
        most = config.max_requests + snapshots * max(config.max_requests, LEAST_SNAPSHOTS)
        return max(min(most, room // bytes_of_state - 1), 1)
    fits = (budget.most - kv) // bytes_of_state - 1
    if config.state_slots > fits:
        wanted = (config.state_slots + 1) * bytes_of_state
        # Unless the size of the cache is given it must find room within the share.
        is_short = not config.kv_tokens and budget.share < kv + (fits + 1) * bytes_of_state
        share = " and raise --memory-utilization" if is_short else ""
        lower = f"lower it to {fits}{share}, or " if fits > 0 else ""
        raise OutOfMemory(
            f"--state-slots {config.state_slots} and the scratch state take {gib(wanted)} of "
            f"memory on this rank, and beside a KV cache of {gib(kv)} "
            f"{gib(max(budget.most - kv, 0))} can be had ({budget.what.rstrip(',')}): {lower}"
            f"free {gib(wanted - budget.most + kv)}"
        )
    return config.state_slots


def _no_block(bytes_of_block: int, budget: Budget) -> str:
    said = (
        f"one KV block of {BLOCK_SIZE} tokens takes {gib(bytes_of_block)}, and "
        f"--memory-utilization {budget.utilization:g} of {budget.what} leaves "
        f"{gib(max(budget.share, 0))}"
    )
    if budget.most < bytes_of_block:
        return f"{said}: free {gib(bytes_of_block - budget.most)}, or spread over more ranks (--tp)"
    missing = (bytes_of_block - budget.share) / budget.per_utilization
    # Rounded up: the value that is named must be enough.
    enough = min(math.ceil((budget.utilization + missing) * 1000 + 1) / 1000, 1.0)
    return f"{said}: raise it to at least {enough:g}"


@contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Turn torch's report that a GPU has no memory left, of many lines, into an OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error)
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
        free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", said)
        wanted = f"{asked[1]} more are needed" if asked else "more is needed"
        left = f" and {free[2]} of its {free[1]} are free" if free else ""
        raise OutOfMemory(
            f"the memory of the GPU is full: {wanted}{left}: spread over more ranks (--tp), lower "
            "--memory-utilization, --max-step-tokens or --max-requests, or end what else uses it"
        ) from error


def available_bytes() -> int:
    """Memory of the host that can be taken without swapping, within the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = "".join(_lines("/sys/fs/cgroup/memory.max")).strip()
    used = "".join(_lines("/sys/fs/cgroup/memory.current")).strip()
    if limit.isdigit() and used.isdigit():
        # Pages of files count as used, and are given up when memory is wanted.
        cached = sum(
            int(line.split()[1])
            for line in _lines("/sys/fs/cgroup/memory.stat")
            if line.startswith("inactive_file ")
        )
        available = min(available, max(int(limit) - int(used) + cached, 0))
    return available


def free_bytes(device: torch.device, ranks: int) -> int:
    """What is free for one rank: of the current GPU, or of a host that `ranks` ranks share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return available_bytes() // ranks


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []


def gib(count: int) -> str:
    """Return `count` bytes for a message."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"
