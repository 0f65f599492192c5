"""The runtime process: bind both channels, bring the ranks up, serve until told to stop."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import CLIENT_MESSAGES, EngineReady, Failed, Starting, WorkerLost
from unisono.runtime.scheduler import Scheduler
from unisono.runtime.worker_group import RankFault, WorkerGroup
from unisono.workers.channel import Hub
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.orders import die_with_parent, read_orders
from unisono.workers.protocol import WORKER_REPORTS, Fault, Loaded, Progress

CLIENT = "launcher"
"""Name under which the launcher's DEALER connects."""
_ROOT_CAUSE_S = 0.5
_REMOVE_TRIES = 50

log = logging.getLogger(__name__)


def main() -> None:
    """A child of our launcher: orders come over stdin; the socket directory dies with it."""
    orders, parent_pid = read_orders(RuntimeOrders)
    die_with_parent(parent_pid, tidy=partial(_remove, Path(orders.private_dir)))
    logging.basicConfig(
        level=orders.log_level.upper(), format="%(asctime)s runtime %(levelname)s %(message)s"
    )
    with (
        Hub(orders.client_endpoint, CLIENT_MESSAGES, orders.session) as clients,
        Hub(
            orders.worker_endpoint,
            WORKER_REPORTS,
            orders.session,
            orders.curve,
            orders.worker_fd,
        ) as ranks,
    ):
        workers = WorkerGroup(ranks, orders.config.worker.tp)
        try:
            _serve(orders.config, clients, workers)
        except RankFault as error:
            _report_faults(clients, [error.fault, *workers.drain_faults(_ROOT_CAUSE_S)])
            sys.exit(1)
        except Exception as error:
            log.info("failed", exc_info=True)
            clients.send(CLIENT, _own_failure(error))
            sys.exit(1)


def _remove(directory: Path) -> None:
    """Remove the socket directory, also while the main thread is still binding sockets in it."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.01)


def _serve(config: RuntimeConfig, clients: Hub, workers: WorkerGroup) -> None:
    loaded = _bring_up(clients, workers)
    for rank, report in sorted(loaded.items()):
        log.info(
            "rank %d: %.1f MiB of weights, offers %d KV blocks",
            rank,
            report.weight_bytes / 2**20,
            report.num_blocks,
        )
    num_blocks = min(report.num_blocks for report in loaded.values())
    workers.allocate(num_blocks)
    worker = config.worker
    scheduler = Scheduler(
        num_blocks=num_blocks,
        max_requests=worker.max_requests,
        max_model_len=worker.max_model_len,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=worker.model.eos_token_ids,
        prefix_cache=not config.no_prefix_cache,
    )
    clients.send(
        CLIENT,
        EngineReady(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            device=loaded[0].device,
            dtype=loaded[0].dtype,
            rank_pids=workers.pids,
        ),
    )
    gc.freeze()  # nothing made at start-up is looked at again by the collector
    Engine(clients, workers, scheduler, worker.max_model_len).run()


def _bring_up(clients: Hub, workers: WorkerGroup) -> dict[int, Loaded]:
    for news in workers.wait_loaded():
        match news:
            case Progress(rank=rank, phase=phase, done=done, total=total):
                clients.send(CLIENT, Starting(rank=rank, phase=phase, done=done, total=total))
            case _:
                return news
    raise AssertionError("wait_loaded ends with what was loaded")


def _report_faults(clients: Hub, faults: list[Fault]) -> None:
    """Send every fault; the launcher shows the one that is not a consequence."""
    for fault in faults:
        clients.send(
            CLIENT,
            Failed(
                rank=fault.rank,
                phase=fault.phase,
                step=fault.step,
                error=fault.error,
                message=fault.message,
                traceback=fault.traceback,
                secondary=fault.secondary,
            ),
        )


def _own_failure(error: Exception) -> Failed:
    """What the runtime saw: of a rank if the error names one, else of itself."""
    blamed = error if isinstance(error, WorkerLost) else None
    return Failed(
        rank=-1 if blamed is None else blamed.rank,
        phase="serve" if blamed is None else blamed.phase,
        step=-1 if blamed is None else blamed.step,
        error=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
