"""Requests of `unisono bench step`: enough for all steps of every kind, the same every time."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.launcher.fakes import write_checkpoint
from tests.runtime.fakes import request
from unisono.launcher.bench.step_plan import (
    SKIPPED,
    SPARE,
    SPARE_STEPS,
    TRACED,
    make_plan,
    num_prompt_steps,
    num_tokens,
)
from unisono.runtime.scheduler import Scheduler
from unisono.workers.protocol import Phase


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 300),
    st.booleans(),
    st.integers(0, 3),
)
def test_requests_last_until_all_have_decoded_together(batch, context, steps, room, slowly, drafts):
    """Handed over at once or one a step, with as small steps as the command allows, and drafts that
    are all right."""
    budget = batch * (1 + drafts) + 64 + room
    longest = num_tokens(batch, context, steps, budget, drafts) - SPARE * (1 + drafts)
    scheduler = Scheduler(
        num_blocks=batch * ((context + longest) // 64 + 1),
        max_requests=batch,
        max_model_len=context + longest + 1,
        max_step_tokens=budget,
        eos_token_ids=[],
        prefix_cache=False,
        num_drafts=drafts,
    )
    waiting = [request(n, context, longest, ignore_eos=True) for n in range(batch)]
    for each in waiting:
        each.max_tokens = longest
    due, full = [], 0
    while waiting or scheduler.has_work:
        for each in waiting[: 1 if slowly else None]:
            scheduler.add(each)
        waiting = waiting[1:] if slowly else []
        if (plan := scheduler.next_plan()) is not None:
            checked = plan.rows.drafts or [0] * len(plan.rows)
            rows = zip(plan.rows.phase, checked, strict=True)
            due.append([1 + each for phase, each in rows if phase != Phase.CHUNK])
            full += len(plan.rows) == batch and plan.rows.decode_only and min(checked) == drafts
        if due and (plan is None or len(due) == 2):
            counts = due.pop(0)
            scheduler.apply([7] * sum(counts), counts)
    assert full >= SKIPPED + max(steps + 1, TRACED)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 200), st.integers(1, 20))
def test_whole_prompts_fill_steps_until_all_are_watched(batch, context, steps):
    """Handed over together, with the slots and blocks that the command asks for."""
    budget = batch * context
    assume(budget >= 64)
    scheduler = Scheduler(
        num_blocks=2 * batch * -(-(context + 1) // 64),
        max_requests=2 * batch,
        max_model_len=context + 1,
        max_step_tokens=budget,
        eos_token_ids=[],
        prefix_cache=False,
    )
    for number in range(batch * num_prompt_steps(steps)):
        scheduler.add(request(number, context, 1, ignore_eos=True))
    due, full = [], 0
    while scheduler.has_work:
        if (plan := scheduler.next_plan()) is not None:
            due.append(len(plan.rows))
            assert list(plan.rows.count) == [context] * len(plan.rows)
            assert set(plan.rows.phase) == {Phase.PROMPT}
            full += len(plan.rows) == batch
        if due and (plan is None or len(due) == 2):
            scheduler.apply([7] * due.pop(0))
    assert full == num_prompt_steps(steps)
    assert full == SKIPPED + max(steps + 1, TRACED) + SPARE_STEPS


@pytest.mark.parametrize("context", [1, 32, 64])
def test_the_least_step_of_prompts_has_its_requests(tmp_path, monkeypatch, context):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = str(write_checkpoint(tmp_path / "model"))
    values = {"batch": None, "context": context, "steps": 1, "rounds": 1, "prompt_tokens": 64}
    plan = make_plan(model=model, **values)
    [batch] = plan.batches
    asked = plan.requests(batch)
    assert sum(len(ids) for ids, _ in asked) == 64 * num_prompt_steps(1)
    assert {params.max_tokens for _, params in asked} == {1}


def test_drawn_tokens_have_a_seed_of_each_request(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = str(write_checkpoint(tmp_path / "model", max_position_embeddings=1024))
    values = {"batch": "1,3", "context": 8, "steps": 5, "rounds": 1}
    asked = {}
    for temperature in (None, 0.7):
        plan = make_plan(model=model, **values, temperature=temperature)
        asked[plan.workload] = [plan.requests(batch) for batch in plan.batches]
    greedy, drawn = asked.values()
    assert list(asked) == [
        "prompts of 8 tokens, 5 steps",
        "prompts of 8 tokens, 5 steps, temperature 0.7",
    ]
    for [(ids, params)], three in (greedy, drawn):
        assert (ids, params.seed) == (three[0][0], three[0][1].seed)
        assert [params.seed for _, params in three] == [0, 1, 2]
    assert {params.temperature for _, params in greedy[1]} == {0.0}
    assert {params.temperature for _, params in drawn[1]} == {0.7}
