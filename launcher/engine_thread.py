"""One thread drives an engine; any number of threads and coroutines wait for its answers."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono.launcher.answering import Answer, Answering, Piece, Request, TokenText
from unisono.runtime.protocol import (
    EngineError,
    EngineState,
    Order,
    SamplingParams,
)

if TYPE_CHECKING:
    from unisono.launcher.engine_client import Engine

BUSY_POLL_S = 0.01
"""Longest time that a new request waits for the thread while others run."""

CLOSED = "the engine was closed while an answer was wanted"

News = Piece | Answer | Exception
StateSink = Callable[[EngineState | Exception], None]
"""Called once in the engine's thread: how the engine is after an order, or what went wrong."""


@dataclass(slots=True, eq=False)
class Job:
    """Requests that were submitted together, and who hears of them.

    `sink` is called in the engine's thread with each piece and answer, or once with what went
    wrong; it must return at once and raise nothing.
    """

    requests: Sequence[Request]
    params: SamplingParams
    sink: Callable[[News], None]
    whole: bool = False
    """Answers alone, without pieces."""
    request_ids: list[int] = field(default_factory=list)
    """Known to the engine's thread only."""


class EngineThread:
    """Owns a started engine: nobody else may call it. All methods are safe from any thread."""

    def __init__(self, engine: Engine, tokenizer: TokenText, numerics: str) -> None:
        self._engine = engine
        self._answering = Answering(engine, tokenizer, numerics)
        self._jobs: set[Job] = set()
        self._ordered: deque[StateSink] = deque()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        """Nothing is ordered after the thread was told to end."""
        self._closed = self._closes_engine = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Start the requests of `job`; those of several jobs share the engine's steps.

        Raises EngineError if the engine was closed.
        """
        with self._lock:
            if self._closed:
                raise EngineError(CLOSED)
            self._orders.put(lambda: self._start(job))

    def drop(self, job: Job) -> None:
        """Abort what still runs of `job`, once; its sink may hear a last word."""
        self._orders.put(lambda: self._end(job))

    def order(self, wanted: Order, sink: StateSink) -> None:
        """Have the engine sleep, wake or take other weights, whatever runs.

        Raises EngineError if the engine was closed.
        """
        with self._lock:
            if self._closed:
                raise EngineError(CLOSED)
            self._orders.put(lambda: self._begin(wanted, sink))

    def close(self) -> None:
        """Stop the thread and close the engine; who still waits gets an EngineError."""
        # Garbage is collected in any thread: this one cannot wait for itself.
        self._closes_engine = threading.current_thread() is self._thread
        with self._lock:
            self._closed = True
            self._orders.put(None)
        if self._closes_engine:
            return
        self._thread.join()
        self._engine.close()

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(block=not (self._answering.has_work or self._ordered))
            except queue.Empty:
                self._step()
                continue
            if order is None:
                break
            order()
        self._fail(EngineError(CLOSED))
        if self._closes_engine:
            self._engine.close()

    def _start(self, job: Job) -> None:
        self._jobs.add(job)
        try:
            for request in job.requests:
                job.request_ids.append(
                    self._answering.add(request, job.params, job.sink, whole=job.whole)
                )
        except Exception as error:
            self._end(job)
            job.sink(error)

    def _end(self, job: Job) -> None:
        self._jobs.discard(job)
        for request_id in job.request_ids:
            self._answering.drop(request_id)

    def _begin(self, wanted: Order, sink: StateSink) -> None:
        self._ordered.append(sink)
        try:
            self._engine.order(wanted)
        except Exception as error:
            self._fail(error)

    def _step(self) -> None:
        try:
            self._answering.step(BUSY_POLL_S)
            while self._ordered and self._engine.states:
                self._ordered.popleft()(self._engine.states.popleft())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._answering.forget()
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            # To each its own: a traceback grows where an error is raised again.
            job.sink(copy(error) if isinstance(error, EngineError) else error)
        while self._ordered:
            self._ordered.popleft()(error)
