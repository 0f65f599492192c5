"""How many drafts were checked and how many were right, over the answers of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol


class Counted(Protocol):
    """What is read of an answer: by place in a chain, drafts that were checked, and were right."""

    @property
    def drafted(self) -> Sequence[int]: ...
    @property
    def accepted(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """By place in a chain. Nothing was drafted where both are empty."""

    checked: tuple[int, ...]
    right: tuple[int, ...]

    @classmethod
    def of(cls, answers: Iterable[Counted]) -> DraftCounts:
        """Return the sums over `answers`, some of which may never have reached a place."""
        known = list(answers)
        checked = zip_longest(*(each.drafted for each in known), fillvalue=0)
        right = zip_longest(*(each.accepted for each in known), fillvalue=0)
        return cls(tuple(map(sum, checked)), tuple(map(sum, right)))

    @property
    def tokens_per_step(self) -> float:
        """The token of a step itself, and what its chain of drafts added on the average."""
        return 1 + sum(self.right) / self.checked[0] if self.checked else 1.0

    @property
    def shares(self) -> list[float]:
        """Which part of those checked at each place was right."""
        return [right / count for right, count in zip(self.right, self.checked, strict=True)]
