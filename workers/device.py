"""A rank's device and its group: threads, process group, ordered collectives."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.ops.comm import Group, solo_group

_JOIN_TIMEOUT = timedelta(minutes=10)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a resolved WorkerConfig names."""
    return _DTYPES[name]


def rank_device(kind: str, environ: Mapping[str, str]) -> torch.device:
    """The device of this rank: the CPU, or the GPU of its LOCAL_RANK, made the current one."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def give_back(device: torch.device) -> None:
    """Return what nothing uses any more to the device: allocators keep it to hand it out again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc alone
        trim(0)


def set_threads(threads: int, environ: Mapping[str, str]) -> None:
    """Give this rank `threads` CPU threads; 0: the usable cores, shared by the host's ranks."""
    if threads <= 0:
        ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
    torch.set_num_threads(threads)


def open_store(environ: Mapping[str, str]) -> dist.Store:
    """The rendezvous store of torchrun's environment.

    Rank 0 serves it, on the socket that the launcher bound for it (UNISONO_STORE_FD) where there
    is one, unless torchrun's agent already does (TORCHELASTIC_USE_AGENT_STORE).
    """
    rank = int(environ["RANK"])
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    served_here = rank == 0 and not agent
    listen_fd = int(environ["UNISONO_STORE_FD"]) if "UNISONO_STORE_FD" in environ else None
    return dist.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        int(environ["WORLD_SIZE"]),
        is_master=served_here,
        timeout=_JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listen_fd if served_here else None,
    )


def join_group(
    rank: int, size: int, device: torch.device, store: dist.Store | None, collectives: str = "auto"
) -> Group:
    """Meet the other ranks; alone, no group is made and no store is needed.

    `collectives`: see WorkerConfig. Raises RuntimeError where it is "symmetric" and cannot be.
    """
    if size == 1:
        return solo_group()
    assert store is not None
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("unisono", store),
        rank=rank,
        world_size=size,
        timeout=_JOIN_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    if not on_gpu:
        return Group(rank, size, dist.group.WORLD)
    from unisono.ops.kernels.reduce import ordered_sum  # needs Triton
    from unisono.ops.symmetric import open_direct

    direct = open_direct(collectives, rank, size, device, store, dist.group.WORLD)
    return Group(rank, size, dist.group.WORLD, ordered_sum, direct)


def leave_group() -> None:
    """Take the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
