"""How long an order (sleep, wake, other weights) kept requests waiting, for whoever gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.runtime.protocol import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """What an order took. Times are seconds, on the runtime's clock, from its turn to its end.

    Its turn comes with the next result: the steps in flight are waited for, and are its first part.
    """

    parts: Mapping[str, float]
    """By what they went into: steps in flight, giving memory back, taking memory (with what is
    captured at once where `capture` is start), loading weights, the rest."""
    limit_s: float
    """What orders may take at the most (`start_timeout_s`): the engine is given up after it."""

    @classmethod
    def of(cls, state: EngineState, limit_s: float) -> Pause:
        """That of the order which `state` answers."""
        return cls(parts=dict(state.took), limit_s=limit_s)

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """Return "0.31 s (0.02 s steps in flight, 0.29 s loading weights), 600 s at the most"."""
        parts = [f"{value:.2f} s {name}" for name, value in self.parts.items() if value >= 0.005]
        told = f" ({', '.join(parts)})" if parts else ""
        return f"{self.seconds:.2f} s{told}, {self.limit_s:g} s at the most"
