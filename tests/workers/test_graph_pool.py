"""The pool of graphs, with graphs that only remember what they were given."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.workers.fake_graphs import Card, fake_card
from unisono.ops.comm import Group
from unisono.workers.graph_pool import GraphPool


@dataclass
class Owner:
    generation: int = 1


@pytest.fixture
def card() -> Iterator[Card]:
    with fake_card() as made:
        yield made


class Bench:
    """A pool on a fake card and a body that counts its runs on the device."""

    def __init__(self, card: Card, off: str = "", device: str = "cuda") -> None:
        self.card, self.owner = card, Owner()
        self.group = Group(0, 1, None)
        self.pool = GraphPool(torch.device(device), self.group, [self.owner], off)
        self.counts: dict[Any, int] = {}

    def run(self, key: Any = 8, fails: BaseException | None = None, eager: str = "") -> Any:
        def body() -> str:
            self.group.all_reduce(torch.zeros(3))
            self.card.do(lambda: self._count(key))
            if fails is not None:
                raise fails
            self.group.all_reduce(torch.zeros(5))
            return f"output of {key}"

        return self.pool.run("forward", key, body, eager)

    def state(self) -> tuple[Any, ...]:
        """All that a failure must leave as it was."""
        pool = self.pool
        done = (self.group.digest, sorted(self.counts.items()), pool.num_captures)
        return (*done, pool.num_replays, sorted(pool._graphs), sum(self.card.alive.values()))

    def _count(self, key: Any) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1


def test_first_eagerly_then_captured_then_replayed(card: Card) -> None:
    bench = Bench(card)
    assert [bench.run() for _ in range(4)] == ["output of 8"] * 4
    assert bench.counts == {8: 4}, "each run took effect once: a capture takes none"
    assert (bench.pool.num_captures, bench.pool.num_replays) == (1, 3)
    assert bench.pool.eager_runs == {("forward", "first run"): 1}
    assert card.log == ["wait", *["replay"] * 3]


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("planted"), torch.OutOfMemoryError("full"), KeyboardInterrupt(), SystemExit(143)],
    ids=lambda failure: type(failure).__name__,
)
@pytest.mark.parametrize("others", [0, 2], ids=["alone", "beside others"])
def test_a_capture_that_fails_changes_nothing_and_is_recorded_again(
    card: Card, failure: BaseException, others: int
) -> None:
    """Fault, cancel (Ctrl-C, SIGTERM) and memory that is full, in the middle of a body.

    The twin is a rank that it does not happen to: both have met in the same collectives after.
    """
    bench, twin = Bench(card), Bench(card)
    for each in (bench, twin):
        for key in (*range(1, others + 1), 8, *range(1, others + 1)):
            each.run(key)
    before = bench.state()
    for _ in range(2):
        with pytest.raises(type(failure)) as caught:
            bench.run(8, fails=failure)
        assert caught.value is failure
        failure.__traceback__ = None  # whose frames hold the graph
        del caught
        assert bench.state() == before
    for each in (bench, twin):
        assert each.run(8) == "output of 8"
        assert all(each.run(key) for key in range(1, others + 1))
    assert bench.state() == twin.state()
    assert bench.counts[8] == 2
    assert bench.pool.num_captures == others + 1


@pytest.mark.parametrize("failure", [None, RuntimeError("planted")], ids=str)
def test_no_garbage_is_collected_amid_a_capture(
    card: Card, failure: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a graph of a former pool, which must not be destroyed while another is made."""
    monkeypatch.setattr(torch.cuda, "synchronize", gc.enable)
    bench, seen = Bench(card), []
    bench.pool.run("probe", 1, lambda: None)

    def body() -> None:
        seen.append(gc.isenabled())
        if failure is not None:
            raise failure

    with contextlib.suppress(RuntimeError):
        bench.pool.run("probe", 1, body)
    assert (seen, gc.isenabled()) == ([False], True)


def test_graphs_share_memory_until_the_last_is_gone(card: Card) -> None:
    bench = Bench(card)
    for key in (1, 2, 1, 2):
        bench.run(key)
    assert card.alive == {1: 2}
    bench.owner.generation += 1
    for key in (1, 2):  # each takes the place of its former self
        bench.run(key)
    assert card.alive == {1: 2}
    bench.pool.drop()
    assert card.alive == {1: 0}
    bench.run(2)
    bench.owner.generation += 1
    bench.run(2)
    assert card.alive == {1: 0, 2: 0, 3: 1}


def test_a_graph_of_former_buffers_is_never_replayed(card: Card) -> None:
    """B23, B25: whatever gave its memory back, or was loaded anew, and after however many."""
    bench = Bench(card)
    bench.run()
    bench.run()
    stale = next(iter(bench.pool._graphs.values())).graph
    for generation in (2, 3, 2):
        bench.owner.generation = generation
        del stale.effects[:]
        before = bench.counts[8]
        assert bench.run() == "output of 8"
        assert bench.counts[8] == before + 1
        stale = next(iter(bench.pool._graphs.values())).graph
    assert bench.pool.num_captures == 4


def test_a_graph_that_may_still_run_is_waited_for(card: Card) -> None:
    bench = Bench(card)
    bench.run()
    bench.run()
    card.log.clear()
    bench.pool.drop()
    assert card.log == ["wait"]
    card.log.clear()
    bench.pool.drop()
    assert card.log == [], "nothing is there to wait for"
    bench.run()
    assert card.log == ["wait", "replay"], "what ran once is captured at once"


def test_pieces_and_sizes_have_graphs_of_their_own(card: Card) -> None:
    """B28: one body's graph serves no other, whatever they have in common."""
    bench = Bench(card)
    ran: list[str] = []
    for _ in range(3):
        for piece, key in (("forward", (4, 1)), ("forward", (4, 2)), ("tail", (4, 1))):
            name = f"{piece} {key}"
            bench.pool.run(piece, key, lambda name=name: card.do(lambda: ran.append(name)))
    assert ran == ["forward (4, 1)", "forward (4, 2)", "tail (4, 1)"] * 3
    assert bench.pool.num_captures == 3


def test_every_eager_run_has_its_reason(card: Card) -> None:
    """B37: whoever asks for graphs and gets none is told why."""
    bench = Bench(card)
    bench.run(eager="sampling")
    bench.run()
    bench.run(eager="sampling")
    bench.run()
    assert bench.pool.eager == ["sampling", "first run", "sampling"]
    assert bench.pool.eager_runs == {("forward", "sampling"): 2, ("forward", "first run"): 1}
    assert (bench.pool.num_captures, bench.pool.num_replays) == (1, 1)
    for off, device, reason in (
        ("--no-graphs", "cuda", "--no-graphs"),
        ("--no-graphs", "cpu", "cpu has no graphs"),
        ("", "cpu", "cpu has no graphs"),
    ):
        switched = Bench(card, off, device)
        for _ in range(3):
            switched.run()
        assert switched.pool.eager == [reason] * 3
        assert switched.pool.num_captures == 0
