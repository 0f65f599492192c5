"""Steps in which some rows decode behind drafts and others compute prompts, on a GPU.

How many drafts were right in the step before, and so where a row begins, only the device knows
when the host lays such a step out. So the host takes each row that decodes to begin where it may
begin at the most and to have all its places: that says how much is launched. Then the device
writes over it what is true, and nobody has waited. From there on it is a step of `DraftSteps`, run
eagerly: the rows that answer are those that decode, and prompts that end, which have no drafts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from unisono.ops.reference.draft_plan import Settled
from unisono.ops.transfer import upload_all
from unisono.workers.batch_builder import BatchBuilder, StepInputs
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.draft_steps import MOST_AHEAD, DraftSteps, drafts_of, width_of
from unisono.workers.protocol import Phase, Rows, StepPlan
from unisono.workers.step_parts import StepParts


class MixedSteps:
    """Lays such steps out and ends them with `drafts`, whose buffers it uses."""

    def __init__(self, parts: StepParts, builder: BatchBuilder, drafts: DraftSteps) -> None:
        # Triton is loaded where there is a GPU only.
        from unisono.ops.kernels import attention, draft_plan, gaps

        self._attention, self._draft_plan, self._gaps = attention, draft_plan, gaps
        self._parts, self._slots = parts, parts.slots
        self._builder, self._drafts = builder, drafts

    def serves(self, plan: StepPlan) -> bool:
        """Whether some rows decode and others do not, and all of them need logits and noise only
        and want tokens only; drafts that may be rejected are judged elsewhere."""
        kinds, slots = self._slots.sampling, plan.rows.slot
        return (
            Phase.DECODE in plan.rows.phase
            and not plan.rows.decode_only
            and not any(self._parts.windows)
            and kinds.want_only_tokens(slots)
            and all(kinds.of(slot).prompt_logprobs < 0 for slot in slots)
            and not kinds.reject_drafts(plan)
        )

    def lay_out(self, plan: StepPlan) -> StepInputs:
        """The inputs of the step; of its rows `StepInputs.rows` says the most that they may be."""
        rows, width = self._bounds(plan), width_of(plan)
        inputs = self._builder.lay_out(plan, rows, [0] * len(rows))
        decoding = [row for row, phase in enumerate(rows.phase) if phase == Phase.DECODE]
        firsts = [0, *accumulate(rows.count)]
        few = [row for row, count in enumerate(rows.count) if count <= self._attention.FEW]
        place_among = {row: place for place, row in enumerate(few)}
        used = [
            (i, row, place) for i, row in enumerate(decoding) for place in range(rows.count[row])
        ]
        slots, drafts, here, there, of_few, of_row = upload_all(
            inputs.logits_index.device,
            [rows.slot[row] for row in decoding],
            [drafts_of(plan.rows)[row] for row in decoding],
            [i * width + place for i, _, place in used],
            [firsts[row] + place for _, row, place in used],
            [place_among[row] for row in decoding],
            decoding,
        )
        table, batch = self._slots.tensors, inputs.batch
        true = self._draft_plan.expand_drafts(slots, drafts, table, width, BLOCK_SIZE, 1)
        for numbers, places in (
            (batch.token_ids, true.token_ids),
            (batch.positions, true.positions),
            (batch.slot_mapping, true.slot_mapping),
        ):
            numbers.index_copy_(0, there, places.index_select(0, here))
        [(window, attention)], delta = batch.attention.items(), batch.delta
        # Positions and counts; which row it is, and where its tokens and partials lie, is so.
        attention.few.records[2:4].index_copy_(1, of_few, true.attention[2:4])
        attention = replace(attention, outputs=self._gaps.Outputs())
        if delta is not None:
            delta.records[1:3].index_copy_(1, of_row, true.delta[1:3])
            delta.records[4:6].index_copy_(1, of_row, true.delta[4:6])
            delta = replace(delta, outputs=self._gaps.Outputs())
        batch = replace(batch, attention={window: attention}, delta=delta)
        return replace(inputs, batch=batch)

    def tail(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Choose tokens behind hidden [T, width], keep those up to the first that ends an answer or
        is behind a wrong draft, and draft for the next step; return the answers [rows, 1 + width]
        of the rows that have any."""
        rows, width, batch = inputs.rows, width_of(plan), inputs.batch
        # Each row has all its places here: those that it has not are its last one again.
        begins = zip(accumulate(inputs.sizes, initial=0), inputs.sizes, strict=False)
        index = [at + min(place, size - 1) for at, size in begins for place in range(width)]
        [spread] = upload_all(hidden.device, index)
        at = inputs.logits_index.index_select(0, spread)

        def show(settled: Settled) -> Tensor:
            following = self._slots.token_ids[inputs.slot_of_token, batch.positions + 1]
            made = self._parts.draft(following, hidden, batch)
            return made.index_select(0, at.index_select(0, settled.last))

        return self._drafts.finish_eagerly(
            plan,
            inputs.row_slots,
            max(map(sum, zip(rows.start, rows.count, strict=True))),
            hidden.index_select(0, at),
            batch.token_ids.index_select(0, at),
            batch.positions.index_select(0, at),
            show,
        )

    def _bounds(self, plan: StepPlan) -> Rows:
        """The rows as long, and as far on, as they may be."""
        rows, width, length = plan.rows, width_of(plan), self._slots.max_model_len
        start, count = rows.start[:], rows.count[:]
        for row, phase in enumerate(rows.phase):
            if phase == Phase.DECODE:
                ahead = start[row] + MOST_AHEAD * self._slots.num_drafts
                start[row] = max(start[row], min(ahead, length - width))
                count[row] = min(width, length - start[row])
        return Rows(slot=rows.slot, start=start, count=count, phase=rows.phase)
