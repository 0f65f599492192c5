"""What a runtime that fails tells the launcher: every fault, the cause first, the flight last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.runtime.fakes import orders_of
from tests.runtime.test_flight import WORKER, recorded
from unisono.launcher.flight_file import read_flight
from unisono.runtime import entry
from unisono.runtime.engine import ToldToEnd
from unisono.runtime.entry import _report
from unisono.runtime.protocol import Failed, Recorded
from unisono.runtime.worker_group import Diverged, RankFault, WorkerGroup
from unisono.workers.channel import Hub, ProtocolError
from unisono.workers.protocol import Fault, LoadWeights


class Wire:
    """A hub that hands out `waiting` and keeps what is sent."""

    def __init__(self, *waiting: Fault) -> None:
        self.waiting = list(waiting)
        self.sent: list[object] = []

    def receive(self, timeout_s: float) -> tuple[str, Fault] | None:
        return ("rank", self.waiting.pop(0)) if self.waiting else None

    def send(self, peer: str, message: object) -> None:
        self.sent.append(message)


def fault(rank: int, *, secondary: bool = False) -> Fault:
    return Fault(
        rank=rank, phase="step", step=7, error="E", message="m", traceback="", secondary=secondary
    )


@pytest.mark.parametrize(
    ("error", "waiting", "ranks", "cause"),
    [
        (RankFault(fault(1)), [fault(0, secondary=True)], [1, 0], 1),
        (RankFault(fault(0, secondary=True)), [fault(1)], [1, 0], 1),
        (RankFault(fault(0, secondary=True)), [], [0], 0),
        (ToldToEnd("rank 1 died"), [fault(0, secondary=True), fault(1)], [1, 0], 1),
        (ToldToEnd("rank 1 died"), [fault(0, secondary=True)], [0], -1),
        (ToldToEnd("rank 1 died"), [], [], -1),
        (
            ProtocolError("rank 1 is not connected"),
            [fault(0, secondary=True), fault(1)],
            [1, -1, 0],
            1,
        ),
        (ProtocolError("a message of another session"), [], [-1], -1),
        (Diverged("other tokens than rank 0", rank=1, phase="step", step=7), [], [1], 1),
    ],
)
def test_all_faults_are_told_and_the_flight_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    waiting: list[Fault],
    ranks: list[int],
    cause: int,
) -> None:
    monkeypatch.setattr(entry, "_ROOT_CAUSE_S", 0.02)  # A wire that is empty stays so.
    path = tmp_path / "flight"
    clients, hub = Wire(), Wire(*waiting)
    workers = WorkerGroup(cast(Hub, hub), 2)
    workers.recorder = recorded(3)
    workers.weights = LoadWeights(path="reloaded", load_format="random")
    orders = replace(orders_of(WORKER), flight_file=str(path))
    _report(error, orders, cast(Hub, clients), workers)
    *failures, last = clients.sent
    assert [cast(Failed, failed).rank for failed in failures] == ranks
    assert last == Recorded(path=str(path))
    header = read_flight(path).header
    assert header.failed.rank == cause
    assert (header.worker.model_path, header.worker.load_format) == ("reloaded", "random")
