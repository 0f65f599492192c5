"""The loop that decides: drain, plan, send, receive, apply, emit; and sleep between steps."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, defaultdict, deque
from functools import partial

from unisono.runtime.logprobs import take_prompt_logprobs
from unisono.runtime.protocol import (
    Abort,
    Crashed,
    Delta,
    EngineState,
    Finished,
    Order,
    Rejected,
    Reload,
    Replayed,
    RequestRejected,
    Rerun,
    Reschedule,
    Sleep,
    Stop,
    Submit,
    Tokens,
    Wake,
    WatchSteps,
    WorkerLost,
)
from unisono.runtime.request import Request
from unisono.runtime.scheduler import NewToken, Scheduler
from unisono.runtime.worker_group import WorkerGroup
from unisono.workers.channel import Hub, ProtocolError
from unisono.workers.protocol import LoadWeights, int32s

_IDLE_S = 0.25
"""How long an idle engine waits for a request before it looks after its ranks."""


class ToldToEnd(WorkerLost):
    """The launcher says that a process is gone; it needs no report."""


class Engine:
    """Serves the clients of `hub` with the ranks of `workers` until a client says Stop."""

    def __init__(
        self, hub: Hub, workers: WorkerGroup, scheduler: Scheduler, max_model_len: int
    ) -> None:
        self._hub = hub
        self._workers = workers
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._stopped = False
        self._in_flight: deque[int] = deque()
        self._news: list[NewToken] = []
        self._last_result_s = 0.0
        self._waited_s, self._wait_began = 0.0, math.inf
        self._num_replays, self._eager = 0, Counter[str]()
        self._orders: deque[tuple[str, Order]] = deque()
        self._sleep_level = 0
        workers.on_silence = partial(self._drain, 0.0)

    def run(self) -> None:
        """Serve. Raises WorkerLost (RankFault with the rank's own exception)."""
        try:
            self._serve()
        except WorkerLost:
            # What came before the end is heard before the end.
            self._tell()
            raise
        while self._in_flight:
            self._workers.receive(self._in_flight.popleft())
        self._workers.shutdown()

    def _serve(self) -> None:
        """Until a client has said Stop."""
        while True:
            if not self._is_busy:
                self._tell()
            self._drain()
            if self._stopped:
                break
            if self._orders:
                self._obey(*self._orders.popleft())
            elif self._is_busy:
                self._send_plans()
                self._tell()
                self._take_result()
            else:
                self._workers.check()

    @property
    def _is_busy(self) -> bool:
        """Whether there is something to do without a word from a client."""
        return bool(self._orders) or (self._scheduler.has_work and not self._sleep_level)

    def _send_plans(self) -> None:
        """Give the ranks what can be planned without the results that are due."""
        while (plan := self._scheduler.next_plan()) is not None:
            self._workers.send(plan)
            self._in_flight.append(plan.step)

    def _take_result(self) -> None:
        """Wait for the oldest step in flight. Who asked is told once the ranks have their plans."""
        self._wait_began = time.monotonic()
        result = self._workers.receive(self._in_flight.popleft())
        now = time.monotonic()
        self._waited_s += now - self._wait_began
        self._wait_began = math.inf
        # From result to result, unless the ranks had nothing to do in between.
        seconds = now - self._last_result_s if self._last_result_s else 0.0
        self._last_result_s = now if self._in_flight else 0.0
        self._num_replays = result.num_replays
        self._eager.update(result.eager)
        self._news += self._scheduler.apply(
            result.tokens, result.counts, result.logprobs, result.checksums, seconds
        )

    def _obey(self, client: str, order: Order) -> None:
        """Sleep, wake or take other weights, once the results in flight are in."""
        began = time.monotonic()
        while self._in_flight:
            self._take_result()
        self._tell()
        error: WorkerLost | None = None
        spent = self._workers.spent_s = {"steps in flight": time.monotonic() - began}
        match order:
            case Sleep(level=level) if level > self._sleep_level:
                self._workers.release(weights=level > 1)
                self._scheduler.restart()
                self._sleep_level = level
            case Wake() if self._sleep_level:
                error = self._wake()
            case Reload(path=path, load_format=load_format):
                error = self._reload(LoadWeights(path=path, load_format=load_format))
        said, level = "" if error is None else str(error), self._sleep_level
        spent["the rest"] = time.monotonic() - began - sum(spent.values())
        took = tuple(spent.items())
        self._hub.send(client, EngineState(level=level, error=said, took=took))

    def _wake(self) -> WorkerLost | None:
        """Take what was given back; why it sleeps on, if weights cannot be loaded."""
        if self._sleep_level > 1 and (error := self._workers.load(self._workers.weights)):
            self._workers.release(weights=True)
            return error
        taken = self._workers.allocated
        self._workers.allocate(taken.num_blocks, taken.num_states)
        self._sleep_level = 0
        return None

    def _reload(self, wanted: LoadWeights) -> WorkerLost | None:
        """Take other weights; why the former ones are back, if they cannot be loaded.

        Raises WorkerLost if those cannot be loaded either.
        """
        if self._sleep_level > 1:
            self._workers.weights = wanted
            return None
        self._scheduler.restart()
        error = self._workers.load(wanted)
        if error and (lost := self._workers.load(self._workers.weights)):
            raise lost
        return error

    def _drain(self, idle_s: float = _IDLE_S) -> None:
        """Take in what clients have sent; wait `idle_s` for it if there is nothing to do."""
        timeout = 0.0 if self._is_busy else idle_s
        while (received := self._hub.receive(timeout)) is not None:
            timeout = 0.0
            client, message = received
            match message:
                case Submit():
                    self._submit(client, message)
                    timeout = _IDLE_S if message.more else 0.0
                case Abort(request_id=request_id):
                    self._scheduler.abort(client, request_id)
                case Stop():
                    self._stopped = True
                    return
                case Rerun(plan=plan):
                    self._workers.send(plan)
                    tokens = self._workers.receive(plan.step).tokens
                    self._hub.send(client, Replayed(step=plan.step, tokens=tokens))
                case WatchSteps():
                    self._workers.on_seen = partial(self._hub.send, client)
                    self._workers.watch(message)
                case Reschedule() as limits:
                    assert limits.num_blocks <= self._workers.allocated.num_blocks, limits
                    while self._in_flight:  # rows in vain, of answers that have ended
                        self._take_result()
                    self._scheduler.reschedule(limits)
                    self._hub.send(client, limits)
                case Sleep() | Wake() | Reload():
                    self._orders.append((client, message))
                case Crashed(message=text):
                    raise ToldToEnd(text)
                case _:
                    raise ProtocolError(f"client {client} sent {type(message).__name__}")

    def _submit(self, client: str, message: Submit) -> None:
        room, now = self._max_model_len - len(message.prompt_ids), time.monotonic()
        request = Request(
            client=client,
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            params=message.params,
            max_tokens=min(message.params.max_tokens, room),
            arrived_s=now,
            waited_s=self._waited_s + max(now - self._wait_began, 0.0),
            priority=message.priority,
            checksums=message.checksums,
            rejects=message.rejects,
        )
        try:
            self._scheduler.add(request)
        except RequestRejected as error:
            self._hub.send(client, Rejected(request_id=message.request_id, message=str(error)))

    def _tell(self) -> None:
        """Pass on what came of the last steps; what are only tokens in one message a client."""
        told, self._news = self._news, []
        now, plain = time.monotonic(), defaultdict[str, list[NewToken]](list)
        for news in told:
            request = news.request
            if not request.is_watched and request.first_token_s:
                plain[request.client].append(news)
                continue
            request.first_token_s = request.first_token_s or now - request.arrived_s
            self._hub.send(
                request.client,
                Delta(
                    request_id=request.request_id,
                    token_ids=int32s([news.token_id]),
                    logprobs=news.logprobs,
                    prompt_logprobs=take_prompt_logprobs(request),
                    num_cached_tokens=request.num_cached_tokens,
                    checksums=None if news.checksum is None else array("q", [news.checksum]),
                ),
            )
        for client, tokens in plain.items():
            request_ids = array("q", [news.request.request_id for news in tokens])
            token_ids = int32s([news.token_id for news in tokens])
            self._hub.send(client, Tokens(request_ids=request_ids, token_ids=token_ids))
        for news in told:
            if news.reason is not None:
                self._end(news.request, news.reason, now)

    def _end(self, request: Request, reason: str, now: float) -> None:
        self._hub.send(
            request.client,
            Finished(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_tokens=request.num_answered,
                first_token_s=request.first_token_s,
                total_s=now - request.arrived_s,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                drafted=request.drafted,
                accepted=request.accepted,
                waited_s=self._waited_s - request.waited_s,
                num_replays=self._num_replays,
                eager=tuple(self._eager.items()),
            ),
        )
