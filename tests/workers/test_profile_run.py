"""The step that memory is measured with: as large as any, and nothing live is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.workers import profile_run
from unisono.workers.config import WorkerConfig
from unisono.workers.graph_pool import GraphPool
from unisono.workers.profile_run import (
    GRAPH_BYTES,
    capture_steps,
    largest_step,
    measure_budget,
    rehearse,
)
from unisono.workers.protocol import Phase, unpack_sampling


@pytest.mark.parametrize(
    ("max_requests", "max_model_len", "max_step_tokens", "count"),
    [
        (4, 1000, 100, [97, 1, 1, 1]),
        (4, 40, 100, [40, 40, 19, 1]),
        (4, 20, 100, [20, 20, 20, 20]),
        (100, 1000, 10, [1] * 64),
        (1, 1000, 10, [64]),
    ],
)
def test_the_largest_step_has_every_request_and_every_token(
    max_requests: int, max_model_len: int, max_step_tokens: int, count: list[int]
) -> None:
    rows = largest_step(max_requests, max_model_len, max_step_tokens)
    assert rows.count.tolist() == count
    assert set(rows.slot) == {0}
    assert set(rows.phase) == {Phase.PROMPT}
    ends = [start + length for start, length in zip(rows.start, rows.count, strict=True)]
    assert all(
        end == (max_model_len if length == 1 else length)
        for end, length in zip(ends, count, strict=True)
    )


def test_prompts_of_a_hybrid_are_cut_on_the_grid() -> None:
    rows = largest_step(4, 1000, 2100, grid=64)
    assert rows.count.tolist() == [1000, 1000, 64, 1]
    assert rows.start.tolist() == [0, 0, 0, 999]
    assert largest_step(4, 1000, 100, grid=64).count.tolist() == [64, 1, 1, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen2-sliding", directory)
    return directory


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rehearsal_writes_to_scratch_only(model: Path, tp: int) -> None:
    engine = LocalEngine(model, tp=tp, max_model_len=100, max_requests=5)
    prompts = [random_ids(length, seed=length) for length in (3, 66)]
    want = engine.generate(prompts, max_tokens=8)
    config = WorkerConfig(
        model_path=str(model), model=engine.config, tp=tp, max_model_len=100, max_requests=5
    )
    before = [live_state(rank) for rank in engine.ranks]
    engine._everywhere(lambda rank: rehearse(rank.runner, config, 150, rank.cache))
    assert len(engine.ranks[0].logits[-1]) == 5, "every request has its logits"
    for rank, (blocks, slots) in zip(engine.ranks, before, strict=True):
        now_blocks, now_slots = live_state(rank)
        assert torch.equal(now_blocks, blocks)
        assert torch.equal(now_slots, slots)
        slot_table = rank.runner._slots
        assert slot_table.sampling.of(0).is_plain
        assert not slot_table.block_table[0].any()
    assert len({rank.group.digest for rank in engine.ranks}) == 1
    got = engine.generate(prompts, max_tokens=8)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]


def test_a_card_is_measured_while_the_step_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fake(name: str, answer: object) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda: (calls.append(name), answer)[1])

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        fake(name, None)
    fake("memory_reserved", 20 << 30)
    fake("max_memory_reserved", 23 << 30)
    fake("mem_get_info", (50 << 30, 80 << 30))
    engine = LocalEngine(model, max_model_len=100, max_requests=5)
    config = WorkerConfig(model_path="m", model=engine.config, max_model_len=100, max_requests=5)
    [rank] = engine.ranks
    step = rank.runner.step
    monkeypatch.setattr(rank.runner, "step", lambda plan: (calls.append("step"), step(plan))[1])
    measured = measure_budget(config, 150, rank.runner, rank.pool, rank.cache, None, 75 << 30)
    activations, graph_bytes, budget = measured
    assert (activations, graph_bytes) == (3 << 30, 0)
    assert budget.share == int((80 << 30) * 0.9) - (25 << 30) - (3 << 30) - GRAPH_BYTES
    assert budget.most == (50 << 30) - (3 << 30) - GRAPH_BYTES
    assert calls == [
        *("synchronize", "empty_cache", "reset_peak_memory_stats", "memory_reserved"),
        *("step", "step", "synchronize", "max_memory_reserved", "empty_cache", "mem_get_info"),
    ]
    assert rank.cache.layers[0].k.shape[0] == 1, "scratch alone is left"


def test_graphs_of_the_start_are_measured_and_the_cache_leaves_them_room(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step twice: eagerly, then to be captured. What is measured there is gone again after."""
    calls: list[str] = []
    taken = {"graphs": 0, "kernels": 0}
    monkeypatch.setattr(profile_run, "passing_bytes", lambda run: 3 << 30)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: ((50 << 30) - sum(taken.values()), 80 << 30)
    )

    def capture(config: object, runner: object, graphs: GraphPool) -> None:
        calls.append("capture")
        taken["kernels"] = 1 << 28
        taken["graphs"] += 1 << 27

    def drop() -> None:
        calls.append("drop")
        taken["graphs"] = 0

    monkeypatch.setattr(profile_run, "capture_graphs", capture)
    engine = LocalEngine(model, max_model_len=100, max_requests=5)
    [rank] = engine.ranks
    monkeypatch.setattr(rank.pool, "drop", drop)
    config = WorkerConfig(
        model_path="m", model=engine.config, max_model_len=100, max_requests=5, capture="start"
    )
    measured = measure_budget(config, 150, rank.runner, rank.pool, rank.cache, None, 75 << 30)
    activations, graph_bytes, budget = measured
    assert (activations, graph_bytes) == (3 << 30, 1 << 27)
    assert calls == ["capture", "drop", "capture", "drop"]
    left = (50 << 30) - (1 << 28) - (3 << 30) - GRAPH_BYTES - (1 << 27)
    assert budget.most == left


def test_steps_of_the_start_are_on_scratch_and_the_largest_comes_first() -> None:
    plans = list(capture_steps((1, 4, 12), 2000, 512, is_hybrid=False))
    assert [(len(plan.rows), plan.rows.start[0]) for plan in plans] == [
        *((12, 512), (4, 512), (1, 512)),
        *((12, 0), (4, 0), (1, 0)),
    ]
    for plan in plans:
        assert set(plan.rows.slot) == {0}
        assert set(plan.rows.count) == {1}
        assert plan.rows.decode_only
        assert plan.open_slot.tolist() == plan.open_tokens.tolist() == [0]
    drawn = [not unpack_sampling(plan.open_sampling)[0].is_greedy for plan in plans]
    assert drawn == [True] * 3 + [False] * 3, "the last leaves slot 0 plain"
    for plan in capture_steps((2,), 2000, 512, is_hybrid=True, num_drafts=3):
        assert plan.rows.drafts.tolist() == [3, 3]
        assert plan.num_proposals == 3
    short = list(capture_steps((1, 4), 512, 512, is_hybrid=True))
    assert [plan.rows.start[0] for plan in short] == [0] * 4
    assert {plan.open_state.tolist()[0] for plan in short} == {0}


def live_state(rank) -> tuple[torch.Tensor, torch.Tensor]:
    slots = rank.runner._slots
    blocks = [part[1:].flatten() for layer in rank.cache.layers for part in (layer.k, layer.v)]
    tables = torch.cat((slots.token_ids[1:].flatten(), slots.block_table[1:].flatten()))
    return torch.cat(blocks).view(torch.int32).clone(), tables.clone()
