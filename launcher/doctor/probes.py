"""Runs the measuring processes of `unisono doctor` the way an engine's ranks are run."""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.launcher.cluster import SESSION_VARIABLE
from unisono.launcher.private_directory import PrivateDirectory
from unisono.launcher.process_table import (
    STORE_FD_VARIABLE,
    ProcessSpec,
    process_name,
    threads_per_rank,
)
from unisono.launcher.supervisor import Supervisor
from unisono.workers.channel import Hub
from unisono.workers.probes import (
    PROBE_REPORTS,
    Dismissed,
    LinearShape,
    Measured,
    Ping,
    Pong,
    ProbeFailed,
    ProbeOrders,
)
from unisono.workers.protocol import int32s

PROBE_ENTRY = "unisono.workers.doctor:main"
PROOF_S = 4.0
"""Seconds for the proofs; what is not reached is named."""
_GRACE_S = 1.0
_WATCH_S = 0.1
_PINGS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Median seconds of a message to a rank and back."""

    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What the processes measured, or why they could not."""

    measured: Measured | None
    round_trips: tuple[RoundTrip, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """What is to be measured."""

    ranks: int
    """At least 2: a group of one has no collectives."""
    shapes: tuple[LinearShape, ...]
    too_large: tuple[LinearShape, ...] = ()
    """Weights that are not proven, since it would take too long."""
    head_dims: tuple[int, ...]
    hidden_size: int
    stream_bytes: int


def run_probes(
    plan: ProbePlan, environ: Mapping[str, str], cores: int, timeout_s: float
) -> ProbeReport:
    """Start the ranks, take their results and end them. Raises ConfigError without a directory."""
    session = secrets.token_hex(16)
    with (
        PrivateDirectory() as directory,
        socket.create_server(("127.0.0.1", 0)) as store,
        Hub(directory.endpoint("doctor"), PROBE_REPORTS, session) as hub,
    ):
        specs = [
            _spec(plan, rank, directory.endpoint("doctor"), session, store, environ, cores)
            for rank in range(plan.ranks)
        ]
        with Supervisor(specs, _GRACE_S) as processes:
            processes.start()
            return _collect(hub, processes, time.monotonic() + timeout_s)


def _collect(hub: Hub, processes: Supervisor, deadline: float) -> ProbeReport:
    rank_0 = process_name(0)
    while time.monotonic() < deadline:
        received = hub.receive(_WATCH_S)
        match received and received[1]:
            case Measured() as measured:
                trips = (_round_trip(hub, 4), _round_trip(hub, 64 * 1024))
                hub.send(rank_0, Dismissed())
                processes.wait(_GRACE_S)
                return ProbeReport(measured=measured, round_trips=trips)
            case ProbeFailed(rank=rank, phase=phase, message=message):
                what = f"{process_name(rank)} failed in phase {phase!r}: {message}"
                return ProbeReport(measured=None, fault=" ".join(what.split()))
            case None:
                ends = [end for end in processes.poll() if end.code or end.signal]
                if ends:
                    how = f"signal {ends[0].signal}" if ends[0].signal else f"code {ends[0].code}"
                    return ProbeReport(measured=None, fault=f"{ends[0].name} ended with {how}")
    return ProbeReport(measured=None, fault="the measuring processes did not answer in time")


def _round_trip(hub: Hub, payload_bytes: int) -> RoundTrip:
    ping = Ping(payload=int32s(range(payload_bytes // 4)))
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        hub.send(process_name(0), ping)
        received = hub.receive(5.0)
        times.append(time.perf_counter() - start)
        assert received is not None
        assert received[1] == Pong(payload=ping.payload)
    return RoundTrip(payload_bytes=payload_bytes, seconds=statistics.median(times))


def _spec(
    plan: ProbePlan,
    rank: int,
    endpoint: str,
    session: str,
    store: socket.socket,
    environ: Mapping[str, str],
    cores: int,
) -> ProcessSpec:
    threads = threads_per_rank(environ, cores, plan.ranks)
    env = {
        SESSION_VARIABLE: session,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        "LOCAL_WORLD_SIZE": str(plan.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.getsockname()[1]),
    }
    orders = ProbeOrders(
        rank=rank,
        ranks=plan.ranks,
        endpoint=endpoint,
        session=session,
        machine_threads=threads_per_rank(environ, cores, 1),
        rank_threads=threads,
        stream_bytes=plan.stream_bytes,
        shapes=plan.shapes,
        head_dims=plan.head_dims,
        hidden_size=plan.hidden_size,
        proof_s=PROOF_S,
    )
    if rank > 0:
        return ProcessSpec(name=process_name(rank), entry=PROBE_ENTRY, orders=orders, env=env)
    return ProcessSpec(
        name=process_name(rank),
        entry=PROBE_ENTRY,
        orders=orders,
        env={**env, STORE_FD_VARIABLE: str(store.fileno())},
        pass_fds=(store.fileno(),),
    )


def unproven(plan: ProbePlan, measured: Measured) -> tuple[LinearShape, ...]:
    """Weights that were too large, or for which the time was not enough."""
    done = {proof.shape for proof in measured.linear}
    return (*plan.too_large, *(shape for shape in plan.shapes if shape not in done))
