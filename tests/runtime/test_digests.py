"""Ranks report equal rolling hashes over thousands of steps, and one that differs is named at once.

The engine loop, the scheduler, groups and graph pools are the real ones. Two ranks in one thread
only compute nothing, and their graphs are those of a fake card.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.runtime.fakes import request, scheduler
from tests.workers.fake_graphs import Card, fake_card
from unisono.ops.comm import Group
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import Finished, Stop, Submit
from unisono.runtime.worker_group import Diverged, WorkerGroup
from unisono.workers.graph_pool import GraphPool
from unisono.workers.protocol import Phase, Shutdown, StepPlan, StepResult

NUM_STEPS = 10_000
LOST = 7_000
"""The step in which a faulty rank leaves a collective out."""
MET = torch.zeros(1)


class Unmet(Group):
    """A rank whose collectives nobody else needs to meet."""

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None].expand(self.size, *x.shape)


class Owner:
    generation = 1


class FakeRank:
    """Notes what a rank of two layers would: prompts eagerly, decoding from graphs."""

    def __init__(self, rank: int, faulty: bool) -> None:
        self.rank, self.faulty, self.num_steps = rank, faulty, 0
        self.owner = Owner()
        self.group = Unmet(rank, 2, None)
        self.pool = GraphPool(torch.device("cuda"), self.group, [self.owner])

    def step(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        num_rows = len(plan.rows)
        decodes = all(phase == Phase.DECODE for phase in plan.rows.phase)
        if self.num_steps % 997 == 0:  # as where memory was taken anew
            self.owner.generation += 1
        if self.num_steps % 3001 == 0:
            self.pool.drop()
        width = num_rows if decodes else sum(plan.rows.count)
        eager = "" if decodes and width < 4 else "prompt tokens"
        self.pool.run("forward", width, lambda: self._forward(width), eager)
        self.pool.run("tail", num_rows, lambda: self.group.max(MET.expand(num_rows)), eager)
        sampling = [phase != Phase.CHUNK for phase in plan.rows.phase]
        tokens = array("i", [(plan.step + row) % 97 for row, does in enumerate(sampling) if does])
        return StepResult(
            rank=self.rank, step=plan.step, tokens=tokens, digest=self.group.digest, seconds=0.0
        )

    def _forward(self, width: int) -> None:
        for layer in range(4):
            if not (self.faulty and self.num_steps == LOST and layer == 2):
                self.group.all_reduce(MET.expand(width))


class Hub:
    """Both ranks at the other end of the runtime's channel."""

    def __init__(self, faulty: bool) -> None:
        self.ranks = [FakeRank(0, False), FakeRank(1, faulty)]
        self.answers: deque[tuple[str, object]] = deque()

    def send(self, name: str, message: object) -> None:
        if not isinstance(message, Shutdown):
            assert isinstance(message, StepPlan)
            rank = self.ranks[int(name.split()[1])]
            self.answers.append((name, rank.step(message)))

    def receive(self, timeout_s: float) -> tuple[str, object] | None:
        return self.answers.popleft() if self.answers else None


class Client:
    """Keeps three to five requests running until there were enough steps."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.num_sent, self.num_left = hub, 0, 0

    def send(self, name: str, message: object) -> None:
        self.num_left -= isinstance(message, Finished)

    def receive(self, timeout_s: float) -> tuple[str, Any] | None:
        enough = self.hub.ranks[0].num_steps >= NUM_STEPS
        if enough and not self.num_left:
            return "c", Stop()
        if enough or self.num_left >= 3 + self.num_sent % 3:
            return None
        self.num_sent += 1
        self.num_left += 1
        asked = request(self.num_sent, 1 + self.num_sent * 37 % 150, 20 + self.num_sent % 60)
        return "c", Submit(
            request_id=self.num_sent, prompt_ids=asked.prompt_ids, params=asked.params
        )


@pytest.fixture
def card() -> Iterator[Card]:
    with fake_card() as made:
        yield made


def serve(hub: Hub) -> None:
    workers: Any = WorkerGroup(hub, 2)  # type: ignore[arg-type]
    Engine(Client(hub), workers, scheduler(), 400).run()  # type: ignore[arg-type]


@pytest.mark.usefixtures("card")
def test_ranks_agree_over_ten_thousand_steps() -> None:
    hub = Hub(faulty=False)
    serve(hub)
    first, second = hub.ranks
    assert first.num_steps == second.num_steps >= NUM_STEPS
    assert first.group.digest == second.group.digest != 0
    assert first.pool.num_replays > NUM_STEPS
    assert first.pool.num_captures > 20, "graphs were captured anew"


@pytest.mark.usefixtures("card")
def test_a_collective_left_out_is_found_in_its_step() -> None:
    hub = Hub(faulty=True)
    with pytest.raises(Diverged, match=r"^other collectives than rank 0$") as caught:
        serve(hub)
    assert (caught.value.rank, caught.value.step) == (1, LOST)
    assert hub.ranks[0].num_steps <= LOST + 1, "a step that was under way"
