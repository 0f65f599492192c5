"""The one loop that turns prompts into answers; the command line and `LLM` both drive it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from unisono.launcher.options import option_spec
from unisono.launcher.stop_strings import StopSearch, StopStrings
from unisono.runtime.protocol import (
    Delta,
    EngineError,
    Finished,
    Rejected,
    RequestRejected,
    SamplingParams,
)
from unisono.workers.config import WorkerConfig

if TYPE_CHECKING:
    from unisono.launcher.tokenizer import Detokenizer

POLL_S = 0.5
"""Longest wait for an event before the engine looks after its processes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, tokenised. `index` is its place among the prompts of a call."""

    index: int
    prompt: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of one answer, never empty, and the tokens that came since the last piece.

    A character, or what may become a stop string, can span tokens: they come with the piece that
    shows it. Tokens after the last text (the one that ended the answer) are in the `Answer` only.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished answer.

    `text` is without special tokens, `token_ids` holds every token of the answer, the one that
    ended it included. Of an answer that a stop string ended, the last token is the first with
    which the match was certain, and `text` ends before the match: text that the kept tokens say
    from there on is left out, and the number of completion tokens is always `len(token_ids)`.
    Times are seconds since the engine received the request, or, where a stop string ended the
    answer, since it was submitted.
    """

    index: int
    prompt: str
    """The prompt as it was given; of a chat, its last message."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop (a token or a stop string), length, or rejected: the engine can never serve this
    prompt, and `error` says why."""
    num_prompt_tokens: int
    first_token_s: float
    total_s: float
    error: str = ""


class RequestChannel(Protocol):
    """What the loop needs of an engine."""

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[Delta | Finished | Rejected]: ...


class TokenText(Protocol):
    """What the loop needs of a tokenizer."""

    def stream(self) -> Detokenizer: ...


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: Request
    words: Detokenizer
    search: StopSearch
    submitted_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_shown: int = 0
    """Tokens that pieces have carried so far."""

    def take(self, token_ids: Iterable[int]) -> str:
        """Add tokens up to the one that completes a stop string; return the text to show."""
        if not self.token_ids:
            self.first_token_s = self.age_s()
        start = len(self.text)
        # One by one: tokens after the match are no part of the answer.
        for token in token_ids:
            self.token_ids.append(token)
            self.text.append(self.search.push(self.words.push((token,))))
            if self.search.found:
                break
        return "".join(self.text[start:])

    def finish(self) -> str:
        """End the text; return what was held back, unless it completes a stop string."""
        rest = self.search.push(self.words.flush())
        rest += self.search.flush()
        self.text.append(rest)
        return rest

    def piece(self, text: str) -> Piece:
        """Return `text` with the tokens that no piece has carried."""
        new = tuple(self.token_ids[self.num_shown :])
        self.num_shown = len(self.token_ids)
        return Piece(index=self.request.index, text=text, token_ids=new)

    def age_s(self) -> float:
        return time.monotonic() - self.submitted_s


def answer_all(
    engine: RequestChannel,
    tokenizer: TokenText,
    requests: Sequence[Request],
    params: SamplingParams,
) -> Generator[Piece | Answer, None, None]:
    """Submit every request and yield pieces as they come and one `Answer` per request.

    Pieces of different requests interleave; the concatenated pieces of a request are its answer.
    Leaving early (an exception, or closing the iterator) aborts what is still running. Raises
    WorkerLost.
    """
    running: dict[int, _Open] = {}
    stops = StopStrings(params.stop)
    try:
        for request in requests:
            request_id = engine.submit(request.prompt_ids, params)
            running[request_id] = _Open(request, tokenizer.stream(), stops.search())
        while running:
            for event in engine.poll(POLL_S):
                # Events of an aborted request of an earlier call may still arrive.
                if event.request_id in running:
                    yield from _apply(event, running, engine)
    except EngineError:
        running.clear()
        raise
    finally:
        for request_id in running:
            engine.abort(request_id)


def check_prompts(requests: Sequence[Request], worker: WorkerConfig) -> None:
    """Raise RequestRejected if a prompt is empty, leaves no room for an answer, or holds ids that
    the model has no row for (a tokenizer of another model)."""
    for place, request in enumerate(requests, start=1):
        name = f"prompt {place} of {len(requests)}" if len(requests) > 1 else "the prompt"
        count = len(request.prompt_ids)
        if count == 0:
            raise RequestRejected(f"{name} is empty: it has no tokens")
        if count + 1 > worker.max_model_len:
            raise RequestRejected(
                f"{name} has {count} tokens: with one token of answer that is more than the "
                f"{worker.max_model_len} of {option_spec('max_model_len').flag}"
            )
        top = max(request.prompt_ids)
        if top >= worker.model.vocab_size:
            raise RequestRejected(
                f"{name} has token id {top}: the model's ids run from 0 to "
                f"{worker.model.vocab_size - 1}, so the tokenizer is not this model's"
            )


def _apply(
    event: Delta | Finished | Rejected, running: dict[int, _Open], engine: RequestChannel
) -> Iterator[Piece | Answer]:
    """Bring one event into the open requests; yield what the reader should see."""
    entry = running[event.request_id]
    match event:
        case Delta():
            text = entry.take(event.token_ids)
            if entry.search.found:
                del running[event.request_id]
                engine.abort(event.request_id)
            if text:
                yield entry.piece(text)
            if entry.search.found:
                yield _answer_of(entry, "stop", entry.first_token_s, entry.age_s())
        case Finished():
            del running[event.request_id]
            rest = entry.finish()
            if rest:
                yield entry.piece(rest)
            reason = "stop" if entry.search.found else event.reason
            yield _answer_of(entry, reason, event.first_token_s, event.total_s)
        case Rejected():
            del running[event.request_id]
            yield _answer_of(entry, "rejected", 0.0, 0.0, event.message)
        case _:
            raise AssertionError(f"the engine sent {type(event).__name__} for a request")


def _answer_of(
    entry: _Open, reason: str, first_token_s: float, total_s: float, error: str = ""
) -> Answer:
    return Answer(
        index=entry.request.index,
        prompt=entry.request.prompt,
        text="".join(entry.text),
        token_ids=tuple(entry.token_ids),
        finish_reason=reason,
        num_prompt_tokens=len(entry.request.prompt_ids),
        first_token_s=first_token_s,
        total_s=total_s,
        error=error,
    )
