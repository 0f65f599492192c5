"""The parts of the runtime that note what they do, for `--trace`. Without it none of this runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.runtime.config import RuntimeOrders
from unisono.runtime.engine import Engine
from unisono.runtime.protocol import Order, Submit
from unisono.runtime.request import Request
from unisono.runtime.scheduler import NewToken, Scheduler
from unisono.runtime.worker_group import WorkerGroup
from unisono.workers.protocol import StepPlan, StepResult
from unisono.workers.timeline import Kind, Timeline, name_of, now, open_ring

RUNTIME = "runtime"
"""The name of its ring."""


class Parts(NamedTuple):
    """What makes the parts of a runtime; arguments are those of the classes."""

    engine: Callable[..., Engine] = Engine
    workers: Callable[..., WorkerGroup] = WorkerGroup
    scheduler: Callable[..., Scheduler] = Scheduler


def parts_for(orders: RuntimeOrders) -> Parts:
    """The plain parts, or those that note what they do, if the orders say where."""
    timeline = open_ring(orders.timeline_dir, RUNTIME)
    if timeline is None:
        return Parts()
    return Parts(
        partial(TimedEngine, timeline),
        partial(TimedGroup, timeline),
        partial(TimedScheduler, timeline),
    )


class TimedEngine(Engine):
    """Notes requests, orders, and each result from waiting for it to the last word of it."""

    def __init__(self, timeline: Timeline, *parts: Any) -> None:
        super().__init__(*parts)
        self._timeline = timeline

    def _take_result(self) -> None:
        began, step = now(), self._in_flight[0]
        super()._take_result()
        self._timeline.span(Kind.RESULT, began, step)

    def _obey(self, client: str, order: Order) -> None:
        began = now()
        super()._obey(client, order)
        self._timeline.span(Kind.OBEY, began, self._timeline.text(name_of(order)))

    def _submit(self, client: str, message: Submit) -> None:
        began = now()
        super()._submit(client, message)
        numbers = message.request_id, len(message.prompt_ids)
        self._timeline.span(Kind.ARRIVE, began, *numbers)


class TimedGroup(WorkerGroup):
    """Notes how long plans take to be sent and results are waited for."""

    def __init__(self, timeline: Timeline, *parts: Any) -> None:
        super().__init__(*parts)
        self._timeline = timeline

    def send(self, plan: StepPlan) -> None:
        began = now()
        super().send(plan)
        self._timeline.span(Kind.SEND, began, plan.step)

    def receive(self, step: int) -> StepResult:
        began = now()
        try:
            return super().receive(step)
        finally:
            self._timeline.span(Kind.WAIT, began, step)


class TimedScheduler(Scheduler):
    """Notes decisions and how long they take, and the load after each plan."""

    def __init__(self, timeline: Timeline, **options: Any) -> None:
        super().__init__(**options)
        self._timeline = timeline

    def next_plan(self) -> StepPlan | None:
        began = now()
        plan = super().next_plan()
        if plan is not None:
            self._timeline.span(Kind.PLAN, began, plan.step, len(plan.rows), sum(plan.rows.count))
            used = self.ledger.num_blocks - self.ledger.num_free
            self._timeline.moment(Kind.LOAD, len(self._running), len(self._waiting), used)
        return plan

    def apply(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] = (),
        logprobs: array[int] | None = None,
        checksums: Sequence[int] | None = None,
        seconds: float = 0.0,
    ) -> list[NewToken]:
        began, step = now(), self._flights[0].step
        news = super().apply(tokens, counts, logprobs, checksums, seconds)
        self._timeline.span(Kind.APPLY, began, step, len(news))
        return news

    def abort(self, client: str, request_id: int) -> None:
        self._timeline.moment(Kind.ABORT, request_id)
        super().abort(client, request_id)

    def _admit(self) -> list[Request]:
        opened = super()._admit()
        for request in opened:
            if request.num_computed:
                self._timeline.moment(Kind.PREFIX_HIT, request.request_id, request.num_computed)
        return opened

    def _pre_empt(self, request: Request) -> None:
        self._timeline.moment(Kind.PREEMPT, request.request_id, request.num_tokens)
        super()._pre_empt(request)
