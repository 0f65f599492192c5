"""A card that remembers what it was given: graphs for tests of whoever captures them, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import pytest
import torch


@dataclass
class Card:
    """What a GPU would be told. A body's effects are kept by `FakeGraph` and not had."""

    log: list[str] = field(default_factory=list)
    recording: FakeGraph | None = None
    num_pools: int = 0
    alive: dict[int, int] = field(default_factory=dict)
    """Graphs of each memory pool: a pool goes with its last."""

    def do(self, effect: Callable[[], None]) -> None:
        """What a body does on the device: now, or when the graph that is captured is replayed."""
        if self.recording is None:
            effect()
        else:
            self.recording.effects.append(effect)


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    card: Card

    def __init__(self) -> None:
        self.effects: list[Callable[[], None]] = []
        self._pool = 0

    def pool(self) -> int:
        return self._pool

    def replay(self) -> None:
        self.card.log.append("replay")
        for effect in self.effects:
            effect()

    def join(self, pool: int | None) -> None:
        card = self.card
        assert pool is None or card.alive[pool] > 0, "torch refuses a pool that has no graph"
        if pool is None:
            card.num_pools += 1
            pool = card.num_pools
        self._pool = pool
        card.alive[pool] = card.alive.get(pool, 0) + 1

    def __del__(self) -> None:
        if self._pool:
            self.card.alive[self._pool] -= 1


class FakeCapture:
    """Stands for `torch.cuda.graph`."""

    def __init__(self, graph: FakeGraph, pool: int | None, capture_error_mode: str) -> None:
        self._graph, self._pool_wanted = graph, pool

    def __enter__(self) -> None:
        self._graph.join(self._pool_wanted)
        self._graph.card.recording = self._graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._graph.card.recording = None


@contextmanager
def fake_card() -> Iterator[Card]:
    """Put graphs of a fake card in the place of torch's."""
    made = Card()

    class Graph(FakeGraph):
        card = made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", FakeCapture)
        patch.setattr(torch.cuda, "synchronize", lambda: made.log.append("wait"))
        yield made
    assert made.recording is None
