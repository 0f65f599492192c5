"""The engine as the launcher sees it: start it, submit requests, poll for tokens, close it."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from unisono.launcher.cluster import ClusterFacts
from unisono.launcher.config import LaunchConfig
from unisono.launcher.diagnosis import (
    START_PHASE,
    STEP_PHASE,
    diagnose,
    is_certain,
    too_late,
    with_flight,
)
from unisono.launcher.flights import flight_file
from unisono.launcher.private_directory import PrivateDirectory
from unisono.launcher.process_table import ProcessSpec, Wiring, process_name, process_table
from unisono.launcher.resolve import num_cores
from unisono.launcher.supervisor import Supervisor
from unisono.runtime.protocol import (
    ENGINE_EVENTS,
    Abort,
    Crashed,
    Delta,
    EngineReady,
    EngineState,
    Failed,
    Finished,
    Order,
    Recorded,
    Rejected,
    Reload,
    Replayed,
    RequestRejected,
    Rerun,
    Reschedule,
    SamplingParams,
    Sleep,
    Starting,
    StepsSeen,
    Stop,
    Submit,
    Tokens,
    Wake,
    WatchSteps,
    WorkerLost,
)
from unisono.runtime.sampling_wire import is_rejecting, with_seed
from unisono.workers.channel import CurveKeys, Peer, ProtocolError
from unisono.workers.protocol import StepPlan, int32s

Event = Delta | Tokens | Finished | Rejected
TableMaker = Callable[..., tuple[ProcessSpec, ...]]
Reply = TypeVar("Reply", Replayed, Reschedule)

CLIENT_NAME = "launcher"
"""What the runtime's hub knows us by."""
WATCH_S = 0.1
"""How often the processes are looked at while nothing arrives."""
SETTLE_S = 1.0
"""After the first sign of a failure: longest wait for the report that explains it."""
FLIGHT_S = 5.0
"""Longest wait for a runtime to write what it recorded."""
ORDER_PHASES = {Sleep: "give memory back", Wake: "wake up", Reload: "reload weights"}
"""Where processes are while an order is obeyed."""
FAREWELL_S = 2.0
"""After `Stop`: longest wait, within the grace, for the processes to end by themselves."""

_log = logging.getLogger(__name__)


class Engine:
    """A runtime and its ranks, as child processes. Used as a context manager.

    The constructor does nothing; `start` starts it all. Under a cluster launcher (`cluster`, in
    the process of rank 0) the other ranks exist already and rank 0 alone is started. Not safe to
    use from two threads. `table` makes the process table: for tests. Without
    `records` no flight is written.
    """

    def __init__(
        self,
        config: LaunchConfig,
        cluster: ClusterFacts | None = None,
        *,
        table: TableMaker = process_table,
        records: bool = True,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._table = table
        self._records = records
        self._resources = ExitStack()
        self._supervisor: Supervisor | None = None
        self._peer: Peer | None = None
        self._phases: dict[str, str] = {}
        self._failures: list[Failed] = []
        self._recorded: Recorded | None = None
        self._lost: WorkerLost | None = None
        self._is_ready = False
        self._next_id = 0
        self.seen: list[StepsSeen] = []
        """What ranks have answered to `watch`, as far as `poll` has met it."""
        self.states: deque[EngineState] = deque()
        """The same of what the engine has answered to `order`."""
        self._num_ordered, self._deadline = 0, math.inf
        self._owner_pid = os.getpid()

    def start(self, on_progress: Callable[[Starting], None] | None = None) -> EngineReady:
        """Start every process and wait until all are ready; `on_progress` gets the news.

        Raises WorkerLost naming the process that died, failed or is late, and ConfigError if the
        cluster has another number of ranks than the model.
        """
        assert self._supervisor is None, "an engine starts once"
        deadline = time.monotonic() + self._config.start_timeout_s
        self._open()
        while True:
            for message in self._receive(WATCH_S):
                match message:
                    case Starting():
                        self._phases[process_name(message.rank)] = message.phase
                        if on_progress is not None:
                            on_progress(message)
                    case EngineReady():
                        self._phases = dict.fromkeys(self._phases, STEP_PHASE)
                        self._is_ready = True
                        return message
                    case _:
                        raise self._broken(f"sent {type(message).__name__} before it was ready")
            self._check()
            if time.monotonic() >= deadline:
                raise self._give_up(too_late(self._phases, self._config.start_timeout_s))

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        checksums: bool = False,
        more: bool = False,
    ) -> int:
        """Hand over a request; return the id that its events carry.

        `checksums`: its tokens come with those of their logits. `more`: the next one follows at
        once, to be admitted together. Raises RequestRejected for an id that is no 32-bit number.
        """
        try:
            prompt = int32s(prompt_ids)
        except (OverflowError, TypeError) as error:
            raise RequestRejected(f"prompt token ids are 32-bit whole numbers: {error}") from None
        request_id = self._next_id
        self._next_id += 1
        self._send(
            Submit(
                request_id=request_id,
                prompt_ids=prompt,
                params=with_seed(params),
                priority=priority,
                checksums=checksums,
                rejects=is_rejecting(params, self._config.runtime.worker.accept),
                more=more,
            )
        )
        return request_id

    def rerun(self, plan: StepPlan) -> array[int]:
        """Have the ranks run a step as it is; return its tokens. Raises WorkerLost."""
        return self._ask(Rerun(plan=plan), Replayed).tokens

    def reschedule(self, limits: Reschedule) -> None:
        """Have the idle engine forget what it caches and obey `limits`. Raises WorkerLost."""
        self._ask(limits, Reschedule)

    def watch(self, wanted: WatchSteps) -> None:
        """Have every rank watch its next steps."""
        self._send(wanted)

    def order(self, wanted: Order) -> None:
        """Have the engine sleep, wake or take other weights: `states` gets an answer to each.

        `poll` raises WorkerLost if it takes longer than ranks may take to start.
        """
        self._send(wanted)
        self._num_ordered += 1
        self._phases = dict.fromkeys(self._phases, ORDER_PHASES[type(wanted)])
        self._deadline = time.monotonic() + self._config.start_timeout_s

    def abort(self, request_id: int) -> None:
        """Forget a request. Events that are already on their way may still arrive."""
        self._send(Abort(request_id=request_id))

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what has arrived, waiting up to `timeout_s` for the first; [] if nothing did.

        Raises WorkerLost when the engine is lost, after everything that arrived before it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(WATCH_S, max(0.0, deadline - time.monotonic()))
            events: list[Event] = []
            for message in self._receive(wait_s):
                match message:
                    case Delta() | Tokens() | Finished() | Rejected():
                        events.append(message)
                    case StepsSeen():
                        self.seen.append(message)
                    case EngineState():
                        self._take_state(message)
                    case _:
                        raise self._broken(f"sent {type(message).__name__} after it was ready")
            if events:
                return events
            self._check()
            if self.states or time.monotonic() >= deadline:
                return []

    def close(self) -> None:
        """End every process and remove every file. May be called at any time, and twice."""
        if os.getpid() != self._owner_pid:
            return
        try:
            self._say_farewell()
        finally:
            self._is_ready = False
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        # Each resource is registered before it exists: a Ctrl-C may come between any two lines.
        directory = PrivateDirectory()
        self._resources.callback(directory.close)
        with ExitStack() as handed_over:
            wiring = _wire(directory, self._cluster, handed_over)
            if self._records:
                file = flight_file(self._config.flight_dir, os.environ, wiring.session)
                wiring = replace(wiring, flight_file=str(file))
            specs = self._table(
                self._config, wiring, os.environ, num_cores(), cluster=self._cluster
            )
            self._phases = {spec.name: START_PHASE for spec in specs}
            self._supervisor = Supervisor(specs, self._config.stop_grace_s)
            self._resources.callback(self._supervisor.stop)
            directory.create()
            self._created(directory.path)
            self._supervisor.start()
        self._peer = Peer(
            wiring.client_endpoint,
            CLIENT_NAME,
            ENGINE_EVENTS,
            wiring.session,
        )
        self._resources.callback(self._peer.close)

    def _created(self, directory: Path) -> None:
        """The private `directory` is there, and no process of the engine."""

    def _receive(self, timeout_s: float) -> list[object]:
        """Return all that has arrived but failures, which are put aside."""
        assert self._peer is not None, "start the engine first"
        messages = []
        try:
            message = self._peer.receive(timeout_s)
            while message is not None:
                if isinstance(message, Failed):
                    self._failures.append(message)
                elif isinstance(message, Recorded):
                    self._recorded = message
                else:
                    messages.append(message)
                message = self._peer.receive(0.0)
        except ProtocolError as error:
            raise self._broken(str(error)) from None
        return messages

    def _check(self) -> None:
        """Raise WorkerLost if a process has failed or ended."""
        assert self._supervisor is not None
        if self._lost is None and (self._failures or self._supervisor.poll()):
            self._settle(self._supervisor)
            self._await_flight(self._supervisor)
            lost = diagnose(self._failures, self._supervisor.poll(), self._phases, self._config)
            if self._recorded is not None:
                lost = with_flight(lost, self._recorded.path)
            if lost.traceback:
                _log.info("%s\n%s", lost, lost.traceback.rstrip())
            self._give_up(lost)
        if self._lost is None and time.monotonic() >= self._deadline:
            self._give_up(too_late(self._phases, self._config.start_timeout_s, "what was ordered"))
        if self._lost is not None:
            raise copy(self._lost)

    def _take_state(self, state: EngineState) -> None:
        self.states.append(state)
        self._num_ordered -= 1
        if self._num_ordered:
            self._deadline = time.monotonic() + self._config.start_timeout_s
        else:
            self._phases = dict.fromkeys(self._phases, STEP_PHASE)
            self._deadline = math.inf

    def _settle(self, supervisor: Supervisor) -> None:
        """Wait for the report of the cause: its consequences may arrive before it.

        What a dead process said last may still be on its way, too.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            for message in self._receive(0.05):
                if isinstance(message, Starting):
                    self._phases[process_name(message.rank)] = message.phase
            if is_certain(self._failures, supervisor.poll()) or time.monotonic() >= deadline:
                return

    def _await_flight(self, supervisor: Supervisor) -> None:
        """Give the runtime the time to write the last steps, of which it tells after all faults.

        Of a process that died without a word it hears from us only.
        """
        if not self._is_ready or self._recorded is not None:
            return
        lost = diagnose(self._failures, supervisor.poll(), self._phases, self._config)
        assert self._peer is not None
        with suppress(ProtocolError):
            self._peer.send(Crashed(message=str(lost)))
        deadline = time.monotonic() + FLIGHT_S
        while self._recorded is None and time.monotonic() < deadline:
            ended = any(end.name == process_name(-1) for end in supervisor.poll())
            self._receive(0.02)
            if ended:
                break

    def _broken(self, what: str) -> WorkerLost:
        return self._give_up(WorkerLost(f"runtime broke the protocol: {what}"))

    def _give_up(self, lost: WorkerLost) -> WorkerLost:
        """End all processes without waiting for it: a rank may wait on its GPU for one that died,
        and whoever hears of the loss may close the engine late."""
        assert self._supervisor is not None
        self._lost = lost
        self._supervisor.begin_stop()
        return copy(lost)  # whose traceback grows where it is raised, and is raised by every poll

    def _ask(self, message: Rerun | Reschedule, kind: type[Reply]) -> Reply:
        self._send(message)
        while True:
            for reply in self._receive(WATCH_S):
                if isinstance(reply, kind):
                    return reply
                raise self._broken(f"sent {type(reply).__name__} instead of {kind.__name__}")
            self._check()

    def _send(self, message: Submit | Abort | Rerun | Reschedule | WatchSteps | Order) -> None:
        assert self._peer is not None, "start the engine first"
        if self._lost is not None:
            return
        try:
            self._peer.send(message)
        except ProtocolError as error:
            raise self._broken(str(error)) from None

    def _say_farewell(self) -> None:
        if not self._is_ready or self._lost is not None:
            return
        assert self._peer is not None
        assert self._supervisor is not None
        if not self._supervisor.poll():
            # A runtime that does not read is ended like one that does not listen.
            with suppress(ProtocolError):
                self._peer.send(Stop())
                self._supervisor.wait(min(FAREWELL_S, self._config.stop_grace_s))


def _wire(directory: PrivateDirectory, cluster: ClusterFacts | None, keep: ExitStack) -> Wiring:
    """Decide where the processes meet. Sockets stay open until `keep` closes: children have them.

    A listening socket is handed down as it is; a port number could be taken by another program
    before a child comes to listen on it.
    """
    worker_endpoint = directory.endpoint("worker")
    worker_fd, curve, store_fd, store_port = None, None, None, 0
    if cluster is None:
        store = keep.enter_context(socket.create_server(("127.0.0.1", 0)))
        store_fd, store_port = store.fileno(), store.getsockname()[1]
    elif not cluster.single_host:
        listener = keep.enter_context(_listen_for_hosts(cluster.master_addr))
        host = f"[{cluster.master_addr}]" if ":" in cluster.master_addr else cluster.master_addr
        worker_endpoint = f"tcp://{host}:{listener.getsockname()[1]}"
        worker_fd, curve = listener.fileno(), CurveKeys.generate()
    return Wiring(
        session=secrets.token_hex(16),
        private_dir=str(directory.path),
        client_endpoint=directory.endpoint("client"),
        worker_endpoint=worker_endpoint,
        worker_fd=worker_fd,
        curve=curve,
        store_fd=store_fd,
        store_port=store_port,
    )


def _listen_for_hosts(master_addr: str) -> socket.socket:
    """Listen for ranks on other hosts, at the address they know this host by.

    Many hosts resolve their own name to a loopback address, where nobody else could come in:
    then, or where the address is not one of ours, on every interface. Who has no key is refused.
    """
    family = socket.AF_INET6 if ":" in master_addr else socket.AF_INET
    try:
        address = socket.getaddrinfo(master_addr, 0, family, socket.SOCK_STREAM)[0][4][0]
        if not str(address).startswith(("127.", "::1")):
            return socket.create_server((str(address), 0), family=family)
    except OSError:
        pass
    return socket.create_server(("", 0), family=family)
