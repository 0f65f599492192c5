"""From the rows of a plan to the inputs of a model, out of the slot table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from unisono.models.interface import ForwardBatch
from unisono.ops.attention import AttentionShape
from unisono.ops.table import Ops
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s
from unisono.workers.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device: T tokens, of which S are sampled behind, in R rows."""

    rows: Rows
    """Those of the plan as they are computed: drafts counted, and starts where they are."""
    batch: ForwardBatch
    slot_of_token: Tensor
    """[T] int64."""
    logits_index: Tensor
    """[S] index in the batch of each token that one is sampled behind."""
    sample_slots: Tensor
    """[S] slots that receive a token."""
    sample_positions: Tensor
    """[S] its position in the request."""
    row_slots: list[int]
    """The sampling rows' slots, R."""
    sizes: list[int]
    """How many of the S each of them has: 1, and one for each draft."""


class BatchBuilder:
    """Builds steps for one model: `shape` are its local heads, `windows` the ones it uses.

    `is_hybrid`: it has recurrent states. `speculates`: rows may hold drafts.
    """

    def __init__(
        self,
        ops: Ops,
        slots: SlotTable,
        shape: AttentionShape,
        windows: Iterable[int],
        *,
        is_hybrid: bool = False,
        speculates: bool = False,
    ) -> None:
        self._ops = ops
        self._slots = slots
        self._shape = shape
        self._windows = tuple(sorted(set(windows)))
        self._is_hybrid = is_hybrid
        self._speculates = speculates

    def build(self, plan: StepPlan) -> StepInputs:
        """Expand the rows of `plan`, whose changes the slot table has gone through.

        Every position must have its block and its token there.
        """
        rows, device = self._expanded(plan.rows), self._slots.token_ids.device
        slot = torch.tensor(rows.slot, dtype=torch.int64)
        start = torch.tensor(rows.start, dtype=torch.int64)
        count = torch.tensor(rows.count, dtype=torch.int64)
        stop = count.cumsum(0)
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), count)
        positions = torch.arange(len(row_of_token)) + (start - stop + count)[row_of_token]
        slot_of_token = slot[row_of_token].to(device)
        slot_of_row, positions = slot.to(device), positions.to(device)
        delta = self._plan_delta(plan, rows, slot_of_row) if self._is_hybrid else None
        tokens = self._slots.token_ids[slot_of_token, positions]
        batch = self._batch(tokens, slot_of_token, positions, slot_of_row, rows, delta)
        sizes = [
            0 if phase == Phase.CHUNK else 1 if phase == Phase.PROMPT else each
            for phase, each in zip(rows.phase, rows.count, strict=True)
        ]
        sampled = torch.tensor(sizes)
        # The last tokens of each row: as many as are sampled behind.
        samples = torch.arange(len(row_of_token)) >= (stop - sampled)[row_of_token]
        samples = samples.to(device)
        return StepInputs(
            rows,
            batch,
            slot_of_token,
            samples.nonzero().flatten(),
            slot_of_token[samples],
            positions[samples] + 1,
            [number for number, size in zip(rows.slot, sizes, strict=True) if size],
            [size for size in sizes if size],
        )

    def one_each(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> ForwardBatch:
        """A batch of one token for each of `slots`, without recurrent states; all [R] int64."""
        starts = int32s(positions.tolist())
        rows = Rows(slot=starts, start=starts, count=int32s([1] * len(starts)))
        return self._batch(token_ids, slots, positions, slots, rows, None)

    def _expanded(self, rows: Rows) -> Rows:
        """The rows as they are computed. Where drafts may be in flight the plan knows no start."""
        if not self._speculates:
            return rows
        lengths = self._slots.lengths[torch.tensor(rows.slot, dtype=torch.int64)].tolist()
        start, count = rows.start[:], rows.count[:]
        for row, drafts in enumerate(rows.drafts or repeat(0, len(rows))):
            if rows.phase[row] == Phase.DECODE:
                start[row] = lengths[row] - 1
                count[row] += drafts
        return Rows(slot=rows.slot, start=start, count=count, phase=rows.phase)

    def _batch(
        self,
        token_ids: Tensor,
        slot_of_token: Tensor,
        positions: Tensor,
        slot_of_row: Tensor,
        rows: Rows,
        delta: Any,
    ) -> ForwardBatch:
        block = self._slots.block_table[slot_of_token, positions // BLOCK_SIZE]
        tables = self._slots.block_table[slot_of_row]
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=block * BLOCK_SIZE + positions % BLOCK_SIZE,
            attention={
                window: self._ops.plan_attention(
                    self._shape, rows.start, rows.count, tables, window
                )
                for window in self._windows
            },
            delta=delta,
        )

    def _plan_delta(self, plan: StepPlan, rows: Rows, slot_of_row: Tensor) -> Any:
        row_of = {slot: row for row, slot in enumerate(rows.slot)}
        saves = zip(plan.save_slot, plan.save_length, plan.save_state, strict=True)
        held: dict[str, Sequence[int] | Sequence[bool]] = {}
        if self._speculates:
            drafts = plan.rows.drafts or [0] * len(rows)
            held["num_pending"] = self._slots.num_pending[slot_of_row].tolist()
            held["holds_back"] = [each > 0 for each in drafts]
        return self._ops.plan_delta(
            rows.start,
            rows.count,
            [self._slots.sampling.of(slot).num_prompt_tokens for slot in rows.slot],
            self._slots.states[slot_of_row],
            [(row_of[slot], length, state) for slot, length, state in saves],
            device=slot_of_row.device,
            **held,
        )
