"""Requests of a recurrent layer, run in any cuts and company over a pool of states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.ops.delta import CHUNK, PendingTokens
from unisono.ops.table import Ops


class Shape(NamedTuple):
    """Heads and channels of a layer, and taps of its convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass
class Request:
    """What the layer's projections give for every position, of which the first are a prompt."""

    x: Tensor
    b: Tensor
    a: Tensor
    num_prompt: int

    def __len__(self) -> int:
        return len(self.x)

    def cuts(self, position: int, most: int) -> list[int]:
        """Counts from `position` on that the scheduler may choose."""
        ends = [*range(position + CHUNK, self.num_prompt, CHUNK)]
        past = max(position + 1, self.num_prompt)
        ends += range(past, min(len(self), max(position, self.num_prompt) + most) + 1)
        return [end - position for end in ends]

    def next_cut(self, position: int, most: int) -> int:
        """One of `cuts`."""
        return random.choice(self.cuts(position, most))


class Span(NamedTuple):
    """Positions [start, start + count) of a request; saves as (length, state)."""

    request: int
    start: int
    count: int
    saves: tuple[tuple[int, int], ...] = ()
    num_pending: int = 0
    num_true: int | None = None
    """How many of its tokens, which are held back, will be accepted; the others are NaN. None:
    they are the request's own."""


class Layer:
    """A layer with random weights, its requests, and a pool in which all is NaN.

    State 0 is scratch; request i has state i + 1; those after are free.
    """

    def __init__(
        self,
        ops: Ops,
        shape: Shape,
        lengths: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        num_states: int = 32,
    ) -> None:
        """lengths: (prompt, all positions) of each request."""
        self.ops, self.shape, self.device = ops, shape, device or torch.device("cpu")
        heads = shape.value_heads
        self.weight = self._some(shape.channels, shape.taps, dtype=dtype)
        self.decay = -self._some(heads).exp()
        self.dt_bias = self._some(heads)
        self.requests = [
            Request(
                self._some(length, shape.channels, dtype=dtype),
                self._some(length, heads, dtype=dtype),
                self._some(length, heads, dtype=dtype),
                prompt,
            )
            for prompt, length in lengths
        ]
        conv = (num_states, shape.taps - 1, shape.channels)
        state = (num_states, heads, shape.value_dim, shape.key_dim)
        self.conv = torch.full(conv, float("nan"), dtype=dtype, device=self.device)
        self.state = torch.full(state, float("nan"), dtype=state_dtype, device=self.device)
        self.pending: PendingTokens | None = None

    def keep_pending(self, num_drafts: int) -> None:
        """Make room for steps with drafts, all NaN as well."""
        shape, numbers, tokens = self.shape, len(self.state), num_drafts + 1
        sizes = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
        self.pending = PendingTokens(
            self.conv.new_full((numbers, tokens, shape.channels), float("nan")),
            *(
                torch.full((numbers, tokens, *size), float("nan"), device=self.device)
                for size in (*sizes, (shape.value_heads,))
            ),
        )

    def run(self, spans: Sequence[Span]) -> list[Tensor]:
        """One step: the outputs [count, value heads, value_dim] of each span."""
        plan = self.ops.plan_delta(
            [span.start for span in spans],
            [span.count for span in spans],
            [self.requests[span.request].num_prompt for span in spans],
            [span.request + 1 for span in spans],
            [(row, *save) for row, span in enumerate(spans) for save in span.saves],
            [span.num_pending for span in spans],
            [span.num_true is not None for span in spans],
            device=self.device,
        )
        x, b, a = (torch.cat([self._of(span, name) for span in spans]) for name in ("x", "b", "a"))
        mixed = self.ops.short_conv(x, self.weight, self.conv, plan, self.pending)
        gates, heads = (b, a, self.decay, self.dt_bias), self.shape.key_heads
        out = self.ops.delta_rule(mixed, *gates, self.state, plan, heads, self.pending)
        return list(out.split([span.count for span in spans]))

    def _of(self, span: Span, name: str) -> Tensor:
        values = getattr(self.requests[span.request], name)[span.start : span.start + span.count]
        if span.num_true is not None:
            values = values.clone()
            values[span.num_true :] = float("nan")
        return values

    def state_of(self, number: int) -> tuple[Tensor, Tensor]:
        """The convolution's and the recurrence's, copied."""
        return self.conv[number].clone(), self.state[number].clone()

    def put_state(self, number: int, saved: tuple[Tensor, Tensor]) -> None:
        self.conv[number], self.state[number] = saved

    def spoil(self, number: int) -> None:
        self.conv[number], self.state[number] = float("nan"), float("nan")
        if kept := self.pending:
            for tensor in (kept.inputs, kept.keys, kept.updates, kept.decays):
                tensor[number] = float("nan")

    def _some(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(dtype).to(self.device)
