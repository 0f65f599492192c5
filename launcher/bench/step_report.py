"""What `unisono bench step` says of a kind of step: a line, where the time goes, JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.launcher.bench.report import SHOWN
from unisono.workers.timings import DeviceTime, KernelTime, Watched

SHOWN_KERNELS = 10
ALL_REDUCE = "all-reduce"
"""What the time is called in which ranks add up, or find the greatest of, what they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """Everything that was seen of steps of one kind, at least one round of them."""

    name: str
    batch: int
    """Rows of a step."""
    num_keys: float
    """That a row may see, on the average of the timed steps."""
    step_bytes: float
    """Moved in a step by all ranks together, at least."""
    memory_s: float
    """How long that takes at the best."""
    step_flops: float = 0.0
    """Computed in a step by all ranks together, at least; 0: not counted."""
    products_s: float = 0.0
    """How long that takes at the best."""
    prompt_tokens: int = 0
    """Of a step of whole prompts; 0: the rows decode."""
    rounds: Sequence[Sequence[Watched]]
    """Of each round what each rank saw."""
    drafts: int = 0
    """Behind each row."""
    devices: Sequence[DeviceTime | None] = ()
    """What was traced of each rank's GPU; empty on a CPU."""

    @property
    def round_s(self) -> list[float]:
        """Seconds of a step, on the average of each round; as rank 0 saw it."""
        return [statistics.fmean(seen[0].period_ns) / 1e9 for seen in self.rounds]

    @property
    def median_round(self) -> Sequence[Watched]:
        """The round that everything is told of but captures and eager runs."""
        return self.rounds[self.round_s.index(self.step_s)]

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median of the rounds, of two in the middle the quicker."""
        return statistics.median_low(self.round_s)

    @property
    def spread(self) -> float:
        """From the quickest round to the slowest, as a part of the median."""
        return (max(self.round_s) - min(self.round_s)) / self.step_s

    @property
    def floor_s(self) -> float:
        """Less than a step can take."""
        return max(self.memory_s, self.products_s)

    @property
    def of_floor(self) -> float:
        """Which part of a step the floor is."""
        return self.floor_s / self.step_s

    @property
    def num_captures(self) -> int:
        """Of graphs on rank 0, in timed steps."""
        return sum(seen[0].num_captures for seen in self.rounds)

    @property
    def eager(self) -> Counter[tuple[str, str]]:
        """Runs of rank 0 that replayed no graph, by piece of the step and reason."""
        runs: Counter[tuple[str, str]] = Counter()
        for seen in self.rounds:
            runs.update({(piece, reason): count for piece, reason, count in seen[0].eager})
        return runs

    @property
    def tokens_per_step(self) -> float:
        """Of all rows: of prompts those that are computed, else those that are answered."""
        return self.prompt_tokens or self.per_step(0, "num_tokens")

    @property
    def device(self) -> DeviceTime | None:
        """What was traced of rank 0."""
        return self.devices[0] if self.devices else None

    def host_s(self, rank: int) -> float:
        """Seconds that the host of `rank` is busy with a step, on the average."""
        return statistics.fmean(self.median_round[rank].launch_ns) / 1e9

    def per_step(self, rank: int, name: str) -> float:
        """A number that `rank` counted over a round, for one step."""
        seen = self.median_round[rank]
        count: int = getattr(seen, name)
        return count / len(seen.launch_ns)

    def memory_bytes(self, rank: int) -> int:
        """The most that `rank` held so far."""
        return max(seen[rank].memory_bytes for seen in self.rounds)

    def parts_s(self) -> dict[str, float]:
        """What the seconds of a step are spent on, by rank 0; together they are the whole step.

        A trace stretches the time between kernels: what busy time and the gap to the next step
        leave of an untraced step is given to the boundaries of kernels. Empty where a GPU was
        traced in vain.
        """
        device = self.device
        if device is None and self.devices:
            return {}
        if device is None:
            # One step more than there are periods: the averages may differ a little.
            busy = min(self.host_s(0), self.step_s)
            met = min(self.per_step(0, "collective_ns") / 1e9, busy)
            between = self.step_s - busy
            parts = {"computing": busy - met, ALL_REDUCE: met, "between steps": between}
        else:
            busy = min(device.busy_ns / 1e9, self.step_s)
            gap = min(device.gap_ns / 1e9, self.step_s - busy)
            met = min(device.collective_ns / 1e9, busy)
            parts = {
                "kernels": busy - met,
                "kernel boundaries": self.step_s - busy - gap,
                ALL_REDUCE: met,
                "between steps": gap,
            }
        return {name: seconds for name, seconds in parts.items() if seconds or name != ALL_REDUCE}

    def as_json(self) -> dict[str, Any]:
        """Everything by name. `name` and `seconds` are what comparisons go by."""
        return {
            "name": self.name,
            "seconds": self.step_s,
            "batch": self.batch,
            "keys_per_row": round(self.num_keys, 1),
            "ms_per_step": 1e3 * self.step_s,
            "rounds_ms": [1e3 * seconds for seconds in self.round_s],
            "spread": self.spread,
            "drafts": self.drafts,
            "prompt_tokens": self.prompt_tokens,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s": self.tokens_per_step / self.step_s,
            "bytes_per_token": self.step_bytes / self.tokens_per_step,
            "flops_per_step": self.step_flops,
            "floor_ms": 1e3 * self.floor_s,
            "memory_floor_ms": 1e3 * self.memory_s,
            "products_floor_ms": 1e3 * self.products_s,
            "of_floor": self.of_floor,
            "parts_ms": {name: 1e3 * seconds for name, seconds in self.parts_s().items()},
            "replays_per_step": self.per_step(0, "num_replays"),
            "captures": self.num_captures,
            "eager": [[*name, count] for name, count in sorted(self.eager.items())],
            "ranks": [self._rank_as_json(rank) for rank in range(len(self.rounds[0]))],
        }

    def _rank_as_json(self, rank: int) -> dict[str, Any]:
        device = self.devices[rank] if self.devices else None
        entry: dict[str, Any] = {
            "host_ms": 1e3 * self.host_s(rank),
            "memory_bytes": self.memory_bytes(rank),
            "device": None if device is None else dataclasses.asdict(device),
        }
        if not self.devices:
            entry["collectives_per_step"] = self.per_step(rank, "num_collectives")
            entry["collective_ms"] = self.per_step(rank, "collective_ns") / 1e6
        return entry


def titles() -> str:
    """The titles of the table's columns."""
    return (
        f"{'batch':>6}{'keys':>7}{'ms/step':>10}{'spread':>8}{'tok/s':>10}{'MB/token':>11}"
        f"{'floor ms':>10}{'of floor':>10}  digest"
    )


def row_of(times: BatchTimes, digest: str) -> str:
    """The line of a batch."""
    return (
        f"{times.batch:>6}{times.num_keys:>7.0f}{1e3 * times.step_s:>10.3f}{times.spread:>8.1%}"
        f"{times.tokens_per_step / times.step_s:>10,.1f}"
        f"{times.step_bytes / times.tokens_per_step / 1e6:>11,.1f}"
        f"{1e3 * times.floor_s:>10.3f}{times.of_floor:>10.0%}  {digest[:SHOWN]}"
    )


def details_of(times: BatchTimes) -> Iterator[str]:
    """What the ranks saw of a kind of step."""
    yield f"{times.name}, rank 0: {_device_text(times)}"
    sizes = ", ".join(f"{times.memory_bytes(r) / 2**30:.2f}" for r in range(len(times.rounds[0])))
    yield f"  host {_ms(times.host_s(0))} a step; {_graphs(times)}; peak memory {sizes} GiB"
    if times.drafts:
        each = times.tokens_per_step / times.batch
        yield f"  {times.drafts} drafts behind each row: {each:.2f} tokens a row and step"
    if times.device is not None:
        yield from _kernel_lines(times.device)


def closing_line(times: BatchTimes) -> str:
    """Say where the time of a step goes."""
    what = f"a step of {times.batch}"
    if times.prompt_tokens:
        what = f"a step of {times.prompt_tokens} prompt tokens"
    elif times.batch == 1 and not times.drafts:
        what = "a token"
    parts = ", ".join(f"{_ms(seconds)} {name}" for name, seconds in times.parts_s().items())
    cached = " (what is read fits a cache)" if times.memory_s > times.step_s else ""
    by = " of its products" if times.products_s > times.memory_s else ""
    text = f"{_ms(times.step_s)} {what}, {100 * times.of_floor:.0f} % of the floor{by}{cached}"
    return f"{text}; {parts}" if parts else text


def _device_text(times: BatchTimes) -> str:
    if (device := times.device) is not None:
        met = ""
        if device.num_collectives:
            met = f" ({device.num_collectives} for {ALL_REDUCE}: {_ms(device.collective_ns / 1e9)})"
        return (
            f"traced: busy {_ms(device.busy_ns / 1e9)}, {device.num_kernels} kernels{met}, "
            f"{device.num_copies} cop{'y' if device.num_copies == 1 else 'ies'}; idle "
            f"{_ms(device.idle_ns / 1e9)} between them, then a gap of {_ms(device.gap_ns / 1e9)}"
        )
    if times.devices:
        return "the profiler gave no kernels, so they are not measured"
    num_met = times.per_step(0, "num_collectives")
    met = f"{num_met:.0f} collectives, waits included; " if num_met else ""
    return f"{met}kernels and copies are not measured on a CPU"


def _kernel_lines(device: DeviceTime) -> Iterator[str]:
    """The kernels that take the longest, and the rest of the busy time."""
    shown, rest = device.kernels[:SHOWN_KERNELS], device.kernels[SHOWN_KERNELS:]
    yield f"  {'traced kernel':<58}{'a step':>9}{'us a step':>12}{'of busy':>10}"
    for kernel in shown:
        yield _kernel_line(kernel, device.busy_ns)
    # Medians of kinds need not add up to that of their sum.
    left = max(device.busy_ns - sum(kernel.busy_ns for kernel in shown), 0)
    if rest:
        launches = sum(kernel.num_launches for kernel in rest)
        others = KernelTime(name="others", num_launches=launches, busy_ns=left)
        yield _kernel_line(others, device.busy_ns)


def _kernel_line(kernel: KernelTime, busy_ns: int) -> str:
    return (
        f"  {kernel.name:<58}{kernel.num_launches:>9,}{kernel.busy_ns / 1e3:>12,.1f}"
        f"{kernel.busy_ns / busy_ns:>10.1%}"
    )


def _graphs(times: BatchTimes) -> str:
    replays = times.per_step(0, "num_replays")
    said = [f"{replays:.1f} graph replays a step"] if replays else []
    if times.num_captures:
        said.append(f"{times.num_captures} captures, which take their time")
    pieces: dict[str, list[str]] = {}
    for (piece, reason), count in sorted(times.eager.items()):
        pieces.setdefault(reason, []).append(f"{piece} {count}")
    said += [f"eager: {', '.join(names)} ({reason})" for reason, names in pieces.items()]
    return ", ".join(said)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{3 if seconds < 1e-3 else 2}f} ms"
