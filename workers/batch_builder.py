"""From the rows of a plan to the inputs of a model, out of the slot table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.models.interface import ForwardBatch
from unisono.ops.attention import AttentionShape
from unisono.ops.table import Ops
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, StepPlan
from unisono.workers.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device. S rows sample a token."""

    batch: ForwardBatch
    logits_index: Tensor
    """[S] index of each sampling row's last token in the batch."""
    sample_slots: Tensor
    """[S] slots that receive a token."""
    sample_positions: Tensor
    """[S] its position in the request."""


class BatchBuilder:
    """Builds steps for one model: `shape` are its local heads, `windows` the ones it uses.

    `is_hybrid`: it has recurrent states.
    """

    def __init__(
        self,
        ops: Ops,
        slots: SlotTable,
        shape: AttentionShape,
        windows: Iterable[int],
        *,
        is_hybrid: bool = False,
    ) -> None:
        self._ops = ops
        self._slots = slots
        self._shape = shape
        self._windows = tuple(sorted(set(windows)))
        self._is_hybrid = is_hybrid

    def build(self, plan: StepPlan) -> StepInputs:
        """Expand the rows of `plan`, whose changes the slot table has gone through.

        Every position must have its block and its token there.
        """
        rows, device = plan.rows, self._slots.token_ids.device
        slot = torch.tensor(rows.slot, dtype=torch.int64)
        start = torch.tensor(rows.start, dtype=torch.int64)
        count = torch.tensor(rows.count, dtype=torch.int64)
        stop = count.cumsum(0)
        first = stop - count
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), count)
        positions = torch.arange(len(row_of_token)) + (start - first)[row_of_token]
        slot_of_token = slot[row_of_token].to(device)
        positions = positions.to(device)
        block = self._slots.block_table[slot_of_token, positions // BLOCK_SIZE]
        slot_of_row = slot.to(device)
        tables = self._slots.block_table[slot_of_row]
        batch = ForwardBatch(
            token_ids=self._slots.token_ids[slot_of_token, positions],
            positions=positions,
            slot_mapping=block * BLOCK_SIZE + positions % BLOCK_SIZE,
            attention={
                window: self._ops.plan_attention(
                    self._shape, rows.start, rows.count, tables, window
                )
                for window in self._windows
            },
            delta=self._plan_delta(plan, slot_of_row) if self._is_hybrid else None,
        )
        samples = torch.tensor([phase != Phase.CHUNK for phase in rows.phase], dtype=torch.bool)
        return StepInputs(
            batch,
            (stop - 1)[samples].to(device),
            slot[samples].to(device),
            (start + count)[samples].to(device),
        )

    def _plan_delta(self, plan: StepPlan, slot_of_row: Tensor) -> Any:
        rows = plan.rows
        row_of = {slot: row for row, slot in enumerate(rows.slot)}
        saves = zip(plan.save_slot, plan.save_length, plan.save_state, strict=True)
        return self._ops.plan_delta(
            rows.start,
            rows.count,
            [self._slots.sampling.of(slot).num_prompt_tokens for slot in rows.slot],
            self._slots.states[slot_of_row],
            [(row_of[slot], length, state) for slot, length, state in saves],
            device=slot_of_row.device,
        )
