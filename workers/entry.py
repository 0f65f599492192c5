"""Where a rank begins: under our launcher, or as a rank of torchrun or srun.

Torch is imported after the rank has reported, so that even a broken installation is told with
rank and phase.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, NoReturn

from unisono.workers.channel import Peer, from_json, to_json
from unisono.workers.orders import WorkerOrders, die_with_parent, read_orders
from unisono.workers.protocol import WORKER_COMMANDS
from unisono.workers.reporter import Reporter

if TYPE_CHECKING:
    import torch.distributed as dist

ORDERS_KEY = "unisono/orders"
"""Where rank 0 leaves its orders for ranks that no launcher of ours started."""

log = logging.getLogger(__name__)


def main() -> None:
    """A child of our launcher: orders come over stdin."""
    orders, parent_pid = read_orders(WorkerOrders)
    die_with_parent(parent_pid)
    end_at_once(_run_rank(orders, None))


def main_in_cluster() -> None:
    """A rank >= 1 that torchrun or srun started: orders come from rank 0 through the store."""
    prepare_environment(os.environ)
    from unisono.workers.device import open_store

    store = open_store(os.environ)
    orders = from_json(WorkerOrders, store.get(ORDERS_KEY).decode())
    end_at_once(_run_rank(replace(orders, rank=int(os.environ["RANK"])), store))


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set what torch reads when it is loaded or joins a group, unless the user has.

    Torch writes a C++ stack to stderr for each peer that goes; the fault is told without it. Left
    alone, gloo resolves the host's name, which fails or leads out on many machines: ranks of one
    host meet on its loopback.
    """
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    one_host = environ.get("LOCAL_WORLD_SIZE", "") == environ.get("WORLD_SIZE", "")
    if one_host and sys.platform == "linux" and not environ.get("GLOO_SOCKET_IFNAME"):
        environ["GLOO_SOCKET_IFNAME"] = "lo"


def _run_rank(orders: WorkerOrders, store: dist.Store | None) -> int:
    """Obey to the end; return the exit code. The rank's own exception is reported, then 1."""
    logging.basicConfig(
        level=orders.log_level.upper(),
        format=f"%(asctime)s rank {orders.rank} %(levelname)s %(message)s",
    )
    with Peer(
        orders.endpoint, f"rank {orders.rank}", WORKER_COMMANDS, orders.session, orders.curve
    ) as peer:
        report = Reporter(peer, orders.rank)
        report.hello(sha256(to_json(orders.config).encode()).hexdigest())
        try:
            report.enter("import torch")
            _obey(orders, store, peer, report)
        except Exception as error:
            log.info("failed in phase %s", report.phase, exc_info=True)
            report.fault(error, secondary=_is_secondary(error))
            peer.close()
            sys.stderr.flush()
            # A broken group cannot be left politely: its destructor may wait for dead peers.
            os._exit(1)
    return 0


def end_at_once(code: int) -> NoReturn:
    """Leave without Python's own end, which takes torch apart for half a second, in vain."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _obey(orders: WorkerOrders, store: dist.Store | None, peer: Peer, report: Reporter) -> None:
    prepare_environment(os.environ)
    from unisono.workers import device
    from unisono.workers.memory import out_of_memory_explained
    from unisono.workers.timed import make_worker

    device.set_threads(orders.threads, os.environ)
    if orders.config.tp > 1 and store is None:
        report.enter("open the store")
        store = device.open_store(os.environ)
        if orders.rank == 0:
            store.set(ORDERS_KEY, to_json(orders))
    worker = make_worker(orders, peer, report)
    with out_of_memory_explained():
        worker.start(store)
        worker.run()
    report.note("leave the group")
    device.leave_group()


def _is_secondary(error: Exception) -> bool:
    from unisono.ops.comm import PeerLost

    return isinstance(error, PeerLost)
