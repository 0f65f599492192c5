"""Steps in which every row decodes, on a GPU: two graph replays, and nothing from the host but
which slots take part.

The forward graph is named by its height (rows, padded) and by how many splits of keys its rows may
see; the tail, for steps whose rows need their logits and noise at most, by its height and whether
there is noise. What the host knows of a step is the slots: tokens and positions come out of the
slot table, and go back into it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.models.interface import ForwardBatch
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Rows
from unisono.workers.step_buffers import StepBuffers
from unisono.workers.step_parts import StepParts


class DecodeSteps:
    """Runs decode steps of up to `buffers.max_rows` rows."""

    def __init__(self, parts: StepParts, buffers: StepBuffers) -> None:
        # Triton is loaded where there is a GPU only.
        from unisono.ops.kernels import attention, decode, delta_plan

        self._attention, self._decode, self._delta_plan = attention, decode, delta_plan
        self._parts, self._slots, self._buffers = parts, parts.slots, buffers

    def serves(self, rows: Rows) -> bool:
        """Whether every row decodes, and there are not too many."""
        return len(rows) <= self._buffers.max_rows and rows.decode_only

    def forward(self, rows: Rows) -> Tensor:
        """Run the model; return the hidden states [rows, width], good until the next step."""
        height, eager = sized(len(rows), self._parts.buckets)
        # A power of two, so that a request that grows does not want a graph of its own again.
        num_splits = 1 << (max(rows.start) // self._attention.SPLIT).bit_length()
        self._buffers.give_slots(rows.slot, height)
        key = (height, num_splits)
        self._parts.graphs.run("forward", key, lambda: self._forward(*key), eager)
        return self._buffers.hidden[: len(rows)]

    def tail(self, rows: Rows, draws: bool) -> Tensor:
        """Append to each slot its likeliest token, or, if it `draws`, the one that noise chose, and
        none where its answer has ended; return the answers [rows, 2]."""
        height, eager = sized(len(rows), self._parts.buckets)
        key = (height, draws)
        return self._parts.graphs.run("tail", key, lambda: self._tail(*key), eager)[: len(rows)]

    def _forward(self, height: int, num_splits: int) -> None:
        buffers, slots = self._buffers, self._slots
        token_ids, positions = buffers.token_ids[:height], buffers.positions[:height]
        slot_mapping = buffers.slot_mapping[:height]
        plans, records = {}, torch.empty(0)
        for window in self._parts.windows:
            splits_of_row = self._attention.splits_of_row(num_splits, window)
            records = torch.empty(5, height, dtype=torch.int32, device=buffers.slots.device)
            plans[window] = self._attention.plan_records(
                self._parts.shape, records, slots.block_table, splits_of_row, window
            )
            self._decode.expand_rows(
                *(buffers.slots[:height], slots.tensors, BLOCK_SIZE, splits_of_row),
                *(token_ids, positions, slot_mapping, records),
            )
        delta = None if self._parts.states is None else self._delta(positions, records[0])
        token_ids = buffers.padded(token_ids, height)
        batch = ForwardBatch(token_ids, positions, slot_mapping, plans, delta)
        buffers.hidden[:height].copy_(self._parts.forward(batch))

    def _delta(self, positions: Tensor, slots: Tensor) -> Any:
        """The recurrent rows: each one token behind its prompt, wherever that is. Padding, and what
        has ended, begins from nothing, at position 0 of scratch."""
        return self._delta_plan.plan_decode(positions, self._slots.states.index_select(0, slots))

    def _tail(self, height: int, draws: bool) -> Tensor:
        slots, of_row = self._slots, self._buffers.slots[:height]
        logits = self._parts.model.logits(self._buffers.hidden[:height])
        if draws:
            temperature, seeds = slots.sampling.draws(of_row)
            keys = self._parts.sampler.drawn_keys(logits, temperature, seeds, slots.lengths[of_row])
        else:
            keys = self._parts.sampler.greedy_keys(logits)
        return self._decode.advance_rows(keys, of_row, slots.tensors)


def sized(num_rows: int, buckets: Sequence[int]) -> tuple[int, str]:
    """The height of a step of `num_rows`, and why there is no graph of it, if there is none."""
    place = bisect_left(buckets, num_rows)
    if place < len(buckets):
        return buckets[place], ""
    return num_rows, "more rows than graph buckets"
