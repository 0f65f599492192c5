"""Which drafts were right."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.ops.reference.speculation import accept_drafts

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1), min_size=1)
"""Rows of (token, draft); of the last place of a row the draft is none."""


@given(ROWS)
def test_right_drafts_are_counted_up_to_the_first_wrong_one(
    rows: list[list[tuple[int, int]]],
) -> None:
    sizes = [len(row) for row in rows]
    first = [sum(sizes[:i]) for i in range(len(rows))]
    tokens, drafted = (
        torch.tensor([pair[side] for row in rows for pair in row]) for side in (0, 1)
    )
    counts = accept_drafts(tokens, drafted, torch.tensor(first), torch.tensor(sizes))
    for row, count in zip(rows, counts.tolist(), strict=True):
        leading = 0
        while leading < len(row) - 1 and row[leading][0] == row[leading][1]:
            leading += 1
        assert count == 1 + leading
