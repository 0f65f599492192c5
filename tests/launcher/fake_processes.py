"""A runtime and ranks that only start, fail and stop, for tests of what watches them.

They use the real orders, the real channel and the real guards. `UNISONO_FAKE` says what goes
wrong, such as "rank 1: load weights: raise": at the given phase of the given process it raises,
ends, kills itself, hangs, or refuses SIGTERM and hangs. It takes a step for each `abort`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.launcher.config import LaunchConfig
from unisono.launcher.process_table import ProcessSpec, Wiring, process_table
from unisono.models.config import ModelConfig, RopeConfig
from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.protocol import (
    CLIENT_MESSAGES,
    Abort,
    Crashed,
    Delta,
    EngineReady,
    Failed,
    Finished,
    Recorded,
    Reschedule,
    Starting,
    Stop,
    Submit,
)
from unisono.workers.channel import Hub, Peer, wait_readable
from unisono.workers.config import WorkerConfig
from unisono.workers.orders import WorkerOrders, die_with_parent, read_orders
from unisono.workers.protocol import (
    WORKER_COMMANDS,
    WORKER_REPORTS,
    Allocate,
    Fault,
    Progress,
    Ready,
    Shutdown,
    int32s,
)

FAULT = "UNISONO_FAKE"
PHASES = ("join the group", "load weights")
STEP = "step"


def config(tp: int = 2, **options: Any) -> LaunchConfig:
    model = ModelConfig(
        family="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope=RopeConfig(rotary_dim=4),
    )
    worker = WorkerConfig(model_path="nowhere", model=model, tp=tp)
    options = {"stop_grace_s": 1.0, "start_timeout_s": 20.0} | options
    return LaunchConfig(runtime=RuntimeConfig(worker=worker), **options)


def fake_table(
    config: LaunchConfig, wiring: Wiring, environ: Mapping[str, str], cores: int, **options: Any
) -> tuple[ProcessSpec, ...]:
    """The real table with our entries."""
    module = "tests.launcher.fake_processes"
    return tuple(
        replace(spec, entry=f"{module}:{'runtime' if spec.name == 'runtime' else 'rank'}")
        for spec in process_table(config, wiring, environ, cores, **options)
    )


def runtime() -> None:
    orders, parent_pid = read_orders(RuntimeOrders)
    die_with_parent(parent_pid, lambda: shutil.rmtree(orders.private_dir, ignore_errors=True))
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
        _misbehave("runtime", "start")
        _serve(orders.config.worker.tp, clients, ranks)


def rank() -> None:
    orders, parent_pid = read_orders(WorkerOrders)
    die_with_parent(parent_pid)
    name = f"rank {orders.rank}"
    with Peer(orders.endpoint, name, WORKER_COMMANDS, orders.session, orders.curve) as peer:
        phase = "start"
        try:
            for phase in PHASES:
                peer.send(Progress(rank=orders.rank, phase=phase))
                # Until it is heard: a message is sent by a thread that dies with the process.
                assert isinstance(peer.receive(20), Allocate)
                _misbehave(name, phase)
            phase = STEP
            peer.send(Ready(rank=orders.rank))
            while isinstance(peer.receive(None), Allocate):
                _misbehave(name, phase)
        except Exception as error:
            peer.send(_fault(orders.rank, phase, error))
            sys.exit(1)


def _serve(num_ranks: int, clients: Hub, ranks: Hub) -> None:
    ready = 0
    while True:
        for hub in wait_readable([clients, ranks], None):
            received = hub.receive(0)
            assert received is not None
            match received[1]:
                case Progress(rank=rank, phase=phase):
                    clients.send("launcher", Starting(rank=rank, phase=phase))
                    ranks.send(f"rank {rank}", Allocate(num_blocks=0))
                case Ready():
                    ready += 1
                    if ready == num_ranks:
                        clients.send("launcher", _ready())
                case Fault() as fault:
                    _report(clients, fault)
                case Submit(request_id=number, prompt_ids=prompt):
                    clients.send("launcher", Delta(request_id=number, token_ids=prompt))
                    clients.send("launcher", _finished(number, len(prompt)))
                case Abort():  # Who starts an engine and says so knows that it serves.
                    for number in range(num_ranks):
                        ranks.send(f"rank {number}", Allocate(num_blocks=0))
                case Reschedule() as limits:
                    clients.send("launcher", limits)
                case Crashed():
                    clients.send("launcher", Recorded(path=""))
                case Stop():
                    for number in range(num_ranks):
                        ranks.send(f"rank {number}", Shutdown())
                    return


def _misbehave(name: str, phase: str) -> None:
    for fault in os.environ.get(FAULT, "").split(";"):
        who, _, rest = fault.partition(": ")
        where, _, what = rest.partition(": ")
        if (who, where) != (name, phase):
            continue
        match what.split():
            case ["raise"]:
                raise ValueError("no\nsuch  tensor")
            case ["see", "a", "peer", "go"]:
                raise ConnectionError("a peer is gone")
            case ["exit", code]:
                os._exit(int(code))
            case ["signal", number]:
                os.kill(os.getpid(), int(number))
            case ["hang"]:
                time.sleep(60)
            case ["hang", "deaf"]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)


def _fault(number: int, phase: str, error: Exception) -> Fault:
    return Fault(
        rank=number,
        phase=phase,
        step=17 if phase == STEP else -1,
        error=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        secondary=isinstance(error, ConnectionError),
    )


def _report(clients: Hub, fault: Fault) -> None:
    failed = Failed(**{name: getattr(fault, name) for name in Failed.__slots__})
    clients.send("launcher", failed)


def _ready() -> EngineReady:
    return EngineReady(
        num_blocks=8, block_size=64, device="cpu", dtype="float32", rank_pids=int32s()
    )


def _finished(number: int, length: int) -> Finished:
    return Finished(
        request_id=number,
        reason="length",
        num_prompt_tokens=length,
        num_tokens=length,
        first_token_s=0.0,
        total_s=0.0,
    )
