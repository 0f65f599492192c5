"""What `unisono verify` needs of an engine, inside one process: ranks are threads of the rig."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.rig import CPU, LocalEngine
from unisono.launcher.verify.bisect import Watch
from unisono.launcher.verify.run import Channel
from unisono.ops.by_reference import with_references
from unisono.ops.table import Ops
from unisono.runtime.logprobs import take_prompt_logprobs
from unisono.runtime.protocol import (
    Delta,
    EngineState,
    Finished,
    Order,
    Rejected,
    Reload,
    Reschedule,
    SamplingParams,
    Sleep,
    Tokens,
    Wake,
)
from unisono.runtime.request import Request
from unisono.runtime.sampling_wire import with_seed
from unisono.runtime.scheduler import Scheduler
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.tracer import Tracer

Fault = Callable[[int, Ops], Mapping[str, Any]]
"""From a rank and its ops to those it has instead."""


class RigChannel:
    """A scheduler and thread ranks behind `submit` and `poll`."""

    def __init__(self, engine: LocalEngine, reloaded: Path | None = None) -> None:
        self._engine, self._reloaded = engine, reloaded
        self.states: deque[EngineState] = deque()
        self._scheduler = Scheduler(eos_token_ids=(), **engine._scheduling)
        self._num_requests = 0

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        checksums: bool = False,
        more: bool = False,
    ) -> int:
        request = Request(
            client="test",
            request_id=self._num_requests,
            prompt_ids=array("i", prompt_ids),
            params=with_seed(params),
            max_tokens=params.max_tokens,
            arrived_s=0.0,
            checksums=checksums,
        )
        self._num_requests += 1
        self._scheduler.add(request)
        return request.request_id

    def reschedule(self, limits: Reschedule) -> None:
        assert limits.num_blocks <= self._engine._scheduling["num_blocks"]
        self._scheduler.reschedule(limits)

    def order(self, wanted: Order) -> None:
        self._scheduler.restart()
        match wanted:
            case Sleep(level=level):
                self._engine.sleep()
                self.states.append(EngineState(level=level))
                return
            case Wake():
                self._engine.wake()
            case Reload():
                self._engine.reload(self._reloaded)
        self.states.append(EngineState())

    def poll(self, timeout_s: float) -> list[Delta | Tokens | Finished | Rejected]:
        if self.states:
            return []
        plan = self._scheduler.next_plan()
        assert plan is not None
        output, _ = self._engine.step(plan)
        events: list[Delta | Tokens | Finished | Rejected] = []
        for news in self._scheduler.apply(
            output.tokens, output.counts, output.logprobs, output.checksums
        ):
            request = news.request
            number, token = request.request_id, array("i", [news.token_id])
            events.append(
                Delta(
                    request_id=number,
                    token_ids=token,
                    logprobs=news.logprobs,
                    prompt_logprobs=take_prompt_logprobs(request),
                    checksums=None if news.checksum is None else array("q", [news.checksum]),
                )
                if request.is_watched or request.num_answered == 1
                else Tokens(request_ids=array("q", [number]), token_ids=token)
            )
            if news.reason:
                events.append(
                    Finished(
                        request_id=request.request_id,
                        reason=news.reason,
                        num_prompt_tokens=request.num_prompt_tokens,
                        num_tokens=request.num_answered,
                        first_token_s=0.0,
                        total_s=0.0,
                        num_cached_tokens=request.num_cached_tokens,
                        num_preemptions=request.num_preemptions,
                        num_replays=self._engine.ranks[0].pool.num_replays,
                        drafted=request.drafted,
                    )
                )
        return events


def opener(
    checkpoint: Path,
    fault: Fault = lambda rank, ops: {},
    overlay: str = "",
    device: torch.device = CPU,
    reloaded: Path | None = None,
) -> Callable[[Mapping[str, Any], Watch | None], Any]:
    """Return what opens engines of `checkpoint` whose ranks have `fault`.

    `reloaded`: what they load where the same weights are wanted.
    """

    @contextmanager
    def open_engine(options: Mapping[str, Any], watch: Watch | None = None) -> Iterator[Channel]:
        def ops_of(rank: int, ops: Ops) -> Ops:
            faulty = replace(ops, **fault(rank, ops))
            return with_references(faulty, () if watch is None else watch.reference_ops)

        def tracer_of(rank: int) -> Tracer | None:
            if watch is None:
                return None
            return Tracer(watch.trace_dir, rank, values=watch.trace_values)

        yield RigChannel(
            LocalEngine(
                checkpoint,
                tp=options["tp"],
                dtype=options["dtype"],
                max_model_len=options["max_model_len"],
                num_blocks=-(-options["kv_tokens"] // BLOCK_SIZE),
                max_requests=options["max_requests"],
                max_step_tokens=options["max_step_tokens"],
                overlay=overlay,
                device=device,
                graphs=not options["no_graphs"],
                num_drafts=0 if options["speculate"] == "off" else int(options["speculate"]),
                ops_of=ops_of,
                tracer_of=tracer_of,
            ),
            reloaded,
        )

    return open_engine
