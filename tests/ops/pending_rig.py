"""Requests of a recurrent layer whose tokens are held back, against one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, cat

from tests.closeness import assert_same_bits
from tests.ops.delta_rig import Layer, Span
from unisono.ops.delta import CHUNK

PATTERNS = ("all", "none", "alternating", "mixed", "changing")


class Walk(NamedTuple):
    """A request by itself, its prompt in one go and then token by token."""

    outputs: Tensor
    states: dict[int, tuple[Tensor, Tensor]]
    """By how many tokens they hold: after each chunk of the prompt, and each later token."""

    @classmethod
    def of(cls, layer: Layer, request: int) -> Walk:
        prompt, length = layer.requests[request].num_prompt, len(layer.requests[request])
        borders = sorted({*range(0, prompt, CHUNK), *range(prompt, length + 1)})
        outputs, states = [], {}
        for start, stop in pairwise(borders):
            outputs += layer.run([Span(request, start, stop - start)])
            states[stop] = layer.state_of(request + 1)
        return cls(cat(outputs), states)


def scripted(pattern: str, at: int, most: int) -> tuple[int, int]:
    """(drafts, how many of them are accepted) in a request's step number `at`."""
    if pattern == "changing":
        return 1 + at % most, at % 3 % (2 + at % most)
    if pattern == "mixed":
        accepted = (most, 0, 2, None, 1, most, None, None)[at % 8]
        return (0, 0) if accepted is None else (most, min(accepted, most))
    return most, {"all": most, "none": 0, "alternating": most * (at % 2)}[pattern]


class Drafting:
    """Where each request of a layer is. `step` compares all it leaves with `walks`, bit by bit."""

    def __init__(self, layer: Layer, walks: Sequence[Walk]) -> None:
        self.layer, self._walks = layer, walks
        self.position = [0] * len(walks)
        """Tokens that are known, pending ones among them."""
        self.pending = [0] * len(walks)
        for request in range(len(walks)):
            self.restart(request)

    def restart(self, request: int) -> None:
        """As after a pre-emption: nothing is left of its state."""
        self.position[request] = self.pending[request] = 0
        self.layer.spoil(request + 1)

    def left(self, request: int) -> int:
        return len(self.layer.requests[request]) - self.position[request]

    def in_prompt(self, request: int) -> bool:
        return self.position[request] < self.layer.requests[request].num_prompt

    def plain(self, request: int, count: int) -> Span:
        """A row whose tokens are all its own."""
        return Span(request, self.position[request], count, (), self.pending[request])

    def drafted(self, request: int, drafts: int, accepted: int) -> Span:
        """A row with at most so many drafts; one without any is plain."""
        drafts = min(drafts, self.left(request) - 1)
        row = self.plain(request, drafts + 1)
        return row._replace(num_true=1 + min(accepted, drafts)) if drafts else row

    def step(self, rows: Sequence[Span]) -> None:
        for row, out in zip(rows, self.layer.run(rows), strict=True):
            i, count = row.request, row.count if row.num_true is None else row.num_true
            self.position[i] += count
            self.pending[i] = 0 if row.num_true is None else count
            want = self._walks[i].outputs[row.start : row.start + count]
            assert_same_bits(f"outputs of {row} among {rows}", out[:count], want)
        for i, walk in enumerate(self._walks):
            if stored := self.position[i] - self.pending[i]:
                for got, want in zip(self.layer.state_of(i + 1), walk.states[stored], strict=True):
                    assert_same_bits(f"state of request {i} after {rows}", got, want)
