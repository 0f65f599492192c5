"""How many drafts are made: the policies learn what pays, from what they are told alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import pytest

from tests.runtime.fakes import FakeWorker, request, scheduler
from tests.runtime.test_ahead import IDLE, serve, submit
from unisono.runtime.protocol import Stop
from unisono.runtime.speculation import AutoDrafts, FixedDrafts, draft_policy


def run(
    policy: AutoDrafts, *, right: float, step_s: float, draft_s: float, rows: int, steps: int = 400
) -> list[int]:
    """Steps of `rows` rows that take step_s, and draft_s for each draft; drafts are right at rate
    `right`. Returns what was chosen."""
    rng, chosen = random.Random(0), []
    for _ in range(steps):
        drafts = policy.choose(rows)
        counts = [
            1 + next((i for i in range(drafts) if rng.random() >= right), drafts)
            for _ in range(rows)
        ]
        policy.note(rows, drafts, counts, step_s + drafts * draft_s)
        chosen.append(drafts)
    return chosen


def test_drafts_are_counted_by_their_place_in_a_chain() -> None:
    asked = request(0, 5, 5)
    for checked, right in ((3, 1), (1, 0), (3, 3), (2, 2)):
        asked.count_drafts(checked, right)
    assert list(asked.drafted) == [4, 3, 2]
    assert list(asked.accepted) == [3, 2, 1]


def test_by_name() -> None:
    assert draft_policy("5", 5) == FixedDrafts(5)
    assert draft_policy("off", 0).choose(7) == 0
    policy = draft_policy("auto", 3)
    assert isinstance(policy, AutoDrafts)
    assert policy.choose(1) == 3


@pytest.mark.parametrize(
    ("right", "draft_s", "best"),
    [(0.95, 0.1, 3), (0.05, 0.1, 0), (0.6, 0.3, 1), (0.9, 2.0, 0)],
)
def test_it_settles_on_what_gives_most_tokens_a_second(
    right: float, draft_s: float, best: int
) -> None:
    chosen = run(AutoDrafts(3), right=right, step_s=1.0, draft_s=draft_s, rows=4)
    late = chosen[100:]
    assert late.count(best) > 0.9 * len(late)
    assert set(late) >= {best}


def test_every_number_is_tried_and_looked_at_again() -> None:
    chosen = run(AutoDrafts(3), right=0.05, step_s=1.0, draft_s=0.5, rows=1)
    assert sorted(chosen[:12]) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert {*chosen[64:]} == {0, 1, 2, 3}


def test_it_notices_that_drafts_got_better() -> None:
    policy = AutoDrafts(3)
    run(policy, right=0.05, step_s=1.0, draft_s=0.1, rows=8)
    assert policy.choose(8) == 0
    late = run(policy, right=0.99, step_s=1.0, draft_s=0.1, rows=8, steps=3000)[-500:]
    assert late.count(3) > 0.9 * len(late)


def test_large_and_small_steps_are_told_apart() -> None:
    """Where many rows decode, drafts cost what they are worth."""
    policy = AutoDrafts(3)
    for _ in range(30):
        small = run(policy, right=0.8, step_s=1.0, draft_s=0.05, rows=1, steps=20)
        large = run(policy, right=0.8, step_s=1.0, draft_s=1.5, rows=64, steps=20)
    assert small.count(3) > 15
    assert large.count(0) > 15


@dataclass
class Noting:
    """Always the same number, and what it is told."""

    num_drafts: int
    told: list[tuple[int, int, list[int], float]] = field(default_factory=list)

    def choose(self, num_rows: int) -> int:
        return self.num_drafts

    def note(self, num_rows: int, drafts: int, counts: Sequence[int], seconds: float) -> None:
        self.told.append((num_rows, drafts, list(counts), seconds))


def test_a_policy_hears_of_steps_that_say_something_of_others() -> None:
    """Of those that decode alone, with as many drafts behind each row, and took a known time."""
    policy = Noting(2)
    plans, worker = scheduler(num_drafts=2, max_in_flight=1, policy=policy), FakeWorker(4)
    for number, max_tokens in ((0, 9), (1, 8)):
        plans.add(request(number, 5, max_tokens))
    accepts, rows = cycle([2, 0]), []
    for seconds in (1.0, 2.0, 0.0, 4.0, 5.0):
        plan = plans.next_plan()
        assert plan is not None
        rows.append(list(plan.rows.drafts) if plan.rows.decode_only else "prompts")
        tokens, counts = worker.run(plan, accepts)
        plans.apply(tokens, counts, seconds=seconds)
    # The first request is near its end when the other still has room for all drafts.
    assert rows == ["prompts", [2, 2], [2, 2], [1, 2], [2]]
    assert policy.told == [(2, 2, [3, 1], 2.0), (1, 2, [3], 5.0)]


def test_an_engine_tells_how_long_steps_took() -> None:
    policy = Noting(0)
    serve([(0, submit(0, 5, max_tokens=6)), (IDLE, Stop())], policy=policy)
    assert len(policy.told) > 2
    assert all(each[:2] == (1, 0) and each[3] > 0 for each in policy.told)
