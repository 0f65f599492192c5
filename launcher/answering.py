"""The one loop that turns prompts into answers; the command line, `LLM` and chat all drive it."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import unisono
from unisono.launcher.logprobs import TokenLogprob, read_logprobs
from unisono.launcher.text.stop_strings import StopSearch, StopStrings
from unisono.runtime.protocol import (
    Delta,
    EngineError,
    EngineReady,
    Finished,
    Rejected,
    SamplingParams,
    Tokens,
)
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import logprob_width

POLL_S = 0.5
"""Longest wait for an event before the engine looks after its processes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, tokenised. `index` is its place among the prompts of a call."""

    index: int
    prompt: str
    prompt_ids: tuple[int, ...]
    gives_ids: bool = False
    """The user gave `prompt_ids`, and `prompt` only spells them."""
    priority: int = 0
    """Lower goes first."""


def ids_request(index: int, prompt_ids: Sequence[int], priority: int = 0) -> Request:
    """A request for what follows `prompt_ids`, as they are."""
    spelt = " ".join(map(str, prompt_ids))
    return Request(
        index=index,
        prompt=spelt,
        prompt_ids=tuple(prompt_ids),
        gives_ids=True,
        priority=priority,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of one answer, never empty, and the tokens that came since the last piece.

    A character, or what may become a stop string, can span tokens: they come with the piece that
    shows it. Tokens after the last text (the one that ended the answer) are in the `Answer` only.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of `token_ids`, one each; None: not asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """As in the `Answer`, with its first piece only."""


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
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of `token_ids`, one each; None: not asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Of the prompt's tokens, one each, the first of them None: nothing predicts it. None: not
    asked for, or rejected."""
    numerics: str = ""
    """How it was computed (`numerics_of`): only answers that agree in it must agree in tokens."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, because an earlier request began with the same."""
    waited_s: float = 0.0
    """Of `total_s`, what the runtime spent waiting for the ranks; 0: not known."""
    drafted: tuple[int, ...] = ()
    """By place in a chain: drafts of it that were checked. Not known where a stop string ended the
    answer."""
    accepted: tuple[int, ...] = ()
    """Those of them that were right, each behind others that were."""
    num_replays: int = 0
    """Graphs that a rank had replayed by its end, for all requests; known as `drafted` is."""
    eager: tuple[tuple[str, int], ...] = ()
    """By reason: pieces of steps, forward or tail, that were no replays by then."""

    @property
    def token_s(self) -> float:
        """Seconds per token after the first; 0 where there is no second one."""
        later = len(self.token_ids) - 1
        return (self.total_s - self.first_token_s) / later if later > 0 else 0.0

    @property
    def digest(self) -> str:
        """32 hex digits over `numerics` and the tokens: equal on every machine or something is
        wrong. Text and times are not in it."""
        return digest_of(self.token_ids, self.numerics)


def digest_of(token_ids: Iterable[int], numerics: str) -> str:
    """Return 32 hex digits over tokens and how they were computed (`numerics_of`)."""
    tokens = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.blake2b(numerics.encode() + b"\0" + tokens, digest_size=16).hexdigest()


class RequestChannel(Protocol):
    """What the loop needs of an engine."""

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[Delta | Tokens | Finished | Rejected]: ...


class TokenStream(Protocol):
    """The text of one growing answer: a `Detokenizer`, or the ids themselves."""

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class TokenText(Protocol):
    """What the loop needs of a tokenizer."""

    def stream(self) -> TokenStream: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: Request
    params: SamplingParams
    tokenizer: TokenText
    words: TokenStream
    search: StopSearch
    sink: Callable[[Piece | Answer], None]
    whole: bool
    """Nobody reads along."""
    submitted_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_shown: int = 0
    """Tokens that pieces have carried so far."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Without the first token's."""

    @property
    def is_silent(self) -> bool:
        """Whether its text can wait for its end: nobody reads along, and it cannot end it."""
        return self.whole and not self.params.stop

    def take(self, token_ids: Sequence[int]) -> str:
        """Add tokens up to the one that completes a stop string; return the text to show."""
        if not self.token_ids:
            self.first_token_s = self.age_s()
        if self.is_silent:
            self.token_ids += token_ids
            return ""
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
        known = self.words.push(self.token_ids) if self.is_silent else ""
        rest = self.search.push(known + self.words.flush())
        rest += self.search.flush()
        self.text.append(rest)
        return rest

    def piece(self, text: str) -> Piece:
        """Return `text` with the tokens that no piece has carried."""
        first = self.num_shown
        self.num_shown = len(self.token_ids)
        return Piece(
            index=self.request.index,
            text=text,
            token_ids=tuple(self.token_ids[first:]),
            logprobs=self.logprobs_from(first),
            prompt_logprobs=self.all_prompt_logprobs() if first == 0 else None,
        )

    def logprobs_from(self, first: int) -> tuple[TokenLogprob, ...] | None:
        """Return those of the tokens from number `first` on; None: not asked for."""
        return None if self.params.logprobs is None else tuple(self.logprobs[first:])

    def all_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return those of the prompt; None: not asked for, or not known yet."""
        if self.params.prompt_logprobs is None or not self.token_ids:
            return None
        return None, *self.prompt_logprobs

    def age_s(self) -> float:
        return time.monotonic() - self.submitted_s

    def take_logprobs(self, news: Delta) -> None:
        """Add the log-probabilities of what was taken of `news`, and those of the prompt."""
        kept = self.token_ids[len(self.logprobs) :]
        if (num_top := self.params.logprobs) is not None:
            assert news.logprobs is not None, "log-probabilities were asked for"
            items = news.logprobs[: len(kept) * logprob_width(num_top)]
            self.logprobs += read_logprobs(kept, items, num_top, self.tokenizer.token_bytes)
        if (num_top := self.params.prompt_logprobs) is not None and news.prompt_logprobs:
            self.prompt_logprobs += read_logprobs(
                self.request.prompt_ids[1:],
                news.prompt_logprobs,
                num_top,
                self.tokenizer.token_bytes,
            )


class Answering:
    """The requests under way on one engine, whoever asked. For one thread.

    `numerics`: what the answers' digests say of how they were computed (`numerics_of`).
    """

    def __init__(self, engine: RequestChannel, tokenizer: TokenText, numerics: str = "") -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._numerics = numerics
        self._running: dict[int, _Open] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._running)

    def add(
        self,
        request: Request,
        params: SamplingParams,
        sink: Callable[[Piece | Answer], None],
        *,
        whole: bool = False,
    ) -> int:
        """Submit `request`; `sink` gets its pieces, unless it is to come `whole`, and then its
        answer. Returns its id."""
        search = StopStrings(params.stop).search()
        request_id = self._engine.submit(request.prompt_ids, params, request.priority)
        words = self._tokenizer.stream()
        self._running[request_id] = _Open(
            request, params, self._tokenizer, words, search, sink, whole
        )
        return request_id

    def drop(self, request_id: int) -> None:
        """Abort a request, unless it has ended."""
        if self._running.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def forget(self) -> None:
        """Drop every request without a word to the engine: it is lost."""
        self._running.clear()

    def step(self, timeout_s: float) -> None:
        """Hand out what arrives within `timeout_s`. Raises WorkerLost."""
        for event in self._engine.poll(timeout_s):
            # Events of an aborted request may still arrive.
            if isinstance(event, Tokens):
                for request_id, token_id in zip(event.request_ids, event.token_ids, strict=True):
                    if request_id in self._running:
                        self._take(request_id, (token_id,))
            elif event.request_id in self._running:
                self._apply(event)

    def _take(self, request_id: int, token_ids: Sequence[int], news: Delta | None = None) -> None:
        """Add tokens to an answer; `news`: they came with more than that."""
        entry = self._running[request_id]
        text = entry.take(token_ids)
        if news is not None:
            entry.num_cached_tokens = news.num_cached_tokens
            entry.take_logprobs(news)
        if entry.search.found:
            self.drop(request_id)
        if text and not entry.whole:
            entry.sink(entry.piece(text))
        if entry.search.found:
            self._answer(entry, "stop", entry.first_token_s, entry.age_s())

    def _apply(self, event: Delta | Finished | Rejected) -> None:
        entry = self._running[event.request_id]
        match event:
            case Delta():
                self._take(event.request_id, event.token_ids, event)
            case Finished():
                del self._running[event.request_id]
                rest = entry.finish()
                if rest and not entry.whole:
                    entry.sink(entry.piece(rest))
                reason = "stop" if entry.search.found else event.reason
                self._answer(entry, reason, event.first_token_s, event.total_s, event)
            case Rejected():
                del self._running[event.request_id]
                self._answer(entry, "rejected", 0.0, 0.0, error=event.message)
            case _:
                raise AssertionError(f"the engine sent {type(event).__name__} for a request")

    def _answer(
        self,
        entry: _Open,
        reason: str,
        first_token_s: float,
        total_s: float,
        end: Finished | None = None,
        error: str = "",
    ) -> None:
        known: dict[str, Any] = {}
        if end is not None:
            known = {
                "waited_s": end.waited_s,
                "drafted": tuple(end.drafted),
                "accepted": tuple(end.accepted),
                "num_replays": end.num_replays,
                "eager": end.eager,
            }
        entry.sink(
            Answer(
                index=entry.request.index,
                prompt=entry.request.prompt,
                text="".join(entry.text),
                token_ids=tuple(entry.token_ids),
                finish_reason=reason,
                num_prompt_tokens=len(entry.request.prompt_ids),
                first_token_s=first_token_s,
                total_s=total_s,
                error=error,
                logprobs=entry.logprobs_from(0),
                prompt_logprobs=entry.all_prompt_logprobs(),
                numerics=self._numerics,
                num_cached_tokens=entry.num_cached_tokens,
                **known,
            )
        )


def answer_all(
    engine: RequestChannel,
    tokenizer: TokenText,
    requests: Sequence[Request],
    params: SamplingParams,
    numerics: str = "",
    *,
    whole: bool = False,
) -> Generator[Piece | Answer, None, None]:
    """Submit every request and yield pieces as they come and one `Answer` per request.

    No pieces if the answers are to come `whole`.
    Pieces of different requests interleave; the concatenated pieces of a request are its answer.
    Leaving early (an exception, or closing the iterator) aborts what is still running. Raises
    WorkerLost.
    """
    answering = Answering(engine, tokenizer, numerics)
    news: deque[Piece | Answer] = deque()
    request_ids = []
    try:
        for request in requests:
            request_ids.append(answering.add(request, params, news.append, whole=whole))
        while answering.has_work:
            answering.step(POLL_S)
            while news:
                yield news.popleft()
    except EngineError:
        answering.forget()
        raise
    finally:
        for request_id in request_ids:
            answering.drop(request_id)


def numerics_of(ready: EngineReady, worker: WorkerConfig) -> str:
    """Name what an answer's bits may depend on: kind of device, dtype, rank count, attention,
    numerics, recurrent states, version."""
    kind = ready.device.partition(":")[0]
    states = f"states={worker.state_dtype} " if worker.model.is_hybrid else ""
    return (
        f"{kind} {ready.dtype} tp={worker.tp} attn={worker.attn} numerics={worker.numerics} "
        f"{states}unisono {unisono.__version__}"
    )
