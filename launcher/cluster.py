"""Whether torchrun, srun or the like started us, and what it says about the ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.models.config import ConfigError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that together mean: a launcher of clusters is in charge."""
SESSION_VARIABLE = "UNISONO_SESSION"
"""Set in our own children, whose rendezvous variables are ours."""
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """One process of a group that another launcher started, one process per rank."""

    launcher: str
    """torchrun, srun or environment (the variables are there, whoever set them)."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this host."""
    master_addr: str
    """A name of the host of rank 0 that every rank can reach."""
    master_port: int

    @property
    def single_host(self) -> bool:
        return self.local_world_size == self.world_size


def detect_cluster(environ: Mapping[str, str]) -> ClusterFacts | None:
    """Read the rendezvous variables; None if not all are set, or if we set them ourselves.

    Raises ConfigError naming the variable, its value and what is legal.
    """
    if SESSION_VARIABLE in environ or not all(environ.get(name) for name in RENDEZVOUS):
        return None
    world_size = _number(environ, "WORLD_SIZE", 1, None)
    rank = _number(environ, "RANK", 0, world_size - 1)
    master_addr = environ["MASTER_ADDR"]
    on_one_host = world_size == 1 or _LOOPBACK.fullmatch(master_addr) is not None
    local_world_size = _local_world_size(environ, world_size, on_one_host)
    return ClusterFacts(
        launcher=_launcher_name(environ),
        rank=rank,
        world_size=world_size,
        local_rank=_local_rank(environ, rank, local_world_size, on_one_host),
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=_number(environ, "MASTER_PORT", 1, 65535),
    )


def check_cluster_tp(tp: int, facts: ClusterFacts) -> None:
    """Raise ConfigError unless every rank of the model is one of the cluster's."""
    if tp != facts.world_size:
        raise ConfigError(
            f"tp={tp}: {facts.launcher} started {facts.world_size} ranks (WORLD_SIZE); "
            f"the only legal value is {facts.world_size}"
        )


def _launcher_name(environ: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "srun" if "SLURM_PROCID" in environ else "environment"


def _local_world_size(environ: Mapping[str, str], world_size: int, on_one_host: bool) -> int:
    if environ.get("LOCAL_WORLD_SIZE"):
        return _number(environ, "LOCAL_WORLD_SIZE", 1, world_size)
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_TASKS_PER_NODE"):
        return _slurm_tasks_here(environ, world_size)
    if on_one_host:
        return world_size
    raise ConfigError(
        "LOCAL_WORLD_SIZE is not set: with RANK and WORLD_SIZE over several hosts it must be the "
        f"number of ranks on this host, 1 to {world_size}"
    )


def _local_rank(
    environ: Mapping[str, str], rank: int, local_world_size: int, on_one_host: bool
) -> int:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if environ.get(name):
            return _number(environ, name, 0, local_world_size - 1)
    if on_one_host:
        return rank
    raise ConfigError(
        "LOCAL_RANK is not set: with RANK and WORLD_SIZE over several hosts it must be this "
        f"rank's number on this host, 0 to {local_world_size - 1}"
    )


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Read Slurm's tasks per node, such as "4(x2),1" for 4, 4 and 1, at this node."""
    text = environ["SLURM_STEP_TASKS_PER_NODE"]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,6})(?:\(x([1-9][0-9]{0,6})\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text}: wants counts such as 4(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) != world_size:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: srun started {sum(counts)} tasks "
            f"(SLURM_STEP_TASKS_PER_NODE={text}); the only legal value is {sum(counts)}"
        )
    if len(counts) == 1:
        return counts[0]
    return counts[_number(environ, "SLURM_NODEID", 0, len(counts) - 1)]


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environ.get(name, "")
    legal = f"{least} or more" if most is None else f"{least} to {most}"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r}: not a whole number; legal: {legal}")
    value = int(text)
    if value < least or (most is not None and value > most):
        raise ConfigError(f"{name}={value}: legal: {legal}")
    return value
