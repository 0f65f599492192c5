"""Log-probabilities as a caller sees them: read from the wire, and their JSON."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.workers.protocol import logprob_width


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the likeliest tokens at a place."""

    token_id: int
    token: bytes
    """What the token spells; of a character that spans tokens, a part."""
    logprob: float

    @property
    def text(self) -> str:
        """`token` as text, with U+FFFD for parts of characters."""
        return self.token.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob(TopLogprob):
    """A token of an answer or a prompt, and how likely the model found it at its place.

    `logprob` is the natural logarithm of its share in the softmax of the model's own logits,
    before penalties, biases, temperature and filters.
    """

    rank: int
    """1: no token was likelier; in general 1 + the number of tokens with a greater logit."""
    top: tuple[TopLogprob, ...] = ()
    """The likeliest tokens at its place, as many as were asked for, the likeliest first; of
    equally likely ones the lowest id first."""


def read_logprobs(
    token_ids: Sequence[int],
    items: array[int],
    num_top: int,
    token_bytes: Callable[[int], bytes],
) -> list[TokenLogprob]:
    """Return the entries of `token_ids` from the `logprob_width(num_top)` items of each."""
    width = logprob_width(num_top)
    assert len(items) == width * len(token_ids), "each token has its log-probability"
    reals = array("f")
    reals.frombytes(items.tobytes())  # where an item is the bits of a number
    return [
        TokenLogprob(
            token_id=token_id,
            token=token_bytes(token_id),
            logprob=reals[at],
            rank=items[at + 1],
            top=tuple(
                TopLogprob(token_id=items[i], token=token_bytes(items[i]), logprob=reals[i + 1])
                for i in range(at + 2, at + width, 2)
                if items[i] >= 0
            ),
        )
        for token_id, at in zip(token_ids, range(0, len(items), width), strict=True)
    ]


def logprobs_json(entries: Iterable[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Return what `--json` writes: objects of id, text, bytes, logprob, rank and top.

    `bytes` are the numbers that `text` is decoded from; an object in `top` has no rank and no
    top. A log-probability of minus infinity, which JSON has not, is null.
    """
    return [
        None
        if entry is None
        else {**_plain(entry), "rank": entry.rank, "top": [_plain(top) for top in entry.top]}
        for entry in entries
    ]


def _plain(entry: TopLogprob) -> dict[str, Any]:
    return {
        "id": entry.token_id,
        "text": entry.text,
        "bytes": list(entry.token),
        "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
    }
