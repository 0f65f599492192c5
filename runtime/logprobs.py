"""Cuts what the ranks send of log-probabilities into requests. They pass through unread."""

from __future__ import annotations

from array import array

from unisono.runtime.request import Request
from unisono.workers.protocol import int32s, logprob_width


class LogprobCutter:
    """The log-probabilities of one step, cut in the order of `StepResult.logprobs`."""

    def __init__(self, items: array[int] | None) -> None:
        self._items = int32s() if items is None else items
        self._at = 0

    def give_prompt(self, request: Request, start: int, count: int) -> None:
        """Cut those of a row of `request` that predict its prompt, and keep what it lacks.

        The row computed the positions [start, start + count), whatever has become of the request.
        """
        num_top = request.params.prompt_logprobs
        stop = min(start + count, request.num_prompt_tokens - 1)
        if num_top is None or stop <= start:
            return
        width = logprob_width(num_top)
        records = self._cut((stop - start) * width)
        known = request.num_prompt_logprobs
        assert start <= known, "a position of the prompt was skipped"
        if stop > known:
            request.prompt_logprobs += records[(known - start) * width :]
            request.num_prompt_logprobs = stop

    def cut(self, request: Request) -> array[int] | None:
        """Cut those of one token of `request`; None if it wants none."""
        num_top = request.params.logprobs
        return None if num_top is None else self._cut(logprob_width(num_top))

    def check_empty(self) -> None:
        """Raise AssertionError if the ranks have sent more than was asked for."""
        assert self._at == len(self._items), "log-probabilities that nobody asked for"

    def _cut(self, count: int) -> array[int]:
        start, self._at = self._at, self._at + count
        assert self._at <= len(self._items), "log-probabilities are missing"
        return self._items[start : self._at]


def take_prompt_logprobs(request: Request) -> array[int] | None:
    """Return those of its prompt that were not sent yet: call it with a token of the answer.

    None if there are none, so at all tokens but the first.
    """
    items, request.prompt_logprobs = request.prompt_logprobs, int32s()
    return items or None
