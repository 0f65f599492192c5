"""How much of what an engine computed came from captured graphs, and why the rest did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Counted(Protocol):
    """What is read of an answer: counts of the engine up to its end, 0 where they are not known."""

    @property
    def num_replays(self) -> int: ...
    @property
    def eager(self) -> tuple[tuple[str, int], ...]: ...


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Pieces of steps (forward, tail): replayed ones, and by reason those that ran eagerly."""

    num_replays: int
    eager: Counter[str]

    @classmethod
    def of(cls, answers: Iterable[Counted]) -> GraphCounts:
        """Return the counts by the end of the last of `answers`."""
        known = [GraphCounts(each.num_replays, Counter(dict(each.eager))) for each in answers]
        return max(known, key=lambda each: each.num_pieces, default=GraphCounts(0, Counter()))

    @property
    def num_pieces(self) -> int:
        return self.num_replays + self.eager.total()

    def since(self, before: GraphCounts) -> GraphCounts:
        """Return what has come to `before`."""
        return GraphCounts(self.num_replays - before.num_replays, self.eager - before.eager)

    def as_json(self) -> dict[str, Any]:
        """Return both under their names."""
        return {"replays": self.num_replays, "eager": dict(self.eager)}

    def __str__(self) -> str:
        """Return "60 graph replays, 4 eager runs (2 first run, 2 prompt tokens)"."""
        text = f"{self.num_replays:,} graph replay{'s' * (self.num_replays != 1)}"
        if not self.eager:
            return text
        total = self.eager.total()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.eager.items()))
        return f"{text}, {total:,} eager run{'s' * (total != 1)} ({reasons})"
