"""Watching steps: which ones count, what is noted, and how a profile is read."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from unisono.ops import step_watch
from unisono.ops.comm import solo_group
from unisono.ops.step_watch import MARK, StepWatch, activities_of

CPU = torch.device("cpu")


@dataclass
class Graphs:
    num_replays: int = 0
    num_captures: int = 0
    eager_runs: Counter[tuple[str, str]] = field(default_factory=Counter)


PROMPT, DECODE = 1, 2
"""As `Phase` in workers/protocol.py; here it is a number like any other."""


@dataclass
class Rows:
    start: array[int]
    count: array[int]
    phase: array[int]

    def __len__(self):
        return len(self.start)


def rows(*starts, phases=None):
    """Rows of a token each, that decode unless `phases` says otherwise."""
    phase = array("i", phases or [DECODE] * len(starts))
    return Rows(array("i", starts), array("i", [1] * len(starts)), phase)


def watch(graphs, **changes):
    wanted = {"num_rows": 2, "num_tokens": 2, "phase": DECODE, "skip": 1, "num_steps": 3}
    return StepWatch(CPU, solo_group(), graphs, **{**wanted, "traced": False, **changes})


def test_steps_that_count_are_noted_after_the_skipped_ones():
    graphs = Graphs(num_replays=100, eager_runs=Counter({("tail", "sampling"): 7}))
    watched = watch(graphs)

    def step():
        graphs.num_replays += 2
        graphs.eager_runs["tail", "sampling"] += 1
        time.sleep(0.002)
        return "out"

    others = [rows(9), rows(9, 9, phases=[PROMPT, DECODE]), rows(1, 2)]
    plan = [*others, rows(10, 20), rows(11, 21), rows(12, 22), rows(13, 23)]
    seen = []
    for number, each in enumerate(plan):
        assert watched.launch(number, each, step) == "out"
        seen.append(watched.answered(number, 3))
    # The third is the skipped one; the last comes too late.
    assert [number for number, each in enumerate(seen) if each] == [5]
    found = seen[5]
    assert found is not None
    assert found.num_keys == 10 + 20 + 11 + 21 + 12 + 22 + 6
    assert found.num_tokens == 3 * 3
    assert (found.num_replays, found.num_captures) == (6, 0)
    assert found.eager == (("tail", "sampling", 3),)
    assert (len(found.period_ns), len(found.launch_ns)) == (2, 3)
    assert min(found.period_ns) >= 2e6
    assert min(found.launch_ns) >= 2e6
    assert found.memory_bytes > 2**20
    assert found.device is None


def test_steps_of_whole_prompts_are_known_by_phase_and_tokens():
    """Not a part of a prompt, nor as many rows that decode, nor another number of tokens."""
    watched = watch(Graphs(), num_tokens=70, phase=PROMPT, skip=0, num_steps=2)
    chunk = 0

    def step(counts, *phases):
        return Rows(array("i", [0] * len(counts)), array("i", counts), array("i", phases))

    plan = [
        step([64, 6], chunk, PROMPT),
        step([1, 69], DECODE, PROMPT),
        step([70], PROMPT),
        step([35, 34], PROMPT, PROMPT),
        step([30, 40], PROMPT, PROMPT),
        step([35, 35], DECODE, DECODE),
        step([35, 35], PROMPT, PROMPT),
    ]
    seen = []
    for number, each in enumerate(plan):
        watched.launch(number, each, int)
        seen.append(watched.answered(number, 2))
    assert [number for number, each in enumerate(seen) if each] == [6]
    found = seen[6]
    assert found is not None
    assert (found.num_keys, found.num_tokens, len(found.launch_ns)) == (140, 4, 2)


def test_results_that_come_late_or_from_before_are_told_apart():
    watched = watch(Graphs(), skip=0, num_steps=2)
    assert watched.answered(4, 2) is None
    watched.launch(5, rows(1, 2), int)
    assert watched.answered(4, 2) is None
    watched.launch(6, rows(2, 3), int)
    assert watched.answered(5, 2) is None
    assert watched.answered(6, 2) is not None


def test_no_period_spans_a_step_that_does_not_count():
    watched = watch(Graphs(), skip=0)
    found = None
    for number, each in enumerate([rows(1, 2), rows(2), rows(3, 3), rows(4, 4)]):
        watched.launch(number, each, int)
        found = watched.answered(number, 2)
    assert found is not None
    assert len(found.period_ns) == 1


@dataclass
class Event:
    """As torch's profiler has them; times in ns."""

    title: str
    start: int
    duration: int = 1
    correlation: int = 0
    device: DeviceType = DeviceType.CPU
    annotation: bool = False
    stream: int = 0

    def name(self):
        return self.title

    def device_type(self):
        return self.device

    def start_ns(self):
        return self.start

    def duration_ns(self):
        return self.duration

    def device_resource_id(self):
        return self.stream

    def correlation_id(self):
        return self.correlation

    def is_user_annotation(self):
        return self.annotation


def on_device(title, start, duration, correlation, **more):
    return Event(title, start, duration, correlation, device=DeviceType.CUDA, stream=7, **more)


EVENTS = [
    Event(f"{MARK}8", 100, 50, annotation=True),
    # The device is behind: step 8 still runs when step 9 is launched.
    Event(f"{MARK}9", 200, 50, annotation=True),
    Event("cudaMemcpyAsync", 90, 5, 1),
    Event("cudaGraphLaunch", 110, 20, 2),
    Event("cudaMemcpyAsync", 140, 5, 3),
    Event("cuLaunchKernelEx", 205, 5, 4),
    # An operator's id is of another kind than those of calls.
    Event("aten::copy_", 250, 5, 2),
    on_device("Memcpy HtoD (Pinned -> Device)", 95, 5, 1),
    on_device("a", 300, 10, 2),
    on_device("b", 312, 10, 2),
    on_device("Memcpy DtoH (Device -> Pinned)", 330, 2, 3),
    on_device("c", 340, 10, 4),
    on_device("d", 352, 10, 99),
    on_device(f"{MARK}8", 300, 32, 0, annotation=True),
    on_device("nccl:all_gather", 300, 32, 0, annotation=True),
]


def test_activities_belong_to_the_step_that_launched_them():
    found = activities_of(EVENTS[::-1])
    assert [(each.name[:6], each.step) for each in found] == [
        ("a", 8),
        ("b", 8),
        ("Memcpy", 8),
        ("c", 9),
        ("d", 9),
    ]
    assert found[0][1:4] == (300, 10, 7)


def test_a_real_profile_has_the_marks():
    kinds = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[kinds.CPU])
    profile.start()
    for number in (3, 4):
        with torch.profiler.record_function(f"{MARK}{number}"):
            torch.ones(8).sum()
    profile.stop()
    events = list(profile.profiler.kineto_results.events())
    at = {each.name(): each.start_ns() for each in events}
    launches = [Event("cudaLaunchKernel", at[f"{MARK}{n}"] + 1, correlation=n) for n in (3, 4)]
    kernels = [on_device("k", 2**62 + n, 1, n) for n in (3, 4)]
    assert [each.step for each in activities_of([*events, *launches, *kernels])] == [3, 4]
    assert activities_of(events) == []


@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_traced_watch_sums_up_what_the_device_did(monkeypatch, num_steps):
    """The profile is a fake one of steps whose kernels take 10 ns each."""
    marks, stops = [], []
    results = SimpleNamespace(
        events=lambda: [
            *(Event(f"{MARK}{n}", 100 * n, annotation=True) for n in range(5, 5 + num_steps)),
            *(Event("cudaGraphLaunch", 100 * n + 1, 1, n) for n in range(5, 5 + num_steps)),
            *(on_device("k", 100 * n + 20, 10, n) for n in range(5, 5 + num_steps)),
        ]
    )
    profile = SimpleNamespace(
        stop=lambda: stops.append(len(marks)), profiler=SimpleNamespace(kineto_results=results)
    )
    monkeypatch.setattr(step_watch, "_started_profile", lambda: profile)
    watched = watch(Graphs(), skip=0, num_steps=num_steps, traced=True)
    for number in range(5, 5 + num_steps):
        watched.launch(number, rows(1, 2), lambda: marks.append(1))
    assert stops == [num_steps]
    found = [watched.answered(number, 2) for number in range(5, 5 + num_steps)][-1]
    assert found is not None
    assert found.device is not None
    assert (found.device.num_steps, found.device.busy_ns) == (num_steps - 1, 10)
    assert found.device.gap_ns == (90 if num_steps == 3 else 0)
