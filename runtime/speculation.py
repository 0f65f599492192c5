"""How many tokens to draft. Whatever it says, answers are the same; only their speed is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

_TRIES = 3
"""Steps that each number of drafts is given before the best is taken."""
_LOOK_EVERY = 64
"""Steps between two looks at a number that was not the best."""
_WEIGHT = 0.1
"""Of the newest value in an average."""


class DraftPolicy(Protocol):
    """Says for each step how many tokens are drafted behind each of its rows."""

    def choose(self, num_rows: int) -> int:
        """Drafts for a step in which `num_rows` requests decode."""
        ...

    def note(self, num_rows: int, drafts: int, counts: Sequence[int], seconds: float) -> None:
        """A step of `num_rows` rows with `drafts` each took `seconds` and answered `counts`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDrafts:
    """Always the same."""

    num_drafts: int

    def choose(self, num_rows: int) -> int:
        """`num_drafts`."""
        return self.num_drafts

    def note(self, num_rows: int, drafts: int, counts: Sequence[int], seconds: float) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Size:
    """What is known of steps of about one size, by number of drafts."""

    seconds: list[float]
    tries: list[int]
    steps: int = 0


@dataclass(slots=True)
class AutoDrafts:
    """What gives most tokens a second, by the steps so far: 0 where drafting does not pay.

    A draft is right with a rate of its place in the chain, the same for all sizes of a step;
    seconds are those of steps with about as many rows, within a factor of 2.
    """

    most: int
    rates: list[float] = field(default_factory=list)
    """Of drafts right if all before them are, by place."""
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates = [0.7] * self.most

    def choose(self, num_rows: int) -> int:
        """The best number, or now and then another one, to learn of it."""
        size = self._size(num_rows)
        size.steps += 1
        for drafts in range(self.most, -1, -1):
            if size.tries[drafts] < _TRIES:
                return drafts
        num_looks, since_look = divmod(size.steps, _LOOK_EVERY)
        if not since_look:
            return num_looks % (self.most + 1)
        return max(range(self.most + 1), key=lambda drafts: self._speed(size, drafts))

    def note(self, num_rows: int, drafts: int, counts: Sequence[int], seconds: float) -> None:
        """Learn from a step."""
        size = self._size(num_rows)
        tries = size.tries[drafts]
        # The first may have been compiled or waited for, the second captured: the last one counts.
        weight = 1.0 if tries < _TRIES else _WEIGHT
        size.seconds[drafts] += weight * (seconds - size.seconds[drafts])
        size.tries[drafts] = tries + 1
        for place in range(drafts):
            reached = sum(count > place for count in counts)
            if reached:
                right = sum(count > place + 1 for count in counts) / reached
                self.rates[place] += _WEIGHT * (right - self.rates[place])

    def _size(self, num_rows: int) -> _Size:
        key = num_rows.bit_length()
        if key not in self._sizes:
            self._sizes[key] = _Size([0.0] * (self.most + 1), [0] * (self.most + 1))
        return self._sizes[key]

    def _speed(self, size: _Size, drafts: int) -> float:
        """Tokens a row and second."""
        tokens, odds = 1.0, 1.0
        for rate in self.rates[:drafts]:
            odds *= rate
            tokens += odds
        return tokens / max(size.seconds[drafts], 1e-9)


def draft_policy(speculate: str, num_drafts: int) -> DraftPolicy:
    """The policy that `--speculate` names; `num_drafts` is the most that ranks can hold."""
    return AutoDrafts(num_drafts) if speculate == "auto" else FixedDrafts(num_drafts)
