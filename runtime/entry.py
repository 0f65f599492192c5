"""The runtime process: bind both channels, bring the ranks up, serve until told to stop."""

from __future__ import annotations

import gc
import logging
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.engine import ToldToEnd
from unisono.runtime.protocol import (
    CLIENT_MESSAGES,
    EngineReady,
    Failed,
    Recorded,
    Starting,
    WorkerLost,
)
from unisono.runtime.speculation import draft_policy
from unisono.runtime.timed import Parts, parts_for
from unisono.runtime.worker_group import Diverged, RankFault, WorkerGroup
from unisono.workers.channel import Hub, ProtocolError, to_plain
from unisono.workers.config import BLOCK_SIZE, WorkerConfig
from unisono.workers.orders import die_with_parent, read_orders
from unisono.workers.protocol import WORKER_REPORTS, Fault, Loaded, LoadWeights

CLIENT = "launcher"
"""Name under which the launcher's DEALER connects."""
_ROOT_CAUSE_S = 0.5
_REMOVE_TRIES = 50
_REPORT_S = 10.0
"""Longest that our end waits for the report of a failure."""

log = logging.getLogger(__name__)


def main() -> None:
    """A child of our launcher: orders come over stdin; the socket directory dies with it."""
    orders, parent_pid = read_orders(RuntimeOrders)
    reporting = threading.Lock()
    die_with_parent(parent_pid, tidy=partial(_tidy, reporting, Path(orders.private_dir)))
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
        worker = orders.config.worker
        parts = parts_for(orders)
        workers = parts.workers(ranks, worker.tp)
        workers.weights = LoadWeights(path=worker.model_path, load_format=worker.load_format)
        try:
            _serve(orders.config, clients, workers, parts)
        except Exception as error:
            # Whoever ends us now, by a signal or by going, is made to wait for the report.
            with reporting:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                log.info("failed", exc_info=True)
                _report(error, orders, clients, workers)
            sys.exit(1)


def _tidy(reporting: threading.Lock, directory: Path) -> None:
    reporting.acquire(timeout=_REPORT_S)
    _remove(directory)


def _remove(directory: Path) -> None:
    """Remove the socket directory, also while the main thread is still binding sockets in it."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.01)


def _serve(config: RuntimeConfig, clients: Hub, workers: WorkerGroup, parts: Parts) -> None:
    workers.on_progress = lambda news: clients.send(CLIENT, Starting(**to_plain(news)))
    loaded = workers.wait_loaded()
    for rank, report in sorted(loaded.items()):
        log.info(
            "rank %d: %.1f MiB of weights, %.1f MiB for a step, offers %d KV blocks of %.2f MiB "
            "and %d recurrent states of %.2f MiB",
            rank,
            report.weight_bytes / 2**20,
            report.activation_bytes / 2**20,
            report.num_blocks,
            report.block_bytes / 2**20,
            report.num_states,
            report.state_bytes / 2**20,
        )
    num_blocks = min(report.num_blocks for report in loaded.values())
    num_states = min(report.num_states for report in loaded.values())
    workers.allocate(num_blocks, num_states)
    workers.on_progress = lambda news: None  # of orders clients hear by their answers
    worker = config.worker
    max_requests = _requests_at_a_time(worker, num_states, loaded)
    scheduler = parts.scheduler(
        num_blocks=num_blocks,
        num_states=num_states,
        num_drafts=worker.num_drafts,
        policy=draft_policy(worker.speculate, worker.num_drafts),
        max_requests=max_requests,
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
            weight_bytes=max(report.weight_bytes for report in loaded.values()),
            activation_bytes=max(report.activation_bytes for report in loaded.values()),
            block_bytes=max(report.block_bytes for report in loaded.values()),
            num_states=num_states,
            state_bytes=max(report.state_bytes for report in loaded.values()),
            max_requests=max_requests,
            graph_bytes=max(report.graph_bytes for report in loaded.values()),
        ),
    )
    gc.freeze()  # nothing made at start-up is looked at again by the collector
    parts.engine(clients, workers, scheduler, worker.max_model_len).run()


def _requests_at_a_time(worker: WorkerConfig, num_states: int, loaded: dict[int, Loaded]) -> int:
    """How many of --max-requests run; fewer, with a warning, where states are short."""
    if not worker.model.is_hybrid or worker.max_requests <= num_states:
        return worker.max_requests
    size = max(report.state_bytes for report in loaded.values()) / 2**20
    log.warning(
        "%d of --max-requests %d run at a time, for each needs a recurrent state: %s",
        num_states,
        worker.max_requests,
        "raise --state-slots"
        if worker.state_slots
        else f"no more of {size:.1f} MiB fit: raise --memory-utilization, lower --kv-tokens, or "
        "choose --state-dtype bfloat16",
    )
    return num_states


def _report(error: Exception, orders: RuntimeOrders, clients: Hub, workers: WorkerGroup) -> None:
    """Write the last steps, then tell every fault, the cause first, and where the steps are.

    That a rank is gone may be noticed before the fault it left on the ranks' channel: by the
    launcher, or by a plan that cannot be sent.
    """
    own = _of_fault(error.fault) if isinstance(error, RankFault) else _own_failure(error)
    path = _write_flight(orders, workers, own)
    failures = [] if isinstance(error, ToldToEnd) else [own]
    if not isinstance(error, Diverged):
        failures += map(_of_fault, workers.drain_faults(_ROOT_CAUSE_S))
        failures.sort(key=lambda failed: (failed.secondary, failed.rank < 0))
        is_cause = bool(failures) and not failures[0].secondary
        if is_cause and failures[0] is not own:
            path = _write_flight(orders, workers, failures[0])
    with suppress(ProtocolError):  # of a launcher that has gone
        # The record last: who has it has all, and the launcher waits for it.
        for told in (*failures, Recorded(path=path)):
            clients.send(CLIENT, told)


def _write_flight(orders: RuntimeOrders, workers: WorkerGroup, failure: Failed) -> str:
    """Write the last steps; return the file's path, or "" if there is none to be had."""
    path, weights = orders.flight_file, workers.weights
    worker = replace(orders.config.worker, model_path=weights.path, load_format=weights.load_format)
    orders = replace(orders, config=replace(orders.config, worker=worker))
    try:
        if path and workers.recorder.write(Path(path), orders, workers.allocated, failure):
            return path
    except OSError as error:
        log.warning("the last steps cannot be written to %s: %s", path, error)
    return ""


def _of_fault(fault: Fault) -> Failed:
    return Failed(**{name: getattr(fault, name) for name in Failed.__slots__})


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
