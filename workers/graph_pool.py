"""Where a piece of a step is run: replayed from a captured graph, or eagerly with a reason.

A piece is named by (piece, key) and reads and writes buffers of fixed addresses only. The first
time it is wanted it runs eagerly, which also loads its kernels; the second time it is captured,
which runs nothing and so changes nothing, and replayed from then on. Every long-lived buffer has
an owner with a `generation`, counted up when it is taken anew: a graph remembers the generations
it was captured with and is never replayed under others, but captured again.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from unisono.ops.comm import Group

T = TypeVar("T")
log = logging.getLogger(__name__)


class Owner(Protocol):
    """Whoever holds buffers that graphs touch; `generation` counts how often they were taken."""

    @property
    def generation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: object
    """What the body returned: memory of the graph, good until its next replay."""
    generations: tuple[int, ...]
    collectives: list[int]


class GraphPool:
    """Graphs of one rank, in one memory pool. `owners` hold all buffers that bodies touch.

    `eager_runs` counts (piece, reason) of every run that was not a replay, `num_replays` the
    others and `num_captures` the captures; `eager` has the reasons since somebody cleared it.
    `off`: why nothing is captured, if nothing is.
    """

    def __init__(
        self, device: torch.device, group: Group, owners: Sequence[Owner], off: str = ""
    ) -> None:
        self.off = off if device.type == "cuda" else f"{device.type} has no graphs"
        self.eager_runs: Counter[tuple[str, str]] = Counter()
        self.eager: list[str] = []
        self.num_replays = self.num_captures = 0
        self._group = group
        self._owners = tuple(owners)
        self._warm: set[tuple[str, Hashable]] = set()
        self._graphs: dict[tuple[str, Hashable], _Captured] = {}

    def run(self, piece: str, key: Hashable, body: Callable[[], T], eager: str = "") -> T:
        """Run `body`, the work of `piece` ("forward", "tail") at the sizes named by `key`.

        `eager`: why it cannot be captured this time, if it cannot.
        """
        if reason := self.off or eager or self._not_yet((piece, key)):
            self.eager_runs[piece, reason] += 1
            self.eager.append(reason)
            return body()
        captured = self._graphs.get((piece, key))
        if captured is None or captured.generations != self._generations():
            captured = self._capture((piece, key), body)
        captured.graph.replay()
        self._group.replayed(captured.collectives)
        self.num_replays += 1
        return captured.output  # type: ignore[return-value]

    def drop(self) -> None:
        """Give the memory of all graphs back; they are captured again when they are wanted."""
        if self._graphs:
            # A graph that may still run must not be destroyed.
            torch.cuda.synchronize()
        self._graphs.clear()

    def _not_yet(self, name: tuple[str, Hashable]) -> str:
        if name in self._warm:
            return ""
        self._warm.add(name)
        return "first run"

    def _generations(self) -> tuple[int, ...]:
        return tuple(owner.generation for owner in self._owners)

    def _capture(self, name: tuple[str, Hashable], body: Callable[[], T]) -> _Captured:
        """Capture `body`; a failure leaves everything as it was."""
        # A graph that may still run must not be destroyed.
        torch.cuda.synchronize()
        self._graphs.pop(name, None)
        # They share memory; it goes with the last of them, failed ones included.
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with (
            self._group.recorded() as collectives,
            _no_garbage_collected(),
            # Other threads of the process (collectives' watchdogs) may call CUDA meanwhile.
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            output = body()
        self._graphs[name] = captured = _Captured(graph, output, self._generations(), collectives)
        self.num_captures += 1
        log.info("captured %s", name)
        return captured


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Garbage may hold a graph, of a capture that failed or a former pool: destroying it is no work
    that can be captured, and would spoil the capture that it comes into."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
