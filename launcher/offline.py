"""`LLM`: a model in a script.

    from unisono import LLM, SamplingParams

    with LLM("demo", tp=2) as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
        print(answer.text)

Every method that answers has a twin for coroutines: `agenerate`, `achat`, `astream`; the twins of
`sleep`, `wake` and `reload_weights` end in `_async`, for `asleep` and `awake` would read as states.
The ranks are processes of their own program, so a script needs no `__main__` guard.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from unisono.launcher.answering import (
    Answer,
    Piece,
    Request,
    ids_request,
    numerics_of,
)
from unisono.launcher.cluster import detect_cluster
from unisono.launcher.engine_client import Engine
from unisono.launcher.engine_thread import EngineThread, Job, News
from unisono.launcher.model_source import name_of
from unisono.launcher.options import check_sampling_params, option_spec
from unisono.launcher.pause import Pause
from unisono.launcher.prompts import check_prompts
from unisono.launcher.reload import reload_order
from unisono.launcher.resolve import prepare, with_tokenizer
from unisono.launcher.text.ids_only import IdsOnly, check_text_params
from unisono.launcher.text.tokenizer import Tokenizer
from unisono.launcher.timed import TimedEngine, text_for
from unisono.models.config import ConfigError
from unisono.models.headers import CheckpointError
from unisono.runtime.protocol import (
    EngineState,
    Order,
    SamplingParams,
    Sleep,
    Wake,
)

__all__ = ["LLM", "Answer", "AsyncStream", "Pause", "Piece", "SamplingParams", "Stream"]

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int]
"""A text, or token ids, which are taken as they are."""


class LLM:
    """A model on 1 to N ranks, used from a script. A context manager.

    Options are those of `unisono generate`, by field name: tp, dtype, device, attn, numerics,
    collectives, load_format, overlay, max_model_len, max_requests, kv_tokens, memory_utilization,
    state_slots, state_dtype, speculate, accept, max_step_tokens, no_prefix_cache, no_graphs,
    graph_buckets, capture, random_padding, log_level, start_timeout_s, stop_grace_s, flight_dir,
    trace; others are refused. The constructor checks all that a user can get wrong and raises
    ConfigError; the ranks start with the `with` block, or with the first prompt. The file of
    `trace` is written when they stop, and written anew where they are started again.

    Safe to use from several threads and coroutines at a time: the engine is driven by a thread of
    its own, which batches all that is asked, and no answer depends on what else runs. `close` ends
    the answers that others wait for with an EngineError.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        cluster = detect_cluster(os.environ)
        if cluster is not None and cluster.world_size > 1:
            raise ConfigError(
                f"LLM starts its own ranks, and {cluster.launcher} started this script "
                f"{cluster.world_size} times: run it alone with tp={cluster.world_size}, or use "
                "unisono generate"
            )
        name = name_of(model)
        prepared = prepare(name, options, os.environ)
        self._tokenizer: Tokenizer | IdsOnly = (
            Tokenizer.load(prepared.source)
            if prepared.has_tokenizer
            else IdsOnly(name, prepared.worker.model.vocab_size)
        )
        self._config = with_tokenizer(
            prepared.launch, self._tokenizer.size, self._tokenizer.eos_ids
        )
        self._lock = threading.RLock()
        """Held while the ranks start or stop."""
        self._engine: EngineThread | None = None
        self._end: weakref.finalize[..., LLM] | None = None

    def __enter__(self) -> LLM:
        self._started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> list[Answer]:
        """Continue each prompt as it is, without a chat template; answers in prompt order.

        A prompt is a text or a sequence of token ids; a model without a tokenizer takes ids only,
        and the text of its answers is their ids. Requests of lower `priority` go first. That
        changes when an answer comes, never which.

        Raises RequestRejected before anything is computed if a prompt is empty or too long or
        holds an id that the model has not, and ConfigError for illegal `params` or prompts of
        another kind. A prompt that the engine itself refuses gets an answer whose `finish_reason`
        is rejected.
        """
        requests = self._checked(self._texts(prompts), params, priority)
        return _in_order(list(self._news(requests, params, whole=True)))

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Answer:
        """Answer one conversation through the model's chat template. Raises like `generate`."""
        requests = self._checked([self._conversation(messages)], params, priority)
        [answer] = _in_order(list(self._news(requests, params, whole=True)))
        return answer

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Stream:
        """Answer a text or ids as `generate` does, or messages as `chat` does, piece by piece.

        Raises like them at once; the request starts with the first `next`. Closing the stream
        aborts it.
        """
        requests = self._checked([self._prompt(prompt)], params, priority)
        return Stream(self._news(requests, params, whole=False))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> list[Answer]:
        """Like `generate`; cancelling aborts what still runs."""
        requests = self._checked(self._texts(prompts), params, priority)
        async with aclosing(self._anews(requests, params, whole=True)) as news:
            return _in_order([event async for event in news])

    async def achat(
        self, messages: Messages, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Answer:
        """Like `chat`; cancelling aborts the answer."""
        requests = self._checked([self._conversation(messages)], params, priority)
        async with aclosing(self._anews(requests, params, whole=True)) as news:
            [answer] = _in_order([event async for event in news])
            return answer

    def astream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncStream:
        """Like `stream`. Leave it through `async with`, or `aclose`, to abort at once."""
        requests = self._checked([self._prompt(prompt)], params, priority)
        return AsyncStream(self._anews(requests, params, whole=False))

    def sleep(self, level: int = 1) -> Pause:
        """Give memory back until `wake`; return, once it is free, how long that took.

        Level 1 gives back the KV cache and the recurrent states; level 2 the weights too. What
        runs loses its place and keeps its tokens, what is asked meanwhile waits: `wake` has them
        answered, with the same bits. An LLM that sleeps goes deeper where `level` is, and stays
        as it is otherwise. Safe to call from any thread. Raises ConfigError for another level,
        and WorkerLost.
        """
        if type(level) is not int or level not in (1, 2):
            raise ConfigError(
                f"sleep level {level!r}: choose 1 (give back the KV cache and recurrent states) or "
                "2 (the weights too)"
            )
        return self._order(Sleep(level=level))

    def wake(self) -> Pause:
        """Take the memory again and go on; return how long that took. Nothing where it is awake.

        After level 2 the weights are read again, from the model or what `reload_weights` named
        last. Raises CheckpointError if they cannot be, and sleeps on; and WorkerLost.
        """
        return self._order(Wake())

    def reload_weights(self, path: str | os.PathLike[str]) -> Pause:
        """Take the weights of another checkpoint of the same architecture and shapes, in place.

        `path` names it as a model is named. Tokens that were answered stay; what runs goes on
        from them with the new weights, as if prompt and answer so far had been computed with
        these: no cached prefix, no KV and no state of the old ones is used. With the weights that
        are there already no answer changes. The old ones are freed before the new ones are read.
        A sleeping LLM sleeps on; after level 2 they are read when it wakes. Where `close` was
        called, the next prompt starts with the model's own again. Returns how long it took.

        Raises CheckpointError, in one line, for weights that are missing, damaged or of another
        model: then the old ones serve on, and no answer changes. Raises WorkerLost.
        """
        return self._order(reload_order(name_of(path), self._config.runtime.worker))

    async def sleep_async(self, level: int = 1) -> Pause:
        """Like `sleep`; cancelling leaves the engine to do it."""
        return await asyncio.to_thread(self.sleep, level)

    async def wake_async(self) -> Pause:
        """Like `wake`; cancelling leaves the engine to do it."""
        return await asyncio.to_thread(self.wake)

    async def reload_weights_async(self, path: str | os.PathLike[str]) -> Pause:
        """Like `reload_weights`; cancelling leaves the engine to do it."""
        return await asyncio.to_thread(self.reload_weights, path)

    def close(self) -> None:
        """Stop the ranks. Safe to call twice; the next prompt starts them again."""
        with self._lock:
            end, self._engine, self._end = self._end, None, None
        if end is not None:
            end()

    def _texts(self, prompts: Prompt | Sequence[Prompt]) -> list[Request]:
        one = isinstance(prompts, str) or _is_ids(prompts)
        return [
            self._text_or_ids(prompt, index)
            for index, prompt in enumerate([prompts] if one else prompts)
        ]

    def _prompt(self, prompt: Prompt | Messages) -> Request:
        if isinstance(prompt, str) or _is_ids(prompt):
            return self._text_or_ids(prompt, 0)
        return self._conversation(cast(Messages, prompt))

    def _text_or_ids(self, prompt: object, index: int) -> Request:
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and _is_ids(prompt):
            return ids_request(index, prompt)
        if not isinstance(prompt, str):
            raise ConfigError(
                f"prompt {index + 1} is a {type(prompt).__name__}: choose a text or a list of "
                "token ids"
            )
        ids = self._tokenizer.encode(prompt)
        return Request(index=index, prompt=prompt, prompt_ids=tuple(ids))

    def _conversation(self, messages: Messages) -> Request:
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the model has no chat template: use generate()")
        if not messages:
            raise ConfigError("chat() needs at least one message")
        ids = self._tokenizer.chat_ids(messages)
        return Request(index=0, prompt=messages[-1]["content"], prompt_ids=tuple(ids))

    def _checked(
        self, requests: Sequence[Request], params: SamplingParams | None, priority: int
    ) -> Sequence[Request]:
        option_spec("priority").check(priority)
        worker = self._config.runtime.worker
        params = SamplingParams() if params is None else params
        check_sampling_params(params, worker.model)
        check_text_params(params, self._tokenizer)
        check_prompts(requests, worker, params.max_tokens)
        return [replace(request, priority=priority) for request in requests]

    def _news(
        self, requests: Sequence[Request], params: SamplingParams | None, *, whole: bool
    ) -> Generator[Piece | Answer, None, None]:
        """Submit the requests and yield their events; answers alone if `whole`."""
        inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        job = _job(requests, params, inbox.put, whole=whole)
        engine = self._started()
        try:
            engine.submit(job)
            left = len(requests)
            while left:
                event = _or_raise(inbox.get())
                left -= isinstance(event, Answer)
                yield event
        finally:
            engine.drop(job)

    async def _anews(
        self, requests: Sequence[Request], params: SamplingParams | None, *, whole: bool
    ) -> AsyncGenerator[Piece | Answer, None]:
        """`_news` for coroutines."""
        inbox: asyncio.Queue[News] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(news: News) -> None:
            # Where the event loop is closed, nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(inbox.put_nowait, news)

        job = _job(requests, params, put, whole=whole)
        engine = await asyncio.to_thread(self._started)
        try:
            engine.submit(job)
            left = len(requests)
            while left:
                event = _or_raise(await inbox.get())
                left -= isinstance(event, Answer)
                yield event
        finally:
            engine.drop(job)

    def _order(self, wanted: Order) -> Pause:
        """Have the engine obey, and wait until it has."""
        answers: queue.SimpleQueue[EngineState | Exception] = queue.SimpleQueue()
        self._started().order(wanted, answers.put)
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        if answer.error:
            raise CheckpointError(answer.error)
        return Pause.of(answer, self._config.start_timeout_s)

    def _started(self) -> EngineThread:
        with self._lock:
            if self._engine is None:
                engine = (TimedEngine if self._config.trace else Engine)(self._config)
                engine.__enter__()
                # A script may end, or drop its LLM, without closing it.
                self._end = weakref.finalize(self, engine.close)
                try:
                    ready = engine.start(lambda news: None)
                except BaseException:
                    self.close()
                    raise
                numerics = numerics_of(ready, self._config.runtime.worker)
                self._engine = EngineThread(engine, text_for(engine, self._tokenizer), numerics)
                self._end.detach()
                self._end = weakref.finalize(self, self._engine.close)
            return self._engine


class Stream(Iterator[Piece]):
    """The pieces of one answer as they come; `answer` is the whole of it once they have ended.

    A context manager. For one thread at a time.
    """

    def __init__(self, events: Generator[Piece | Answer, None, None]) -> None:
        self._events = events
        self.answer: Answer | None = None

    def __next__(self) -> Piece:
        event = next(self._events)
        if isinstance(event, Answer):
            self.answer = event
            return next(self)
        return event

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        self._events.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[Piece]):
    """`Stream` for one coroutine."""

    def __init__(self, events: AsyncGenerator[Piece | Answer, None]) -> None:
        self._events = events
        self.answer: Answer | None = None

    async def __anext__(self) -> Piece:
        event = await anext(self._events)
        if isinstance(event, Answer):
            self.answer = event
            return await anext(self)
        return event

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _job(
    requests: Sequence[Request],
    params: SamplingParams | None,
    put: Callable[[News], None],
    *,
    whole: bool,
) -> Job:
    params = SamplingParams() if params is None else params
    return Job(requests=requests, params=params, sink=put, whole=whole)


def _is_ids(prompt: Sequence[object]) -> bool:
    """Whether these are token ids, at least one."""
    return len(prompt) > 0 and all(type(token) is int for token in prompt)


def _or_raise(news: News) -> Piece | Answer:
    if isinstance(news, Exception):
        raise news
    return news


def _in_order(events: Sequence[Piece | Answer]) -> list[Answer]:
    answers = [event for event in events if isinstance(event, Answer)]
    return sorted(answers, key=lambda answer: answer.index)
