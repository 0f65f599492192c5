"""How far counts of draws are from the odds that they were drawn with."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)
LIMIT = 4.0
"""Deviations that chance passes once in 30,000 times."""


def chi_square_deviation(
    seen: Mapping[Outcome, int], exact: Mapping[Outcome, float], num_draws: int
) -> float:
    """How many standard deviations chi-square of `seen` lies above what `exact` odds would give.

    What comes less than 5 times on the average is one cell. Wilson and Hilferty: the cube root of
    chi-square over its freedom is nearly normal.
    """
    assert set(seen) <= set(exact), set(seen) - set(exact)
    rare = [each for each, odds in exact.items() if odds * num_draws < 5]
    cells = [([each], odds) for each, odds in exact.items() if odds * num_draws >= 5]
    if rare:
        cells.append((rare, sum(exact[each] for each in rare)))
    statistic = sum(
        (sum(seen.get(each, 0) for each in group) - num_draws * odds) ** 2 / (num_draws * odds)
        for group, odds in cells
    )
    free = len(cells) - 1
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5
