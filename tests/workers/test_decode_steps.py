"""Which graph serves a step of decoding, and which of them are there from the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.device_plans import with_device_plans
from tests.launcher.fakes import tiny_model
from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from tests.workers.fake_graphs import Card, fake_card
from tests.workers.few_parts import few_parts
from unisono.launcher.graph_options import buckets_up_to
from unisono.models.interface import Caches, ForwardBatch
from unisono.ops.comm import solo_group
from unisono.workers.config import WorkerConfig
from unisono.workers.decode_steps import DecodeSteps, sized
from unisono.workers.draft_steps import DraftSteps, Layout, Variant
from unisono.workers.graph_pool import GraphPool
from unisono.workers.profile_run import capture_graphs
from unisono.workers.protocol import (
    Phase,
    Rows,
    SlotSampling,
    StepPlan,
    int32s,
    pack_sampling,
    unpack_sampling,
)

pytest.importorskip("triton")

MOST = 11


class Steps(DecodeSteps):
    """Steps whose bodies compute nothing: `ran` are those that ran, eagerly or replayed."""

    def __init__(self, pool: GraphPool, card: Card, buckets: Sequence[int]) -> None:
        buffers: Any = SimpleNamespace(
            max_rows=MOST,
            hidden=torch.zeros(MOST, 1),
            give_slots=lambda slots, height: self.given.append((list(slots), height)),
        )
        super().__init__(few_parts(graphs=pool, buckets=buckets), buffers)
        self.given: list[tuple[list[int], int]] = []
        self.ran: Counter[tuple[int, ...]] = Counter()
        self._card = card

    def step(self, plan: StepPlan) -> None:
        assert self.serves(plan.rows)
        assert len(self.forward(plan.rows)) == len(plan.rows)
        [recipe] = unpack_sampling(plan.open_sampling) or [SlotSampling()]
        assert len(self.tail(plan.rows, not recipe.is_plain)) == len(plan.rows)

    def _forward(self, height: int, num_splits: int) -> None:
        self._card.do(lambda: self.ran.update([(height, num_splits)]))

    def _tail(self, height: int, draws: bool) -> torch.Tensor:
        self._card.do(lambda: self.ran.update([(height,)]))
        return torch.ones((height, 2), dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "num_drafts"), [("qwen3-moe", 0), ("qwen3.5-moe", 0), ("qwen3.5-moe", 2)]
)
def test_random_padding_changes_no_answer(name: str, num_drafts: int, tmp_path: Path) -> None:
    """The body of a graph, run on the CPU: at least five rows of eight are padding."""
    write_checkpoint(name, tmp_path, mtp=num_drafts > 0)
    prompts = [random_ids(length, 199, seed=length) for length in (1, 9, 63)]
    answers, padding = [], []
    for random_padding in (False, True):
        engine = LocalEngine(
            tmp_path,
            graphs=True,
            graph_buckets=(8,),
            max_requests=8,
            ops_of=with_device_plans,
            num_drafts=num_drafts,
            random_padding=random_padding,
        )
        model, seen = engine.ranks[0].model, set[int]()

        def watched(
            batch: ForwardBatch, caches: Caches, forward: Any = model.forward, seen: Any = seen
        ) -> torch.Tensor:
            if len(batch.token_ids) % 8 == 0:  # the prompts together have 73
                seen.update(batch.token_ids[len(batch.token_ids) // 8 * 3 :].tolist())
            return forward(batch, caches)

        model.forward = watched  # type: ignore[method-assign]
        answers.append([answer.token_ids for answer in engine.generate(prompts, 8)])
        padding.append(len(seen))
    assert answers[0] == answers[1]
    assert padding[0] <= 1 + num_drafts, "what slot 0 holds"
    assert padding[1] > 4


@pytest.fixture
def card() -> Iterator[Card]:
    with fake_card() as made:
        yield made


def made(card: Card, buckets: Sequence[int]) -> tuple[GraphPool, Steps]:
    pool = GraphPool(torch.device("cuda"), solo_group(), [])
    return pool, Steps(pool, card, buckets)


def decoding(num_rows: int, start: int = 0, temperature: float = 0.0) -> StepPlan:
    rows = Rows(
        slot=int32s(range(1, num_rows + 1)),
        start=int32s([start, *[0] * (num_rows - 1)]),
        count=int32s([1] * num_rows),
        phase=int32s([Phase.DECODE] * num_rows),
    )
    sampling = pack_sampling([SlotSampling(temperature=temperature)])
    return StepPlan(step=1, rows=rows, open_sampling=sampling)


def test_a_step_takes_the_next_larger_graph_and_beyond_the_last_none(card: Card) -> None:
    pool, steps = made(card, (2, 6))
    for num_rows in range(1, MOST + 1):
        steps.step(decoding(num_rows))
        steps.step(decoding(num_rows))
    assert {height for _, height in steps.given} == {2, 6, *range(7, MOST + 1)}
    tails = {key for piece, key in pool._graphs if piece == "tail"}
    assert tails == {(2, False), (6, False)}
    beyond = 2 * (MOST - 6)
    assert pool.eager_runs == {
        ("forward", "first run"): 2,
        ("tail", "first run"): 2,
        ("forward", "more rows than graph buckets"): beyond,
        ("tail", "more rows than graph buckets"): beyond,
    }
    assert pool.num_replays == 2 * (2 * MOST - 2 - beyond)


def test_every_number_of_rows_has_a_graph_of_little_padding() -> None:
    """B35: no size between two ladders falls through."""
    for most in (1, 2, 7, 32, 33, 100, 257):
        buckets = buckets_up_to(most)
        for num_rows in range(1, most + 1):
            height, eager = sized(num_rows, buckets)
            assert (height in buckets, eager) == (True, "")
            assert num_rows <= height < max(2 * num_rows, num_rows + 32)


class Drafting(DraftSteps):
    """The same of steps with drafts; `ran` are their places."""

    def __init__(self, pool: GraphPool, card: Card, buckets: Sequence[int], drafts: int) -> None:
        buffers: Any = SimpleNamespace(
            max_rows=MOST, num_drafts=drafts, give_slots=lambda *given: None, take_result=len
        )
        slots = SimpleNamespace(tensors=None)
        super().__init__(few_parts(slots=slots, graphs=pool, buckets=buckets), buffers)
        self.ran: Counter[tuple[str, int]] = Counter()
        self._card = card

    def _forward(self, layout: Layout) -> None:
        self._card.do(lambda: self.ran.update([("forward", layout.height * layout.width)]))

    def _tail(self, layout: Layout, variant: Variant) -> torch.Tensor:
        self._card.do(lambda: self.ran.update([("tail", layout.height * layout.width)]))
        return torch.zeros(layout.height, 1 + layout.width)


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_every_number_of_rows_has_a_graph_whatever_is_drafted(card: Card, num_drafts: int) -> None:
    """B35: no step is eager but the first of its size, and places come in whole rows."""
    buckets = buckets_up_to(MOST)
    pool = GraphPool(torch.device("cuda"), solo_group(), [])
    steps = Drafting(pool, card, buckets, num_drafts)
    for num_rows in range(1, MOST + 1):
        plan = decoding(num_rows, start=70)
        rows = replace(plan.rows, drafts=int32s([num_drafts] * num_rows))
        plan = replace(plan, rows=rows, num_proposals=num_drafts)
        assert steps.serves(plan.rows)
        for _ in range(3):
            steps.forward(plan)
            steps.tail(plan, draws=False)
    assert pool.eager_runs == dict.fromkeys(
        [("forward", "first run"), ("tail", "first run")], len(buckets)
    )
    assert pool.num_replays == 2 * (3 * MOST - len(buckets))
    sizes = {height * (1 + num_drafts) for height in buckets}
    assert {*steps.ran} == {(piece, size) for piece in ("forward", "tail") for size in sizes}


@pytest.mark.parametrize(
    ("start", "num_splits"),
    [(0, 1), (255, 1), (256, 2), (511, 2), (512, 4), (1023, 4), (1024, 8), (40_000, 256)],
)
def test_graphs_are_of_powers_of_two_of_splits(card: Card, start: int, num_splits: int) -> None:
    _, steps = made(card, (2, 6))
    steps.step(decoding(2, start))
    assert set(steps.ran) == {(2, num_splits), (2,)}


@pytest.mark.parametrize(("longest", "num_splits"), [(200, 1), (5000, 2)])
def test_graphs_of_the_start_serve_every_new_request(
    card: Card, longest: int, num_splits: int
) -> None:
    """The largest is captured first, each once, and nobody has asked for what ran for it."""
    pool, steps = made(card, (1, 4, MOST))
    config = WorkerConfig(
        model_path="m",
        model=tiny_model(),
        max_model_len=longest,
        graph_buckets=(1, 4, MOST),
        capture="start",
    )
    phases: list[str] = []
    runner: Any = steps
    capture_graphs(config, runner, pool)
    pool.drop()
    capture_graphs(config, runner, pool, phases.append)
    count = 6
    assert phases == [f"capture graphs, {n} of {count}" for n in range(1, count + 1)]
    assert [key for piece, key in pool._graphs if piece == "forward"] == [
        (height, splits) for splits in (2, 1)[-num_splits:] for height in (MOST, 4, 1)
    ]
    assert [key for piece, key in pool._graphs if piece == "tail"] == [
        (height, draws) for draws in (True, False) for height in (MOST, 4, 1)
    ]
    assert all(set(slots) == {0} for slots, _ in steps.given)
    assert pool.num_replays == 0
    captures = pool.num_captures
    pool.eager.clear()
    for num_rows in range(1, MOST + 1):
        for start, heat in ((0, 0.0), (min(longest, 512) - 1, 0.9)):
            steps.step(decoding(num_rows, start, heat))
    assert (pool.eager, pool.num_captures) == ([], captures)
    assert pool.num_replays == 4 * MOST
