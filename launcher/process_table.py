"""Which processes an engine consists of, each with its entry, orders and environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import unisono
from unisono.launcher.cluster import SESSION_VARIABLE, ClusterFacts, check_cluster_tp
from unisono.launcher.config import LaunchConfig
from unisono.launcher.option_kinds import whole_number
from unisono.runtime.config import RuntimeOrders
from unisono.workers.channel import CurveKeys
from unisono.workers.orders import WorkerOrders

RUNTIME_ENTRY = "unisono.runtime.entry:main"
WORKER_ENTRY = "unisono.workers.entry:main"
STORE_FD_VARIABLE = "UNISONO_STORE_FD"
"""Number of the listening socket on which rank 0 opens the rendezvous store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child process, before it exists."""

    name: str
    """runtime, or "rank 0", "rank 1", ...: as in messages."""
    entry: str
    """module:function, called without arguments."""
    orders: object
    """A frozen dataclass, written to its stdin."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Where the processes of one session meet."""

    session: str
    private_dir: str
    client_endpoint: str
    worker_endpoint: str
    worker_fd: int | None = None
    """The listening socket of a tcp:// `worker_endpoint`."""
    curve: CurveKeys | None = None
    store_fd: int | None = None
    """The listening socket of the rendezvous store; None: a cluster launcher named a port."""
    store_port: int = 0
    flight_file: str = ""
    """Where the runtime writes the last steps if the engine fails; empty: nowhere."""


def process_name(rank: int) -> str:
    """Return the name of a rank's process; -1 is the runtime, as in `Failed`."""
    return "runtime" if rank < 0 else f"rank {rank}"


def process_table(
    config: LaunchConfig,
    wiring: Wiring,
    environ: Mapping[str, str],
    cores: int,
    cluster: ClusterFacts | None = None,
) -> tuple[ProcessSpec, ...]:
    """Return the runtime and the ranks that this launcher starts.

    All of them on one host; under a cluster launcher rank 0 only, since it started the others.
    `environ` is the user's, `cores` the number of CPUs that the ranks of this host share. Raises
    ConfigError if the cluster has another number of ranks than the model.
    """
    runtime = ProcessSpec(
        name=process_name(-1),
        entry=RUNTIME_ENTRY,
        orders=_runtime_orders(config, wiring),
        env={SESSION_VARIABLE: wiring.session},
        pass_fds=() if wiring.worker_fd is None else (wiring.worker_fd,),
    )
    if cluster is not None:
        check_cluster_tp(config.runtime.worker.tp, cluster)
        return runtime, _cluster_rank(config, wiring, environ, cluster)
    ranks = range(config.runtime.worker.tp)
    return runtime, *(_local_rank(config, wiring, environ, cores, rank) for rank in ranks)


def threads_per_rank(environ: Mapping[str, str], cores: int, ranks: int) -> int:
    """Return the CPU threads of one rank: what the user said, or its share of the cores."""
    return whole_number(environ.get("OMP_NUM_THREADS", "")) or max(1, cores // ranks)


def _local_rank(
    config: LaunchConfig, wiring: Wiring, environ: Mapping[str, str], cores: int, rank: int
) -> ProcessSpec:
    ranks = config.runtime.worker.tp
    threads = threads_per_rank(environ, cores, ranks)
    env = {
        SESSION_VARIABLE: wiring.session,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(wiring.store_port),
        "OMP_NUM_THREADS": str(threads),
    }
    pass_fds: tuple[int, ...] = ()
    if rank == 0 and wiring.store_fd is not None:
        env[STORE_FD_VARIABLE] = str(wiring.store_fd)
        pass_fds = (wiring.store_fd,)
    orders = _worker_orders(config, wiring, rank, threads)
    return ProcessSpec(
        name=process_name(rank), entry=WORKER_ENTRY, orders=orders, env=env, pass_fds=pass_fds
    )


def _cluster_rank(
    config: LaunchConfig,
    wiring: Wiring,
    environ: Mapping[str, str],
    cluster: ClusterFacts,
) -> ProcessSpec:
    env = {
        SESSION_VARIABLE: wiring.session,
        "LOCAL_RANK": str(cluster.local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.local_world_size),
    }
    # Every rank gets these orders, and each host has its own number of cores.
    orders = _worker_orders(config, wiring, cluster.rank, threads=0)
    return ProcessSpec(name=process_name(cluster.rank), entry=WORKER_ENTRY, orders=orders, env=env)


def _runtime_orders(config: LaunchConfig, wiring: Wiring) -> RuntimeOrders:
    return RuntimeOrders(
        config=config.runtime,
        client_endpoint=wiring.client_endpoint,
        worker_endpoint=wiring.worker_endpoint,
        session=wiring.session,
        private_dir=wiring.private_dir,
        flight_file=wiring.flight_file,
        version=unisono.__version__,
        log_level=config.log_level,
        worker_fd=wiring.worker_fd,
        curve=wiring.curve,
        timeline_dir=wiring.private_dir if config.trace else "",
    )


def _worker_orders(config: LaunchConfig, wiring: Wiring, rank: int, threads: int) -> WorkerOrders:
    return WorkerOrders(
        config=config.runtime.worker,
        rank=rank,
        endpoint=wiring.worker_endpoint,
        session=wiring.session,
        max_step_tokens=config.runtime.max_step_tokens,
        has_prefix_cache=not config.runtime.no_prefix_cache,
        log_level=config.log_level,
        threads=threads,
        curve=None if wiring.curve is None else wiring.curve.public_only(),
        timeline_dir=wiring.private_dir if config.trace else "",
    )
