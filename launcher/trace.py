"""Reads what ranks recorded of their ops (workers/tracer.py) and finds where two runs part."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPLICATED = ("rms_norm", "add_rms_norm", "reduce_rows")
"""Ops whose outputs are the same on every rank: those that rank counts are compared by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row of what one op returned."""

    order: int
    """Its place in the forward."""
    name: str
    """Scope and op: "layers.3.attention paged_attention"."""
    position: int
    checksum: int
    values: tuple[int, int] | None = None
    """Where its numbers lie: first item and count; None: none were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """All records of one rank, in the order they were made."""

    records: tuple[Record, ...]
    values: Path

    def numbers(self, record: Record) -> list[float]:
        """The fp32 numbers of a record."""
        import numpy as np

        assert record.values is not None, "the run kept no values"
        at, count = record.values
        return np.fromfile(self.values, dtype="<f4", count=count, offset=4 * at).tolist()

    def settled(self) -> RankTrace:
        """Only the last record of each place: earlier ones may be of drafts that were wrong."""
        last = {(record.order, record.position): record for record in self.records}
        return RankTrace(records=tuple(last.values()), values=self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first op, in the order of the forward, that returns something else."""

    order: int
    name: str
    position: int
    rank: int
    relative: float | None = None
    """How far off it is, relative rms; None: other bits."""
    num_ranks: int | None = None
    """Of how many ranks that is one, where two counts are compared and both may be meant."""

    @property
    def op(self) -> str:
        return self.name.rpartition(" ")[2]

    def __str__(self) -> str:
        off = "other bits" if self.relative is None else f"off by {self.relative:.2g} of its size"
        rank = f"{self.rank}" if self.num_ranks is None else f"{self.rank} of {self.num_ranks}"
        return f"{self.name}, position {self.position}, rank {rank}: {off}"


def read_trace(directory: Path, ranks: int) -> list[RankTrace]:
    """Read what the ranks left in `directory`."""
    return [_read_rank(directory / f"rank-{rank}.jsonl") for rank in range(ranks)]


def where_bits_part(
    want: Sequence[RankTrace], got: Sequence[RankTrace], end: int
) -> Parting | None:
    """Compare two runs of the same rank count, each rank with itself, positions below `end`.

    The positions are those where both runs had the same tokens. What `got` computed several times
    must be right every time.
    """
    found = [
        Parting(order=record.order, name=record.name, position=record.position, rank=rank)
        for rank, (mine, theirs) in enumerate(zip(got, want, strict=True))
        for record, base in _pairs(mine, theirs, end)
        if record.checksum != base.checksum
    ]
    return _first(found)


def where_ranks_part(
    want: RankTrace, got: Sequence[RankTrace], end: int, tolerance: float
) -> Parting | None:
    """Compare runs of different rank counts where every rank holds the whole value.

    All ranks of `got` must have the same bits, and be no further than `tolerance` (relative rms of
    a row) from `want`.
    """
    found = []
    for rank, mine in enumerate(got):
        found += [
            Parting(order=record.order, name=record.name, position=record.position, rank=rank)
            for record, base in _pairs(mine, got[0], end)
            if record.values is not None and record.checksum != base.checksum
        ]
        for record, base in _pairs(mine, want, end):
            if record.values is None or record.checksum == base.checksum:
                continue
            off = _relative(mine.numbers(record), want.numbers(base))
            if not off <= tolerance:
                found.append(
                    Parting(
                        order=record.order,
                        name=record.name,
                        position=record.position,
                        rank=rank,
                        relative=off,
                    )
                )
                break
    return _first(found)


def ops_before(trace: RankTrace, parting: Parting | None) -> dict[int, str]:
    """What led to `parting`, the op of a replicated value: from their places in the forward to the
    names of the ops behind the replicated value before it, itself included. None: of all behind the
    last replicated value."""
    last = math.inf if parting is None else parting.order
    before = [each.order for each in trace.records if each.order < last and each.values is not None]
    begin = max(before, default=0)
    return {each.order: each.name for each in trace.records if begin < each.order <= last}


def where_references_part(
    want: Sequence[RankTrace],
    got: Sequence[RankTrace],
    end: int,
    tolerance: float,
    places: Container[int],
) -> list[Parting]:
    """Compare a run with one of the same rank count, `want`, in which ops are references.

    Of each op at one of the `places` of the forward, in its order: the rank that is furthest off,
    and there the first row that is by more than `tolerance`; or that has other bits, if no numbers
    were kept. The others may be a little off for the sake of what lies before.
    """
    first: dict[tuple[str, int], Parting] = {}
    largest: dict[tuple[str, int], float] = {}
    for rank, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for record, base in _pairs(mine, theirs, end):
            if record.order not in places or record.checksum == base.checksum:
                continue
            off = None
            if record.values is not None:
                off = _relative(mine.numbers(record), theirs.numbers(base))
                if off <= tolerance:
                    continue
            key = record.name, rank
            size = math.inf if off is None or math.isnan(off) else off
            largest[key] = max(size, largest.get(key, 0.0))
            parting = Parting(
                order=record.order,
                name=record.name,
                position=record.position,
                rank=rank,
                relative=off,
                num_ranks=len(got),
            )
            first.setdefault(key, parting)
    furthest: dict[str, Parting] = {}
    for key in sorted(first, key=lambda key: -largest[key]):
        furthest.setdefault(key[0], first[key])
    return sorted(furthest.values(), key=_place)


def _read_rank(path: Path) -> RankTrace:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        call = json.loads(line)
        for row, (position, checksum) in enumerate(
            zip(call["positions"], call["sums"], strict=True)
        ):
            width = call.get("width", 0)
            records.append(
                Record(
                    order=call["order"],
                    name=call["name"],
                    position=position,
                    checksum=checksum,
                    values=(call["at"] + row * width, width) if width else None,
                )
            )
    return RankTrace(records=tuple(records), values=path.with_suffix(".f32"))


def _pairs(mine: RankTrace, theirs: RankTrace, end: int) -> Iterator[tuple[Record, Record]]:
    """Records of `mine` in the order of the forward, with the first of `theirs` at their place."""
    base: dict[tuple[int, int], Record] = {}
    for record in theirs.records:
        base.setdefault((record.order, record.position), record)
    for record in sorted(mine.records, key=lambda each: (each.order, each.position)):
        other = base.get((record.order, record.position))
        if record.position < end and other is not None:
            yield record, other


def _relative(mine: Sequence[float], base: Sequence[float]) -> float:
    size = sum(b * b for b in base)
    off = sum((a - b) ** 2 for a, b in zip(mine, base, strict=True))
    return math.sqrt(off / size) if size else math.inf


def _place(parting: Parting) -> tuple[int, int, int]:
    return parting.order, parting.position, parting.rank


def _first(found: Sequence[Parting]) -> Parting | None:
    return min(found, key=_place, default=None)
