"""The plan of a step for the recurrent layers' kernels: which row computes what, on the device.

A record is six int32 numbers, kept as the columns of a [6, rows] tensor: first token in the step,
position of that token, number of tokens, how many of them are of the prompt, how many tokens are
pending, whether the row holds back (1 or 0). What is pending counts for nothing where there are no
tokens or the first is at 0. Kernels take rows in tiles of CHUNK tokens, counted from the row's
first; a prompt's tiles are its chunks, for it begins on their grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.ops.delta import CHUNK, DeltaRow, PendingTokens, delta_rows
from unisono.ops.kernels.gaps import Outputs
from unisono.ops.transfer import upload

_NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPlan:
    """What the recurrent layers of one step share; made once a step."""

    records: Tensor  # [6, rows] int32
    states: Tensor  # [rows] integers
    tiles: Tensor
    """[3, tiles] int32: its row, the row's tokens before it, and the number of the state where what
    is after it is also written, or -1. Those that begin in a prompt come first, row by row."""
    chunk_rows: Tensor
    """[2, rows with tokens of a prompt] int32: the row, its first tile."""
    tail_rows: Tensor
    """[rows with tokens past the prompt] int32."""
    num_chunks: int
    """Tiles that begin in a prompt."""
    longest: int
    """Most tokens of a tile."""
    may_hold: bool = True
    """Whether a row may hold back."""
    outputs: Outputs | None = None
    """Where tokens of the step may be no row's: their outputs of the delta rule are zeros."""
    most_pending: int = 0
    """Tokens that must have room in a state's `PendingTokens`, as far as the host knows."""
    rows: tuple[DeltaRow, ...] = ()
    """What the references read; none where only the device knows the rows."""

    def room(self, pending: PendingTokens | None) -> int:
        """Tokens of a state that `pending` has room for."""
        room = 0 if pending is None else pending.inputs.shape[1]
        assert self.most_pending <= room, (
            f"nothing keeps {self.most_pending} tokens of a state, there is room for {room}"
        )
        return room


def plan_delta(
    starts: Sequence[int],
    counts: Sequence[int],
    num_prompts: Sequence[int],
    states: Sequence[int] | Tensor,
    saves: Sequence[tuple[int, int, int]] = (),
    num_pending: Sequence[int] | Tensor = (),
    holds_back: Sequence[bool] | Tensor = (),
    *,
    device: torch.device,
) -> DeltaPlan:
    """Lay out the rows of a step, as `plan_delta` of `ops/delta.py`. Copies one int32 tensor to the
    device, and `states` where it is no tensor there, and waits for nothing. `num_pending` and
    `holds_back` are not read here, nor checked, where they are tensors; then the plan has no
    `rows`."""
    pending = () if isinstance(num_pending, Tensor) else num_pending
    held = () if isinstance(holds_back, Tensor) else holds_back
    rows = tuple(delta_rows(starts, counts, num_prompts, saves, pending, held))
    chunks: list[tuple[int, int, int]] = []
    others: list[tuple[int, int, int]] = []
    chunk_rows: list[tuple[int, int]] = []
    for row in rows:
        if row.num_chunked:
            chunk_rows.append((row.index, len(chunks)))
        saved = dict(row.saves)
        for at in range(0, row.count, CHUNK):
            tile = (row.index, at, saved.get(at + CHUNK, _NOWHERE))
            (chunks if at < row.num_chunked else others).append(tile)
    tails = [row.index for row in rows if row.count > row.num_chunked]
    numbers = [
        (row.first, row.start, row.count, row.num_chunked, row.num_pending, row.holds_back)
        for row in rows
    ]
    tables = [_columns(numbers, 6), _columns([*chunks, *others], 3), _columns(chunk_rows, 2), tails]
    packed = torch.tensor([x for table in tables for x in table], dtype=torch.int32)
    parts = upload(packed, device).split([len(table) for table in tables])
    records = parts[0].view(6, -1)
    late = [(i, x) for i, x in ((4, num_pending), (5, holds_back)) if isinstance(x, Tensor)]
    for column, values in late:
        records[column].copy_(values)
    return DeltaPlan(
        records=records,
        states=upload(torch.as_tensor(states), device),
        tiles=parts[1].view(3, -1),
        chunk_rows=parts[2].view(2, -1),
        tail_rows=parts[3],
        num_chunks=len(chunks),
        longest=min(max(counts, default=0), CHUNK),
        may_hold=isinstance(holds_back, Tensor) or any(held),
        most_pending=max(
            (max(row.num_pending, row.holds_back * row.count) for row in rows), default=0
        ),
        rows=() if late else rows,
    )


def plan_records(records: Tensor, states: Tensor, max_count: int) -> DeltaPlan:
    """Plan a step of at most `max_count` tokens a row, none of a prompt, that the device lays out.

    records [6, rows] int32 as the module says, with none of a prompt, and states [rows] integers
    are read when the kernels run. A row may have no tokens. Makes device tensors only, so it can be
    captured with the launches that use it.
    """
    assert 1 <= max_count <= CHUNK, f"{max_count} tokens are no tile"
    order = torch.arange(records.shape[1], dtype=torch.int32, device=records.device)
    nothing = torch.zeros_like(order)
    return DeltaPlan(
        records=records,
        states=states,
        tiles=torch.stack((order, nothing, nothing + _NOWHERE)),
        chunk_rows=records.new_empty(2, 0),
        tail_rows=order,
        num_chunks=0,
        longest=max_count,
        outputs=Outputs() if max_count > 1 else None,
    )


def plan_decode(positions: Tensor, states: Tensor) -> DeltaPlan:
    """Plan a step of one token a row, behind its prompt, at positions [rows] integers that only the
    device knows. As `plan_records` it makes device tensors only."""
    records = positions.new_zeros((6, len(positions)), dtype=torch.int32)
    torch.arange(len(positions), out=records[0])
    records[1].copy_(positions)
    records[2].fill_(1)
    return plan_records(records, states, 1)


class Sizes(NamedTuple):
    """Of a padded plan."""

    chunks: int
    """Tiles that begin in a prompt."""
    prompts: int
    """Rows with tokens of a prompt."""
    tails: int
    """Rows with tokens past it, a tile each; no row has both."""

    @property
    def rows(self) -> int:
        """One of them has no tokens, however full the step is."""
        return self.prompts + self.tails + 1


def count_rows(plan: DeltaPlan) -> tuple[int, int] | None:
    """How many rows of a plan have tokens of a prompt, and how many have others.

    None: some have both, or more of the latter than a tile.
    """
    prompts, tails = plan.chunk_rows.shape[1], len(plan.tail_rows)
    counts = (plan.records.shape[1], plan.tiles.shape[1] - plan.num_chunks)
    return (prompts, tails) if counts == (prompts + tails, tails) else None


class PaddedPlans:
    """Fixed addresses for plans of up to `most` records, for launches that are captured.

    What is left over of a plan's room belongs to a row of no tokens, whose state is scratch.
    """

    def __init__(self, most: Sizes, device: torch.device) -> None:
        self._numbers = [
            torch.zeros(count, dtype=torch.int32, device=device)
            for count in (6 * most.rows, 3 * (most.chunks + most.tails), 2 * most.prompts)
        ]
        self._tails = torch.zeros(most.tails, dtype=torch.int32, device=device)
        self._states = torch.zeros(most.rows, dtype=torch.int64, device=device)

    def view(self, sizes: Sizes) -> DeltaPlan:
        """The plan that lies here."""
        widths = sizes.rows, sizes.chunks + sizes.tails, sizes.prompts
        records, tiles, chunk_rows = (
            numbers[: height * width].view(height, width)
            for numbers, height, width in zip(self._numbers, (6, 3, 2), widths, strict=True)
        )
        return DeltaPlan(
            records=records,
            states=self._states[: sizes.rows],
            tiles=tiles,
            chunk_rows=chunk_rows,
            tail_rows=self._tails[: sizes.tails],
            num_chunks=sizes.chunks,
            longest=CHUNK,
            outputs=Outputs(),
        )

    def fill(self, sizes: Sizes, plan: DeltaPlan) -> None:
        """Lay out `plan` here."""
        kept, nobody = self.view(sizes), sizes.rows - 1
        _pad(kept.records, plan.records, (0,) * 6)
        _pad(kept.states[None], plan.states[None], (0,))
        border, of_padding = sizes.chunks, (nobody, 0, _NOWHERE)
        _pad(kept.tiles[:, :border], plan.tiles[:, : plan.num_chunks], of_padding)
        _pad(kept.tiles[:, border:], plan.tiles[:, plan.num_chunks :], of_padding)
        _pad(kept.chunk_rows, plan.chunk_rows, (nobody, 0))
        _pad(kept.tail_rows[None], plan.tail_rows[None], (nobody,))


def _pad(kept: Tensor, columns: Tensor, padding: tuple[int, ...]) -> None:
    """Fill kept [fields, n] with columns [fields, up to n], and behind them with `padding`."""
    count = columns.shape[1]
    kept[:, :count] = columns
    for row, number in zip(kept, padding, strict=True):
        row[count:] = number


def _columns(table: Sequence[tuple[int, ...]], width: int) -> list[int]:
    """Column after column."""
    return [row[column] for column in range(width) for row in table]
