"""From the rows of a plan to the inputs of a model, out of the slot table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from unisono.models.interface import ForwardBatch
from unisono.ops.transfer import on_host, runs, upload_all
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s
from unisono.workers.step_parts import StepParts

_CHUNK, _DECODE = int(Phase.CHUNK), int(Phase.DECODE)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device: T tokens, of which S are sampled behind, in R rows."""

    rows: Rows
    """Those of the plan as they are computed: drafts counted, and starts where they are."""
    batch: ForwardBatch
    slot_of_token: Tensor
    """[T] int64; slot 0, which is scratch, for rows whose answer has ended."""
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
    """Builds steps of one rank: their rows may hold drafts where its slots may."""

    def __init__(self, parts: StepParts) -> None:
        self._parts, self._slots = parts, parts.slots

    def build(self, plan: StepPlan) -> StepInputs:
        """Expand the rows of `plan`, whose changes the slot table has gone through.

        Every position must have its block and its token there. The host waits for the device only
        where rows decode behind drafts: how many were right, only the device knows.
        """
        return self.lay_out(plan, *self._settled(plan.rows))

    def lay_out(self, plan: StepPlan, rows: Rows, num_pending: list[int]) -> StepInputs:
        """The same of what `rows` are known, or said, to be. Waits for nothing."""
        # The last tokens of each row: as many as are sampled behind.
        sizes = [
            each if phase == _DECODE else int(phase != _CHUNK)
            for phase, each in zip(rows.phase, rows.count, strict=True)
        ]
        count, sampled, total = on_host(rows.count), on_host(sizes), sum(rows.count)
        slot = on_host(rows.slot).repeat_interleave(count, output_size=total)
        position = runs(on_host(rows.start), count, total)
        index = runs(count.cumsum(0) - sampled, sampled, sum(sizes))
        slots_of, positions, slot_of_row, logits_index, sample_slots, sample_positions = upload_all(
            self._slots.token_ids.device,
            *(slot, position, rows.slot, index),
            *(slot.index_select(0, index), position.index_select(0, index) + 1),
        )
        if _DECODE in rows.phase:
            going_on = self._slots.going_on()
            slots_of, slot_of_row = going_on[slots_of], going_on[slot_of_row]
        tokens = self._slots.token_ids[slots_of, positions]
        delta = None
        if self._parts.states is not None:
            delta = self._plan_delta(plan, rows, slot_of_row, num_pending)
        return StepInputs(
            rows=rows,
            batch=self._batch(tokens, slots_of, positions, slot_of_row, rows, delta),
            slot_of_token=slots_of,
            logits_index=logits_index,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            row_slots=[*compress(rows.slot, sizes)],
            sizes=[*filter(None, sizes)],
        )

    def one_each(
        self, slots: Sequence[int], positions: Sequence[int], token_ids: Tensor
    ) -> ForwardBatch:
        """A batch of one token for each of `slots`, without recurrent states; token_ids [R]. What
        is of slots that have ended goes to scratch."""
        rows = Rows(slot=int32s(slots), start=int32s(positions), count=int32s([1] * len(slots)))
        device = self._slots.token_ids.device
        numbers, at = upload_all(device, rows.slot, rows.start)
        slot_of_row = self._slots.going_on()[numbers]
        return self._batch(token_ids, slot_of_row, at, slot_of_row, rows, None)

    def _settled(self, rows: Rows) -> tuple[Rows, list[int]]:
        """The rows as they are computed, and how many tokens are pending of each; [] is none.

        Where drafts may be in flight the plan knows no start of a row that decodes. Prompts have no
        drafts behind them, and steps of nothing else ask for nothing.
        """
        if not self._slots.num_drafts or Phase.DECODE not in rows.phase:
            return rows, []
        table = self._slots
        [slots] = upload_all(table.lengths.device, rows.slot)
        lengths, num_pending = torch.stack(
            (table.lengths[slots], table.num_pending[slots])
        ).tolist()
        start, count = rows.start[:], rows.count[:]
        for row, drafts in enumerate(rows.drafts or repeat(0, len(rows))):
            if rows.phase[row] == Phase.DECODE:
                start[row] = lengths[row] - 1
                count[row] += drafts
        settled = Rows(slot=rows.slot, start=start, count=count, phase=rows.phase)
        return settled, num_pending

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
        # Where a block is missing: drafts that have none yet begin at the first place of block 0.
        place = (positions % BLOCK_SIZE).masked_fill_(slot_of_token == 0, BLOCK_SIZE - 1)
        tables = self._slots.block_table[slot_of_row]
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=place.add_(block, alpha=BLOCK_SIZE),
            attention={
                window: self._parts.ops.plan_attention(
                    self._parts.shape, rows.start, rows.count, tables, window
                )
                for window in self._parts.windows
            },
            delta=delta,
        )

    def _plan_delta(
        self, plan: StepPlan, rows: Rows, slot_of_row: Tensor, num_pending: list[int]
    ) -> Any:
        row_of = {slot: row for row, slot in enumerate(rows.slot)}
        saves = zip(plan.save_slot, plan.save_length, plan.save_state, strict=True)
        holds_back = [drafts > 0 for drafts in plan.rows.drafts]
        late = {"num_pending": num_pending, "holds_back": holds_back}
        return self._parts.ops.plan_delta(
            rows.start,
            rows.count,
            [self._slots.sampling.of(slot).num_prompt_tokens for slot in rows.slot],
            self._slots.states[slot_of_row],
            [(row_of[slot], length, state) for slot, length, state in saves],
            device=slot_of_row.device,
            **(late if self._slots.num_drafts else {}),
        )
