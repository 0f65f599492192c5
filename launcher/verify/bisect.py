"""Finds the op at fault: runs the two settings again with every op watched, and compares."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.launcher.trace import (
    Parting,
    RankTrace,
    read_trace,
    where_bits_part,
    where_ranks_part,
)
from unisono.launcher.verify.bounds import RANK_TOLERANCE, rank_bound
from unisono.launcher.verify.compare import Verdict, with_margin
from unisono.launcher.verify.plan import Setting, engine_options, interruptions, limits
from unisono.launcher.verify.run import NUM_TOP, Answer, Channel, ask, order_of, params_of
from unisono.launcher.verify.task import Task
from unisono.runtime.protocol import EngineError

KV_CACHE = "kv_cache"
"""What a trace calls cached keys and values: they have no reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How ranks are watched: fields of WorkerConfig of the same names."""

    trace_dir: str
    trace_values: bool = False
    reference_ops: tuple[str, ...] = ()


OpenWatched = Callable[[Mapping[str, Any], Watch], AbstractContextManager[Channel]]
"""From the options of an engine to a running one whose ranks are watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the bisection says of one setting."""

    text: str
    verdict: Verdict
    """With the margin at the first difference, where it could be measured."""
    parting: Parting | None = None
    is_gone: bool | None = None
    """Whether the op's reference makes the difference go away; None: there is none to try."""


def bisect(task: Task, verdict: Verdict, open_watched: OpenWatched) -> Finding:
    """Run the setting of `verdict` and what it was compared with again, watched."""
    search = _Search(task, verdict, open_watched)
    try:
        parting, answers = search.part(())
        if parting is None:
            text = "no op returned something else this time: the difference comes and goes"
            if verdict.setting.graphs:
                text = "op by op, without graphs, nothing differs: a graph is at fault"
            return Finding(text=text, verdict=verdict)
        verdict = with_margin(verdict, *answers)
        text = f"first difference: {parting}"
        if parting.op == KV_CACHE:
            text += "; a block holds the keys and values of other tokens: the cache is at fault"
            return Finding(text=text, verdict=verdict, parting=parting)
        is_gone = search.part((parting.op,))[0] is None
    except EngineError as error:
        return Finding(text=f"bisection failed: {error}", verdict=verdict)
    text += "; with its reference the difference " + (
        "is gone: the kernel is at fault" if is_gone else "stays: look at what the op is given"
    )
    return Finding(text=text, verdict=verdict, parting=parting, is_gone=is_gone)


class _Search:
    """Two settings, and the request whose answers differ."""

    def __init__(self, task: Task, verdict: Verdict, open_watched: OpenWatched) -> None:
        self._task = task
        self._open = open_watched
        self._setting = verdict.setting
        self._between_counts = verdict.bound is not None
        self._base = task.base_of(self._setting) if self._between_counts else self._setting.plain
        first = verdict.first
        self._request = 0 if first is None else first.request
        self._token = 0 if first is None else first.token
        self._bound = rank_bound(task.model, self._setting.dtype)

    def part(self, references: tuple[str, ...]) -> tuple[Parting | None, tuple[Answer, Answer]]:
        """Where the two part if these ops are references; and the two answers."""
        both = (self._base, self._setting)
        apart = self._options_of(self._base) != self._options_of(self._setting)
        engines = [(each,) for each in both] if apart else [both]
        with tempfile.TemporaryDirectory(prefix="unisono-trace-") as place:
            found = []
            for number, settings in enumerate(engines):
                directory = Path(place) / str(number)
                directory.mkdir()
                found += self._watched(settings, directory, references)
            (base, want), (other, got) = found
            prompt = self._order(self._setting)[self._request]
            end = len(self._task.prompts[prompt]) + self._token
            if self._between_counts:
                tolerance = RANK_TOLERANCE * self._bound
                parting = where_ranks_part(base[0], other, end, tolerance)
            else:
                if self._setting.speculate != "off":
                    other = [trace.settled() for trace in other]
                parting = where_bits_part(base, other, end)
        return parting, (want, got)

    def _watched(
        self, settings: Sequence[Setting], directory: Path, references: tuple[str, ...]
    ) -> list[tuple[list[RankTrace], Answer]]:
        """Run settings that can share an engine on one; what its ranks recorded of each."""
        watch = Watch(
            trace_dir=str(directory), trace_values=self._between_counts, reference_ops=references
        )
        found = []
        with self._open(self._options_of(settings[0]), watch) as engine:
            for setting in settings:
                bounds = limits(setting, self._task.sizes)
                engine.reschedule(bounds)
                answer = self._answer(engine, setting)
                engine.reschedule(bounds)  # returns once no step is under way
                found.append((read_trace(directory, setting.tp), answer))
                for path in directory.glob("*.jsonl"):
                    path.unlink()
        return found

    def _options_of(self, setting: Setting) -> Mapping[str, Any]:
        # What a graph replays cannot be watched.
        return engine_options(replace(setting, graphs=False), self._task.sizes)

    def _answer(self, engine: Channel, setting: Setting) -> Answer:
        """The marked request in the company that it had: all that came before, and its wave."""
        order = self._order(setting)
        request = self._request
        if setting == self._base:
            request = order.index(self._order(self._setting)[self._request])
        params = params_of(setting, self._task.max_tokens)
        marked = replace(params, logprobs=NUM_TOP)
        prompts = self._task.prompts
        begin = 0 if setting != self._base else request
        for start in range(begin, len(order), setting.batch):
            wave = order[start : start + setting.batch]
            place = request - start
            asked = [
                (number, prompts[number], marked if at == place else params)
                for at, number in enumerate(wave)
            ]
            answers = ask(engine, asked, place, interruptions(setting, self._task.again))
            if place < len(wave):
                return answers[place]
        raise AssertionError("the request is in no wave")

    def _order(self, setting: Setting) -> Sequence[int]:
        return order_of(setting, len(self._task.prompts))
