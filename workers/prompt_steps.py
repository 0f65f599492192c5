"""Short steps with prompts, on a GPU: their forward pass is replayed from a graph.

The host lays such a step out as any other (`BatchBuilder`); launching its kernels one by one would
take the host longer than the device takes to run them. So what was laid out is copied to fixed
addresses and padded: tokens that are no row's belong to slot 0, whose block is scratch, and
attention and recurrent layers have rows of no tokens. A graph is named by all that says how much is
launched. Longer steps, in which the device is the slower one, run eagerly.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unisono.models.interface import ForwardBatch
from unisono.ops.delta import CHUNK
from unisono.workers.batch_builder import StepInputs
from unisono.workers.step_buffers import random_tokens
from unisono.workers.step_parts import StepParts

if TYPE_CHECKING:
    from unisono.ops.kernels.delta_plan import DeltaPlan, Sizes

HEIGHTS = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a step, padding included."""
PROMPTS = (1, 4, 16)
"""Rows of a step that have recurrent states and tokens of a prompt, padding included."""


class Layout(NamedTuple):
    """The sizes of a step."""

    height: int
    """Tokens."""
    few: int
    """Rows that the decode kernel takes, one of the buckets; 0: no row has so few queries."""
    longest: int
    """Most queries of these."""
    num_splits: int
    """Most splits of keys that these see."""
    many: int
    """Runs of tokens that the prefill kernel takes; 0 as well."""
    delta: Sizes | None = None
    """Of what the recurrent layers take, if there are any."""


class PromptSteps:
    """Runs the model on steps of up to HEIGHTS[-1] tokens.

    `padding_ids`: as in `StepBuffers`.
    """

    def __init__(self, parts: StepParts, padding_ids: int = 0) -> None:
        # Triton is loaded where there is a GPU only.
        from unisono.ops.kernels import attention, delta_plan

        self._attention, self._delta_plan = attention, delta_plan
        self._parts, self._buckets = parts, parts.buckets
        device, most = parts.slots.token_ids.device, HEIGHTS[-1]
        self._numbers = torch.zeros((3, most), dtype=torch.int64, device=device)
        self._padding = torch.zeros((3, most), dtype=torch.int64, device=device)
        self._padding[0] = random_tokens(padding_ids, most, device)
        most_few = max(self._buckets, default=0)
        if parts.states is not None:
            sizes = self._sizes(most, PROMPTS[-1], most_few)
            self._delta = delta_plan.PaddedPlans(sizes, device)
        fields, runs = attention.NUM_FIELDS, attention.most_runs(parts.shape, most)
        self._few, self._many = (
            torch.zeros((len(parts.windows), fields * count), dtype=torch.int32, device=device)
            for count in (most_few, runs)
        )

    def layout(self, inputs: StepInputs) -> Layout | None:
        """The sizes of a step, padded; None where no graph of it is wanted."""
        kernels, rows, batch = self._attention, inputs.rows, inputs.batch
        if len(batch.token_ids) > HEIGHTS[-1]:
            return None
        few = [
            (start, count)
            for start, count in zip(rows.start, rows.count, strict=True)
            if count <= kernels.FEW
        ]
        if len(few) > max(self._buckets, default=0):
            return None
        height, delta = HEIGHTS[bisect_left(HEIGHTS, len(batch.token_ids))], None
        if batch.delta is not None and (delta := self._padded_sizes(height, batch.delta)) is None:
            return None
        last = max((start + count - 1 for start, count in few), default=0)
        return Layout(
            height=height,
            few=self._buckets[bisect_left(self._buckets, len(few))] if few else 0,
            longest=kernels.FEW if any(count > 1 for _, count in few) else 1,
            # A power of two, so that a request that grows does not want a graph of its own again.
            num_splits=1 << (last // kernels.SPLIT).bit_length(),
            many=kernels.most_runs(self._parts.shape, height) if len(few) < len(rows) else 0,
            delta=delta,
        )

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """Run the model; return the hidden states [T, width], good until another replay.

        None: there is no graph of such a step, and nothing was run.
        """
        if (layout := self.layout(inputs)) is None:
            return None
        self._fill(inputs, layout)
        hidden = self._parts.graphs.run("forward", layout, lambda: self._forward(layout))
        return hidden[: len(inputs.batch.token_ids)]

    def _padded_sizes(self, height: int, plan: DeltaPlan) -> Sizes | None:
        """Of what the recurrent layers take, padded; None where there is no room for it."""
        most = PROMPTS[-1], max(self._buckets, default=0)
        counts = self._delta_plan.count_rows(plan)
        if counts is None or any(count > limit for count, limit in zip(counts, most, strict=True)):
            return None
        prompts, tails = (
            ladder[bisect_left(ladder, count)] if count else 0
            for ladder, count in zip((PROMPTS, self._buckets), counts, strict=True)
        )
        return self._sizes(height, prompts, tails)

    def _sizes(self, height: int, prompts: int, tails: int) -> Sizes:
        """Of a step of so many tokens and rows: a prompt may end with a chunk that is not full."""
        chunks = height // CHUNK + prompts if prompts else 0
        return self._delta_plan.Sizes(chunks, prompts, tails)

    def _fill(self, inputs: StepInputs, layout: Layout) -> None:
        batch = inputs.batch
        count, height = len(batch.token_ids), layout.height
        self._numbers[:, count:height] = self._padding[:, count:height]
        given = (batch.token_ids, batch.positions, batch.slot_mapping)
        for numbers, those in zip(self._numbers, given, strict=True):
            numbers[:count] = those
        if layout.delta is not None:
            self._delta.fill(layout.delta, batch.delta)
        for number, window in enumerate(self._parts.windows):
            plan = batch.attention[window]
            for queries, kept, room in (
                (plan.few, self._few, layout.few),
                (plan.many, self._many, layout.many),
            ):
                if queries is None:
                    continue
                records = self._attention.view_records(kept[number], room)
                records[:, queries.records.shape[1] :] = 0
                own = records[:, : queries.records.shape[1]]
                own.copy_(queries.records)
                # The plan's rows are those of the step; here they are slots.
                own[0] = inputs.slot_of_token.index_select(0, own[1])

    def _forward(self, layout: Layout) -> Tensor:
        token_ids, positions, slot_mapping = self._numbers[:, : layout.height]
        plans = {
            window: self._attention.plan_padded(
                self._parts.shape,
                self._parts.slots.block_table,
                self._attention.view_records(self._few[number], layout.few),
                self._attention.view_records(self._many[number], layout.many),
                longest=layout.longest,
                num_splits=layout.num_splits,
                window=window,
            )
            for number, window in enumerate(self._parts.windows)
        }
        delta = None if layout.delta is None else self._delta.view(layout.delta)
        batch = ForwardBatch(token_ids, positions, slot_mapping, plans, delta)
        return self._parts.forward(batch)
