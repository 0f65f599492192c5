"""What came from graphs, as commands say it."""

from __future__ import annotations

from collections import Counter

from unisono.launcher.bench.engine import Got
from unisono.launcher.graph_counts import GraphCounts


def test_the_last_answer_knows_of_all() -> None:
    answers = [
        Got(num_replays=60, eager=(("prompt tokens", 4), ("first run", 2))),
        Got(),  # ended by a stop string: nothing is known
        Got(num_replays=58, eager=(("prompt tokens", 2), ("first run", 2))),
    ]
    counts = GraphCounts.of(answers)
    assert str(counts) == "60 graph replays, 6 eager runs (2 first run, 4 prompt tokens)"
    assert counts.as_json() == {"replays": 60, "eager": {"prompt tokens": 4, "first run": 2}}


def test_a_part_of_a_run_is_what_has_come_since() -> None:
    before = GraphCounts(2, Counter({"first run": 2, "sampling": 1}))
    after = GraphCounts(1503, Counter({"first run": 2, "sampling": 2}))
    assert str(after.since(before)) == "1,501 graph replays, 1 eager run (1 sampling)"
    assert after.since(before).num_pieces == 1502


def test_nothing_captured_is_said_with_the_reason() -> None:
    """B37."""
    counts = GraphCounts.of([Got(eager=(("--no-graphs", 1024),))])
    assert str(counts) == "0 graph replays, 1,024 eager runs (1,024 --no-graphs)"
    assert GraphCounts.of([]).num_pieces == 0
