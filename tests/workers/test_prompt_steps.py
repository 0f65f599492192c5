"""Short steps with prompts: the body of their graphs, run on the CPU, and which graph it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closeness import assert_same_bits
from tests.device_plans import with_device_plans_of_prompts
from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.models.interface import Caches, ForwardBatch
from unisono.runtime.protocol import SamplingParams
from unisono.workers.prompt_steps import HEIGHTS, PROMPTS, Layout

attention = pytest.importorskip("unisono.ops.kernels.attention")
delta_plan = pytest.importorskip("unisono.ops.kernels.delta_plan")

LENGTHS = (1, 2, 16, 17, 63, 64, 65, 90, 5, 33)
ARRIVALS = (0, 0, 1, 2, 2, 4, 4, 6, 7, 8)
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i) for i in range(len(LENGTHS))]
PADDED: dict[str, Any] = {
    "graphs": True,
    "graph_buckets": (1, 4, 12),
    "prompt_graphs": True,
    "ops_of": with_device_plans_of_prompts,
}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3-moe", "qwen3-next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


def generate(engine: LocalEngine, ends: Sequence[int] = ()) -> list[Any]:
    prompts = [random_ids(length, 199, seed=length) for length in LENGTHS]
    return engine.generate(prompts, 6, ARRIVALS, ends, params=PARAMS)


@pytest.mark.parametrize("tp", [1, 2])
def test_padded_steps_have_the_answers_of_others(model: Path, tp: int) -> None:
    """Prompts of one step and of several, beside rows that decode, and then beside rows of what has
    ended; logits bit by bit."""
    options = {"tp": tp, "max_step_tokens": 70, "max_requests": 12}
    plain, engine = LocalEngine(model, **options), LocalEngine(model, **options, **PADDED)
    ends: list[int] = []
    for _ in range(2):
        want, got = generate(plain, ends), generate(engine, ends)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits("logits", torch.stack(ours.logits), torch.stack(theirs.logits))
        ends = ends or [each.token_ids[1 + number % 3] for number, each in enumerate(want[:6])]
    assert "stop" in {answer.reason for answer in want}
    ran = {reason for piece, reason in engine.ranks[0].pool.eager_runs if piece == "forward"}
    assert ran == {"cpu has no graphs"}, "some step was not padded"


def test_padding_computes_token_0_of_slot_0_or_random_ones(tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    answers, padding = [], []
    for random_padding in (False, True):
        options = {**PADDED, "max_requests": 12, "random_padding": random_padding}
        engine = LocalEngine(tmp_path, **options)
        model, seen = engine.ranks[0].model, set[int]()

        def watched(
            batch: ForwardBatch, caches: Caches, forward: Any = model.forward, seen: Any = seen
        ) -> torch.Tensor:
            used = sum(int(part.records[3].sum()) for part in _parts(batch))
            seen.update(batch.token_ids[used:].tolist())
            assert not batch.positions[used:].any()
            assert not batch.slot_mapping[used:].any()
            return forward(batch, caches)

        model.forward = watched  # type: ignore[method-assign]
        answers.append([answer.token_ids for answer in generate(engine)])
        padding.append(len(seen))
    assert answers[0] == answers[1]
    assert padding[0] <= 2, "0, and what slot 0 holds"
    assert padding[1] > 20


def _parts(batch: ForwardBatch) -> list[Any]:
    [plan] = batch.attention.values()
    return [part for part in (plan.few, plan.many) if part is not None]


class Rows:
    """A step for `PromptSteps.layout` to look at."""

    def __init__(self, start: Sequence[int], count: Sequence[int]) -> None:
        self.start, self.count = start, count
        self.rows, self.batch = self, self
        self.token_ids: list[int] = [0] * sum(count)
        self.delta: Any = None

    def __len__(self) -> int:
        return len(self.count)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return LocalEngine(directory, **PADDED).ranks[0].runner._prompts


ROWS = st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 400)), min_size=1, max_size=20)


@settings(max_examples=200)
@given(rows=ROWS)
def test_there_is_room_for_every_step(steps: Any, rows: list[tuple[int, int]]) -> None:
    start, count = zip(*rows, strict=True)
    layout = steps.layout(Rows(start, count))
    few = [row for row in rows if row[1] <= attention.FEW]
    if sum(count) > HEIGHTS[-1] or len(few) > 12:
        assert layout is None
        return
    assert HEIGHTS[0] <= layout.height < max(2 * sum(count), HEIGHTS[0] + 1)
    assert layout.height >= sum(count)
    assert len(few) <= layout.few <= max(4 * len(few), 0)
    assert all(each <= layout.longest for _, each in few)
    assert all((at + each - 1) // attention.SPLIT < layout.num_splits for at, each in few)
    table = torch.zeros(len(rows), 200, dtype=torch.int64)
    plan = attention.plan_attention(steps._parts.shape, start, count, table)
    runs = 0 if plan.many is None else plan.many.records.shape[1]
    assert (runs > 0) == (layout.many > 0)
    assert runs <= layout.many


def test_steps_that_differ_by_a_token_share_a_graph(steps: Any) -> None:
    def of(*rows: tuple[int, int]) -> Layout | None:
        return steps.layout(Rows(*zip(*rows, strict=True)))  # type: ignore[no-any-return]

    assert of((0, 100)) == of((7, 101)) == of((0, 60), (3, 60))
    assert of((0, 100), (40, 1)) == of((0, 99), (90, 1))
    assert of((0, 100), (40, 1), (7, 1)) == of((0, 99), (90, 1), (3, 1), (200, 1))
    assert of((0, 100), (40, 1)) != of((0, 99), (300, 1)), "one more split"
    assert of((0, 100), (40, 1)) != of((0, 99), (40, 2)), "more than one query"
    assert of((0, 100)) != of((0, 129))
    assert of((0, HEIGHTS[-1] + 1)) is None


@pytest.fixture(scope="module")
def hybrid_steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("qwen3-next")
    write_checkpoint("qwen3-next", directory)
    return LocalEngine(directory, **PADDED).ranks[0].runner._prompts


HYBRID_ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 150), st.integers(0, 9)).map(
        # A prompt's rows begin on the grid of chunks; what was answered to it may follow.
        lambda each: (64 * each[0], each[1] + each[2], 64 * each[0] + each[1])
    )
    | st.tuples(st.integers(1, 400), st.integers(1, 90)).map(lambda each: (*each, each[0])),
    min_size=1,
    max_size=24,
)


@settings(max_examples=100)
@given(rows=HYBRID_ROWS)
def test_there_is_room_for_every_step_of_a_hybrid(
    hybrid_steps: Any, rows: list[tuple[int, int, int]]
) -> None:
    """Rows of (start, count, prompt)."""
    start, count, prompt = zip(*rows, strict=True)
    step = Rows(start, count)
    step.delta = plan = delta_plan.plan_delta(
        start, count, prompt, torch.arange(len(rows)), device=torch.device("cpu")
    )
    layout = hybrid_steps.layout(step)
    prompts = [row for row in rows if row[0] < row[2]]
    if (
        sum(count) > HEIGHTS[-1]
        or any(at < end < at + each for at, each, end in rows)
        or any(each > 64 for at, each, end in rows if at >= end)
        or len(prompts) > PROMPTS[-1]
        or max(len(rows) - len(prompts), sum(each <= 16 for each in count)) > 12
    ):
        assert layout is None
        return
    with torch.inference_mode():
        hybrid_steps._delta.fill(layout.delta, plan)
    kept = hybrid_steps._delta.view(layout.delta)
    assert kept.records[2].sum() == sum(count)
    assert {*kept.states.tolist()} == {0, *range(len(rows))}
    assert (kept.tiles[2] < 0).all()


def test_drafts_and_pre_emption_beside_padded_prompts(tmp_path: Path) -> None:
    """Rows that hold tokens back, and requests computed again with what was answered to them."""
    write_checkpoint("qwen3-next", tmp_path, mtp=True)
    options = {"max_step_tokens": 70, "max_requests": 12, "num_blocks": 6}
    want = generate(LocalEngine(tmp_path, **options))
    for num_drafts in (0, 2):
        engine = LocalEngine(tmp_path, **options, num_drafts=num_drafts, **PADDED)
        for ours, theirs in zip(generate(engine), want, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert_same_bits("logits", torch.stack(ours.logits), torch.stack(theirs.logits))
        assert num_drafts or engine.num_preemptions
