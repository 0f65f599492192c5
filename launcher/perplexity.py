"""The perplexity of a text: sliding windows over its tokens, each a request to the engine.

The definition is that of the transformers documentation: windows of a fixed length start every
`stride` tokens until one reaches the end, and of each window those tokens count that no earlier
window held. A token that begins its window has nothing before it and never counts.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from unisono.launcher.answering import (
    POLL_S,
    Answer,
    Answering,
    Piece,
    Request,
    RequestChannel,
    TokenText,
)
from unisono.launcher.prompts import wanted_kv_tokens, whole_blocks
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError, RequestRejected, SamplingParams
from unisono.workers.config import WorkerConfig

DEFAULT_WINDOW = 2048
LEAST_WINDOW = 2

_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Tokens [start, stop) of a text, of which those from `first` on count."""

    start: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """What was measured. `nll` is in nats, the sum over the `tokens` that count."""

    nll: float
    tokens: int
    num_bytes: int
    """Of the whole text in UTF-8."""
    digest: str
    """32 hex digits over how it was computed and the bits of every log-probability."""

    @property
    def ppl(self) -> float:
        """e to the mean negative log-likelihood; infinite where the model rules a token out."""
        try:
            return math.exp(self.nll / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for the text, over the text's bytes."""
        return self.nll / math.log(2) / self.num_bytes


def check_windows(window: int | None, stride: int | None) -> None:
    """Raise ConfigError for what is illegal whatever the model is."""
    if window is not None and window < LEAST_WINDOW:
        raise ConfigError(f"--window {window}: must be at least {LEAST_WINDOW}")
    if stride is not None and stride < 1:
        raise ConfigError(f"--stride {stride}: must be at least 1")
    if window is not None and stride is not None and stride > window:
        raise ConfigError(f"--stride {stride}: must be at most --window, {window}")


def resolve_windows(
    window: int | None, stride: int | None, worker: WorkerConfig
) -> tuple[int, int]:
    """Return window and stride, those not given by their defaults. Raises ConfigError.

    The engine needs room for one token of answer beside a window.
    """
    check_windows(window, stride)
    most = worker.max_model_len - 1
    if most < LEAST_WINDOW:
        raise ConfigError(
            f"--max-model-len {worker.max_model_len}: a window of {LEAST_WINDOW} tokens and one "
            f"of answer need at least {LEAST_WINDOW + 1}"
        )
    if window is not None and window > most:
        raise ConfigError(
            f"--window {window}: with one token of answer that is more than the "
            f"{worker.max_model_len} of --max-model-len; choose {LEAST_WINDOW} to {most}"
        )
    chosen = min(most, DEFAULT_WINDOW) if window is None else window
    check_windows(chosen, stride)
    return chosen, chosen // 2 if stride is None else stride


def sliding_windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Cut a text into windows; together their counting tokens are all but the first of the text.

    With `stride` == `window` nothing overlaps, and the first token of each window is left out.
    """
    done = 0
    for start in range(0, num_tokens, stride):
        stop = min(start + window, num_tokens)
        yield Window(start=start, first=max(start + 1, done), stop=stop)
        done = stop
        if stop == num_tokens:
            return


def windows_held(
    num_tokens: int, window: int, stride: int, worker: WorkerConfig
) -> Sequence[Window]:
    """All `sliding_windows`. Raises ConfigError if a KV cache of the size that was asked for cannot
    hold one."""
    longest = min(window, num_tokens)
    if wanted := wanted_kv_tokens(longest, worker):
        raise ConfigError(
            f"--kv-tokens {worker.kv_tokens}: a window has {longest} tokens; choose {wanted} or "
            f"more, or a --window of {LEAST_WINDOW} to {whole_blocks(worker.kv_tokens)}"
        )
    return list(sliding_windows(num_tokens, window, stride))


def measure(
    engine: RequestChannel,
    tokenizer: TokenText,
    token_ids: Sequence[int],
    windows: Sequence[Window],
    *,
    in_flight: int,
    num_bytes: int,
    numerics: str,
    on_windows: Callable[[int], None],
) -> Perplexity:
    """Ask for every window, `in_flight` at a time; `on_windows` hears how many are done.

    The result depends on the log-probabilities alone, not on the order they arrive in. Raises
    WorkerLost, and RequestRejected for a window that the engine can never hold.
    """
    logprobs = array("f", bytes(4 * len(token_ids)))
    # Requests are aborted here at the latest: the caller closes the engine next.
    with closing(_answers(engine, tokenizer, token_ids, windows, in_flight)) as answers:
        for finished, answer in enumerate(answers, start=1):
            if answer.prompt_logprobs is None:
                raise RequestRejected(f"a window cannot be served: {answer.error}")
            window = windows[answer.index]
            for place in range(window.first, window.stop):
                entry = answer.prompt_logprobs[place - window.start]
                assert entry is not None, "only the first token of a prompt has none"
                logprobs[place] = entry.logprob
            on_windows(finished)
    counted = [place for window in windows for place in range(window.first, window.stop)]
    return Perplexity(
        # The exact sum, rounded once.
        nll=-math.fsum(logprobs[place] for place in counted),
        tokens=len(counted),
        num_bytes=num_bytes,
        digest=_digest(numerics, windows, logprobs),
    )


def _answers(
    engine: RequestChannel,
    tokenizer: TokenText,
    token_ids: Sequence[int],
    windows: Sequence[Window],
    in_flight: int,
) -> Generator[Answer, None, None]:
    answering = Answering(engine, tokenizer)
    news: deque[Piece | Answer] = deque()
    waiting = iter(enumerate(windows))
    running: dict[int, int] = {}
    try:
        while True:
            for index, window in itertools.islice(waiting, in_flight - len(running)):
                ids = tuple(token_ids[window.start : window.stop])
                request = Request(index=index, prompt="", prompt_ids=ids, gives_ids=True)
                running[index] = answering.add(request, _PARAMS, news.append, whole=True)
            if not running:
                return
            answering.step(POLL_S)
            while news:
                event = news.popleft()
                if isinstance(event, Answer):
                    del running[event.index]
                    yield event
    except EngineError:
        answering.forget()
        raise
    finally:
        for request_id in running.values():
            answering.drop(request_id)


def _digest(numerics: str, windows: Sequence[Window], logprobs: array[float]) -> str:
    # Where windows begin decides what each token is predicted from.
    places = array("q", [n for window in windows for n in (window.start, window.stop)])
    if sys.byteorder == "big":
        places.byteswap()
        logprobs = array("f", logprobs)
        logprobs.byteswap()
    content = numerics.encode() + b"\0" + places.tobytes() + logprobs.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
