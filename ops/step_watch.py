"""Watches a row of steps of one rank: how long they take, and what the device does in them.

Either the clock is read and nothing else, or torch's profiler records the device, which slows the
steps down: both at once would measure neither.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import DeviceType

from unisono.ops.comm import Group
from unisono.ops.device_time import Activity, DeviceTime, Watched, device_time

T = TypeVar("T")

MARK = "unisono step "
"""Begins the name under which a profile shows the launch of a step."""
_LAUNCHERS = ("cuda", "cu")
"""How calls of CUDA's runtime and driver begin."""
_SILENT = "99"


class GraphCounts(Protocol):
    """What is counted of graphs (workers/graph_pool.py)."""

    num_replays: int
    num_captures: int
    eager_runs: Counter[tuple[str, str]]


class Rows(Protocol):
    """What is read of the rows of a step (workers/protocol.py)."""

    def __len__(self) -> int: ...
    @property
    def start(self) -> array[int]: ...
    @property
    def count(self) -> array[int]: ...
    @property
    def phase(self) -> array[int]: ...


class KinetoEvent(Protocol):
    """What is read of an event of torch's profiler, in all torch versions that are served."""

    def name(self) -> str: ...
    def device_type(self) -> Any: ...
    def start_ns(self) -> int: ...
    def duration_ns(self) -> int: ...
    def device_resource_id(self) -> int: ...
    def correlation_id(self) -> int: ...
    def is_user_annotation(self) -> bool: ...


class StepWatch:
    """Takes note of `num_steps` steps of `num_rows` rows, all of phase `phase` and of `num_tokens`
    tokens together, after `skip` such steps.

    `traced`: with the device, which must be a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group,
        graphs: GraphCounts,
        *,
        num_rows: int,
        num_tokens: int,
        phase: int,
        skip: int,
        num_steps: int,
        traced: bool,
    ) -> None:
        self._device, self._group, self._graphs = device, group, graphs
        self._wanted = num_rows, num_rows, num_tokens
        self._phase, self._skip = phase, skip
        self._num_steps, self._traced = num_steps, traced
        self._steps: list[int] = []
        self._answers: list[int] = []
        self._launch_ns = array("q")
        self._num_keys = self._num_tokens = 0
        self._before, self._after = self._counted(), self._counted()
        self._profile: Any = None
        self._device_time: DeviceTime | None = None

    def launch(self, step: int, rows: Rows, run: Callable[[], T]) -> T:
        """Launch step number `step` by `run` and return what that returns; note it if it counts."""
        if not self._counts(rows):
            return run()
        if not self._steps:
            self._before = self._counted()
            self._profile = _started_profile() if self._traced else None
        self._steps.append(step)
        self._num_keys += sum(rows.start) + sum(rows.count)
        with self._marked(step):
            began = time.perf_counter_ns()
            out = run()
            self._launch_ns.append(time.perf_counter_ns() - began)
        if len(self._steps) == self._num_steps:
            self._after = self._counted()
            if self._profile is not None:
                self._profile.stop()
                events = self._profile.profiler.kineto_results.events()
                self._device_time = device_time(activities_of(events))
        return out

    def answered(self, step: int, num_tokens: int) -> Watched | None:
        """The result of step number `step`, so many tokens, is out; return all that was seen after
        the last."""
        if step not in self._steps[len(self._answers) :][:1]:
            return None
        self._num_tokens += num_tokens
        self._answers.append(time.perf_counter_ns())
        return None if len(self._answers) < self._num_steps else self._watched()

    def _watched(self) -> Watched:
        before, after = self._before, self._after
        replays, captures, met, met_ns = (b - a for a, b in zip(before[0], after[0], strict=True))
        ends = list(zip(self._steps, self._answers, strict=True))
        periods = [end - start for (a, start), (b, end) in pairwise(ends) if b == a + 1]
        return Watched(
            period_ns=array("q", periods),
            launch_ns=self._launch_ns,
            num_keys=self._num_keys,
            num_tokens=self._num_tokens,
            num_replays=replays,
            num_captures=captures,
            eager=tuple((*name, count) for name, count in sorted((after[1] - before[1]).items())),
            num_collectives=met,
            collective_ns=met_ns,
            memory_bytes=_peak_bytes(self._device),
            device=self._device_time,
        )

    def _counts(self, rows: Rows) -> bool:
        """Whether a step of these rows is to be noted."""
        if (len(rows), rows.phase.count(self._phase), sum(rows.count)) != self._wanted:
            return False
        if self._skip:
            self._skip -= 1
            return False
        return len(self._steps) < self._num_steps

    def _marked(self, step: int) -> AbstractContextManager[object]:
        if self._profile is None:
            return nullcontext()
        return torch.profiler.record_function(f"{MARK}{step}")

    def _counted(self) -> tuple[tuple[int, int, int, int], Counter[tuple[str, str]]]:
        pool, group = self._graphs, self._group
        numbers = pool.num_replays, pool.num_captures, group.num_met, group.met_ns
        return numbers, Counter(pool.eager_runs)


def activities_of(events: Iterable[KinetoEvent]) -> list[Activity]:
    """Return what the device did in marked steps.

    An activity belongs to the step in which the host launched it: it has the correlation id of the
    call that did, all nodes of a graph that of the graph's launch. What has none belongs to the
    step of the activity before it.
    """
    marks: list[tuple[int, int]] = []
    launches: dict[int, int] = {}
    done: list[KinetoEvent] = []
    for event in events:
        if event.device_type() == DeviceType.CUDA:
            # The device's side of an annotation covers activities and is none.
            if not event.is_user_annotation():
                done.append(event)
        elif event.name().startswith(MARK):
            marks.append((event.start_ns(), int(event.name().removeprefix(MARK))))
        elif event.name().startswith(_LAUNCHERS):
            launches[event.correlation_id()] = event.start_ns()
    marks.sort()
    found: list[Activity] = []
    step = None
    for event in sorted(done, key=lambda event: event.start_ns()):
        launch = launches.get(event.correlation_id())
        if launch is not None:
            place = bisect_right(marks, launch, key=lambda mark: mark[0])
            step = marks[place - 1][1] if place else None
        if step is not None:
            times = event.start_ns(), event.duration_ns()
            found.append(Activity(event.name(), *times, event.device_resource_id(), step))
    return found


def _started_profile() -> Any:
    # Left alone, it writes lines of its own to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    torch.cuda.synchronize()
    kinds = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
    profile.start()
    return profile


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
