"""Where the time of a step goes, from what a device did in a row of steps. Pure and torch-free."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.ops.kernel_names import MOST, short_name

COLLECTIVES = ("nccl", "all_reduce", "allreduce", "all_gather", "allgather")
"""Parts of the names of kernels in which ranks exchange numbers."""
ORDERED_SUM = "_sum_kernel"
"""Adds what ranks have gathered (ops/kernels/reduce.py): the second half of an all-reduce."""
COPIES = ("Memcpy", "Memset")
"""How a profile names what is no kernel."""
MOST_KINDS = 256
"""Kinds of kernels that are told of, those that take the longest."""


class Activity(NamedTuple):
    """Something that a device did: a kernel, a copy or a fill."""

    name: str
    start_ns: int
    duration_ns: int
    stream: int
    step: int
    """The step that launched it; numbers ascend."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def is_copy(self) -> bool:
        return self.name.startswith(COPIES)

    @property
    def is_collective(self) -> bool:
        name = self.name.lower()
        return name == ORDERED_SUM or any(part in name for part in COLLECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """What kernels, copies or fills of one name are in a step: medians, as in `DeviceTime`."""

    name: str
    """As `short_name` gives it."""
    num_launches: int
    busy_ns: int
    """They run, and nothing that began before: of all kinds together that is the busy time."""

    def __post_init__(self) -> None:
        if len(self.name) > MOST:
            raise ValueError(f"a name of {len(self.name)} characters, at most {MOST}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """What one step is to the device: medians over traced steps, times in nanoseconds.

    A trace takes time itself: kernels run as fast as ever, what lies between them grows.
    """

    num_steps: int
    num_kernels: int
    num_copies: int
    """Copies and fills."""
    num_collectives: int
    """Of the kernels."""
    busy_ns: int
    """Something runs, on whatever stream."""
    collective_ns: int
    """Part of it in which only collectives run, those that wait for other ranks included."""
    idle_ns: int
    """Nothing runs between the first and the last activity of the step."""
    gap_ns: int
    """Nothing runs between the last activity of a step and the first of the next."""
    kernels: tuple[KernelTime, ...]
    """Copies and fills among them; what takes the longest comes first."""

    def __post_init__(self) -> None:
        if len(self.kernels) > MOST_KINDS:
            raise ValueError(f"{len(self.kernels)} kinds of kernels, at most {MOST_KINDS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a rank has seen of the steps it was told to watch; nothing of it is an average."""

    period_ns: array[int]
    """From the result of a step to the result of the next one."""
    launch_ns: array[int]
    """How long the host was busy with a step: launching it, on a CPU all of it."""
    num_keys: int
    """Keys that the rows of all these steps could see, each up to its last token."""
    num_tokens: int
    """That all these steps answered: of each row one, and its right drafts."""
    num_replays: int
    """Of graphs."""
    num_captures: int
    eager: tuple[tuple[str, str, int], ...]
    """Piece of a step, why it was no replay, and how often."""
    num_collectives: int
    """That the host ran itself, on a CPU all of them."""
    collective_ns: int
    """Of the host in them, waiting for other ranks included."""
    memory_bytes: int
    """The most that this process has held: of its GPU by torch's allocator, else of the host."""
    device: DeviceTime | None = None
    """None: not traced."""


def device_time(activities: Iterable[Activity]) -> DeviceTime | None:
    """Sum up steps that are alike; None unless there are two.

    The first one is left out: it starts on an idle device.
    """
    ordered = sorted(activities, key=lambda each: (each.step, each.start_ns))
    steps = [list(group) for _, group in itertools.groupby(ordered, lambda each: each.step)][1:]
    if not steps:
        return None
    ends = [max(each.end_ns for each in step) for step in steps]
    spans = [(step[0].start_ns, end) for step, end in zip(steps, ends, strict=True)]
    busy = [covered_ns(step) for step in steps]
    others = [covered_ns([each for each in step if not each.is_collective]) for step in steps]
    return DeviceTime(
        num_steps=len(steps),
        num_kernels=_median(sum(not each.is_copy for each in step) for step in steps),
        num_copies=_median(sum(each.is_copy for each in step) for step in steps),
        num_collectives=_median(sum(each.is_collective for each in step) for step in steps),
        busy_ns=_median(busy),
        collective_ns=_median(all_ - rest for all_, rest in zip(busy, others, strict=True)),
        idle_ns=_median(end - start - ns for (start, end), ns in zip(spans, busy, strict=True)),
        gap_ns=_median(max(later - end, 0) for (_, end), (later, _) in itertools.pairwise(spans)),
        kernels=tuple(_by_kernel(steps)[:MOST_KINDS]),
    )


def covered_ns(activities: Sequence[Activity]) -> int:
    """Nanoseconds in which at least one of `activities` runs."""
    return sum(ns for _, ns in _added_ns(activities))


def _added_ns(activities: Sequence[Activity]) -> Iterator[tuple[Activity, int]]:
    """Each of `activities` in the order of their starts, and for how long it runs when none of
    those before it does. A kernel may begin while the one before it ends, and waits for that."""
    reached = 0
    for each in sorted(activities, key=lambda each: each.start_ns):
        yield each, max(each.end_ns - max(each.start_ns, reached), 0)
        reached = max(reached, each.end_ns)


def _by_kernel(steps: Sequence[Sequence[Activity]]) -> list[KernelTime]:
    """All kinds that half of the steps have, the longest first."""
    names = {each.name for step in steps for each in step}
    short = {name: short_name(name) for name in names}
    launches = [Counter(short[each.name] for each in step) for step in steps]
    times: list[Counter[str]] = [Counter() for _ in steps]
    for taken, step in zip(times, steps, strict=True):
        for each, ns in _added_ns(step):
            taken[short[each.name]] += ns
    kinds = [
        KernelTime(
            name=name,
            num_launches=_median(counts[name] for counts in launches),
            busy_ns=_median(taken[name] for taken in times),
        )
        for name in sorted(set(short.values()))
    ]
    there = [kind for kind in kinds if kind.num_launches]
    return sorted(there, key=lambda kind: kind.busy_ns, reverse=True)


def _median(values: Iterable[int]) -> int:
    """The lower one in the middle; 0 of nothing."""
    ordered = sorted(values) or [0]
    return ordered[(len(ordered) - 1) // 2]
