"""A step that the ranks were sent and whose result is due, and what waits for that result."""

from __future__ import annotations

from dataclasses import dataclass, field

from unisono.runtime.request import Request
from unisono.workers.protocol import Phase


@dataclass(slots=True)
class PlannedRow:
    """Tokens of one request that a step computes. Not frozen: there are many, and that costs."""

    request: Request
    start: int
    """Its first position; of a decode row behind drafts in flight, the least it can be."""
    count: int
    phase: Phase
    drafts: int
    """Tokens that ranks may propose behind it: it answers 1 to drafts + 1, or none in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a request held on the ranks. Nobody else gets it before the last step that names it."""

    slot: int
    blocks: list[int]
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A snapshot of the state of `slot` after `length` tokens, under the name of its last block."""

    slot: int
    length: int
    state: int
    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One step in flight."""

    step: int
    rows: list[PlannedRow]
    reads: list[int]
    """Snapshots that requests start from in this step."""
    saves: list[Save]
    leaving: list[Seat] = field(default_factory=list)
    """Of requests that have ended: free with the result."""

    @property
    def num_drafts(self) -> int | None:
        """Of a step that only decodes, and drafts alike behind all its rows: how many; else None.

        What others take says nothing of the next.
        """
        drafts = self.rows[0].drafts
        alike = all(row.phase is Phase.DECODE and row.drafts == drafts for row in self.rows)
        return drafts if alike else None
