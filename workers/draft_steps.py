"""Steps in which every row decodes, of an engine that drafts, on a GPU: two graph replays, and
nothing from the host but which slots take part and how many drafts each has.

Every row has as many places as one with all drafts of its step; what is left over computes nothing
that anybody reads. The forward graph is named by its height (rows, padded), its width (places) and
how many splits of keys its rows may see; the tail, which accepts drafts and makes the next ones,
also by what it does beside (`Variant`). Which drafts were right, and so where the next step begins,
the slot table knows: the host learns it late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unisono.models.interface import ForwardBatch
from unisono.ops.reference.draft_plan import Settled
from unisono.ops.reference.sampling import key_of_id
from unisono.ops.transfer import upload_all
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.decode_steps import sized
from unisono.workers.protocol import Phase, Rows, SlotSampling, StepPlan
from unisono.workers.speculator import PIECE_PLACES, Speculator, is_forced
from unisono.workers.step_buffers import StepBuffers
from unisono.workers.step_parts import StepParts

if TYPE_CHECKING:
    from unisono.ops.kernels.draft_plan import Places

MOST_AHEAD = 4
"""Steps that may be in flight when one is planned, at the most: there are fewer."""
PIECE_ROWS = 256
"""Rows of logits at a time: with 150,000 ids 256 of them take 150 MB, and a step may have many
times as many."""


class Layout(NamedTuple):
    """What the graphs of a step are named by."""

    height: int
    width: int
    num_splits: int


class Variant(NamedTuple):
    """What the tail of a step does beside."""

    num_drafts: int
    """It makes so many drafts behind each row."""
    draws: bool
    """Noise has a part in some rows."""
    rejects: bool
    """Drafts of some rows, those judged or those made, may be rejected."""


Recipe = tuple[Tensor, Tensor, Tensor]
"""Temperatures, seeds and positions [S] of tokens that are drawn."""
Judge = Callable[[Tensor, Tensor, int], None]
"""Puts the outcome for drafts that may be rejected in the place of their keys [n], by logits [n,
this rank's rows] of whole rows, the first place of which is the number given."""


class DraftSteps:
    """Runs decode steps of up to `buffers.max_rows` rows, with drafts or without."""

    def __init__(
        self,
        parts: StepParts,
        buffers: StepBuffers,
        forced: float = 0.0,
        speculator: Speculator | None = None,
    ) -> None:
        """`forced`: which part of the drafts is taken for right. `speculator` does the same eagerly
        and keeps what both must know of drafts that may be rejected."""
        # Triton is loaded where there is a GPU only.
        from unisono.ops.kernels import attention, delta_plan, draft_plan

        self._attention, self._delta_plan, self._kernels = attention, delta_plan, draft_plan
        self._parts, self._slots, self._buffers = parts, parts.slots, buffers
        self._forced, self._speculator = forced, speculator
        self._table = self._slots.tensors

    def serves(self, rows: Rows) -> bool:
        """Whether every row decodes, and there are not too many."""
        return len(rows) <= self._buffers.max_rows and rows.decode_only

    def forward(self, plan: StepPlan) -> None:
        """Run the model over the newest token of each row and its drafts."""
        rows, (layout, eager) = plan.rows, self._layout(plan)
        self._buffers.give_slots(rows.slot, layout.height, drafts_of(rows))
        self._parts.graphs.run("forward", layout, lambda: self._forward(layout), eager)

    def hidden(self, plan: StepPlan) -> Tensor:
        """What `forward` made of the rows' tokens, [T, hidden], in their order."""
        hidden = self._buffers.hidden
        return hidden[upload_all(hidden.device, used_places(plan))[0]]

    def tail(self, plan: StepPlan, *, draws: bool, rejects: bool = False) -> Tensor:
        """Choose tokens, keep those up to the first that ends an answer or is behind a wrong draft,
        and draft for the next step; return the answers [rows, 1 + width].

        Only where `why_on_host` of the rows says nothing. `draws`: some of them are not greedy.
        `rejects`: drafts of some may be rejected.
        """
        (layout, eager), variant = self._layout(plan), Variant(plan.num_proposals, draws, rejects)
        if rejects:
            self._drafted_from()  # whose memory is no graph's
        key = (*layout, *variant)
        answers = self._parts.graphs.run("tail", key, lambda: self._tail(layout, variant), eager)
        return answers[: len(plan.rows)]

    def finish_eagerly(
        self,
        plan: StepPlan,
        slots: Sequence[int],
        last: int,
        hidden: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        show: Callable[[Settled], Tensor],
    ) -> Tensor:
        """The tail of a step that was laid out otherwise: the rows that answer are of `slots`, no
        token of them is behind position `last`, and no draft may be rejected. The rest as `_finish`
        has it."""
        layout = Layout(len(slots), width_of(plan), self._most_splits(last))
        variant = Variant(plan.num_proposals, self._slots.sampling.draw(slots), False)
        self._buffers.give_slots(slots, layout.height, drafts_answering(plan.rows))
        places = (hidden, token_ids, positions, show)
        return self._parts.graphs.run(
            "tail", layout, lambda: self._finish(layout, variant, *places), "prompt tokens"
        )

    def _layout(self, plan: StepPlan) -> tuple[Layout, str]:
        """Of a step, and why there is no graph of it, if there is none."""
        # What was in flight when the step was planned may have added so many tokens to a row.
        last = max(plan.rows.start) + MOST_AHEAD * self._buffers.num_drafts
        height, eager = sized(len(plan.rows), self._parts.buckets)
        return Layout(height, width_of(plan), self._most_splits(last)), eager

    def _most_splits(self, last: int) -> int:
        """Of keys that rows see which begin at position `last` or before, drafts made behind those
        of the step included."""
        most = last + self._buffers.num_drafts
        # A power of two, so that a request that grows does not want a graph of its own again.
        return 1 << (most // self._attention.SPLIT).bit_length()

    def _forward(self, layout: Layout) -> None:
        places, batch = self._expanded(layout)
        if self._parts.states is not None:
            records, width = places.delta, layout.width
            delta = self._delta_plan.plan_records(records, places.states, width)
            batch = replace(batch, delta=replace(delta, may_hold=width > 1))
        hidden = self._buffers.hidden[: len(batch.token_ids)]
        hidden.copy_(self._parts.forward(batch))

    def _tail(self, layout: Layout, variant: Variant) -> Tensor:
        """[height, 1 + width] int64: of each row how many tokens it answers, and these."""
        hidden = self._buffers.hidden[: layout.height * layout.width]
        # Before lengths grow: the layer that drafts sees the tokens where the model saw them.
        _, batch = self._expanded(layout)

        def show(settled: Settled) -> Tensor:
            made = self._parts.draft(settled.following, hidden, batch)
            return made.index_select(0, settled.last)

        return self._finish(layout, variant, hidden, batch.token_ids, batch.positions, show)

    def _finish(
        self,
        layout: Layout,
        variant: Variant,
        hidden: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        show: Callable[[Settled], Tensor],
    ) -> Tensor:
        """Settle the rows that the buffers name, of whose places hidden [height * width, hidden],
        token_ids and positions are, and draft on. `show` has the layer that drafts see the step,
        and returns its state behind each row's newest token."""
        (height, width, num_splits), (num_drafts, draws, rejects) = layout, variant
        slots, drafts = self._buffers.slots[:height], self._buffers.drafts(height)
        drawn = None
        if draws:
            slot_of_place = slots[:, None].expand(height, width).reshape(-1)
            drawn = (*self._slots.sampling.draws(slot_of_place), positions + 1)
        judge = None
        if drawn and rejects and width > 1:
            judge = self._rejection(layout, token_ids, drawn)
        keys = self._keys(self._parts.model.logits, hidden, drawn, width, judge)
        if self._forced:
            keys = self._judged(keys, token_ids, positions, layout)
        settled = self._kernels.settle_drafts(keys, slots, drafts, self._table, width)
        state = show(settled)
        for number in range(num_drafts):
            if draws:
                recipe = self._slots.sampling.draws(slots, drafting=True)
                drawn = (*recipe, self._slots.lengths[slots] + number)
            if rejects:
                self._drafted_from()[:, number].index_copy_(0, slots, state)
            keys = self._keys(self._parts.model.draft_logits, state, drawn)
            batch = self._drafted(keys, settled.answers, number, num_splits)
            if number + 1 < num_drafts:
                state = self._parts.draft(batch.token_ids, state, batch)
        return settled.answers

    def _judged(self, keys: Tensor, token_ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Keys that name the draft itself where it is forced."""
        height, width, _ = layout
        places = torch.arange(width, device=keys.device).expand(height, width)
        is_draft = (places < self._buffers.drafts(height)[:, None]).flatten()
        slots = self._buffers.slots[:height, None].expand(height, width).reshape(-1)
        forced = is_draft & is_forced(self._forced, slots, positions + 1)
        return torch.where(forced, key_of_id(token_ids.roll(-1)), keys)

    def _expanded(self, layout: Layout) -> tuple[Places, ForwardBatch]:
        """The step as the slot table has it; without recurrent states."""
        height, width, num_splits = layout
        slots, drafts = self._buffers.slots[:height], self._buffers.drafts(height)

        def places(splits: int) -> Places:
            return self._kernels.expand_drafts(
                slots, drafts, self._table, width, BLOCK_SIZE, splits
            )

        return self._planned(places, width, num_splits)

    def _drafted(self, keys: Tensor, answers: Tensor, number: int, num_splits: int) -> ForwardBatch:
        """Write draft `number` of each row, which `keys` name; return the step that drafts on."""
        slots, farthest = self._buffers.slots[: len(keys)], self._slots.max_model_len - 1

        def places(splits: int) -> Places:
            return self._kernels.place_drafts(
                keys, slots, answers, self._table, number, farthest, BLOCK_SIZE, splits
            )

        return self._planned(places, 1, num_splits)[1]

    def _planned(
        self, places_of: Callable[[int], Places], width: int, num_splits: int
    ) -> tuple[Places, ForwardBatch]:
        """`places_of` lays a step out for so many partials a row: the same but for those."""
        plans = {}
        for window in self._parts.windows:
            splits = self._attention.splits_of_row(num_splits, window, width)
            places = places_of(splits)
            plans[window] = self._attention.plan_records(
                *(
                    self._parts.shape,
                    places.attention,
                    self._slots.block_table,
                    splits,
                    window,
                    width,
                )
            )
        token_ids = self._buffers.padded(places.token_ids, len(places.token_ids) // width)
        batch = ForwardBatch(token_ids, places.positions, places.slot_mapping, plans)
        return places, batch

    def _rejection(self, layout: Layout, token_ids: Tensor, drawn: Recipe) -> Judge:
        """As `Speculator.judged` does it for rows that need logits and noise only. What the others
        have is judged as well, and the outcome left."""
        _, width, _ = layout
        drafted, most = token_ids.roll(-1), self._buffers.drafts(layout.height)

        def judge(keys: Tensor, logits: Tensor, begin: int) -> None:
            order = torch.arange(len(keys) // width * (width - 1), device=keys.device)
            rows, numbers = order // (width - 1), order % (width - 1)
            slots = self._buffers.slots[begin // width + rows]
            is_judged = self._slots.sampling.rejecting(slots)
            is_judged &= numbers < most[begin // width + rows]
            temperature, seeds, positions = (each[begin + rows * width + numbers] for each in drawn)
            temperature = temperature.masked_fill(~is_judged, 1.0)  # of others it may be 0
            for first in range(0, len(order), PIECE_PLACES):
                piece = slice(first, first + PIECE_PLACES)
                at = rows[piece] * width + numbers[piece]
                made_from = self._drafted_from()[slots[piece], numbers[piece]]
                outcome = self._parts.sampler.judge(
                    *(logits[at], self._parts.model.draft_logits(made_from), drafted[begin + at]),
                    (temperature[piece], seeds[piece], positions[piece]),
                )
                keys.index_copy_(0, at, torch.where(is_judged[piece], outcome, keys[at]))

        return judge

    def _drafted_from(self) -> Tensor:
        assert self._speculator is not None
        return self._speculator.drafted_from(self._buffers.hidden)

    def _keys(
        self,
        logits_of: Callable[[Tensor], Tensor],
        hidden: Tensor,
        drawn: Recipe | None,
        width: int = 1,
        judge: Judge | None = None,
    ) -> Tensor:
        """The winning key behind each of hidden [S, hidden], rows of `width` places; not `drawn`:
        all are greedy."""
        keys, most = [], max(PIECE_ROWS // width, 1) * width
        for begin in range(0, len(hidden), most):
            part = slice(begin, begin + most)
            logits = logits_of(hidden[part])
            if drawn is None:
                keys.append(self._parts.sampler.greedy_keys(logits))
            else:
                keys.append(self._parts.sampler.drawn_keys(logits, *(each[part] for each in drawn)))
            if judge is not None:
                judge(keys[-1], logits, begin)
        return keys[0] if len(keys) == 1 else torch.cat(keys)


def width_of(plan: StepPlan) -> int:
    """Places of each row of `plan`: the step after is as wide where drafts are made alike."""
    drafts = max(plan.rows.drafts, default=0)
    return 1 + max(drafts, plan.num_proposals) if drafts else 1


def used_places(plan: StepPlan) -> list[int]:
    """Which of the places of the rows of `plan` that answer have a token, row by row."""
    drafts, width = enumerate(drafts_answering(plan.rows)), width_of(plan)
    return [row * width + place for row, each in drafts for place in range(1 + each)]


def why_on_host(kinds: Sequence[SlotSampling]) -> str:
    """Why the tokens of these rows cannot be chosen in a graph; "": they can."""
    if not all(kind.needs_noise_only for kind in kinds):
        return "sampling"
    if any(kind.logprobs >= 0 for kind in kinds):
        return "log-probabilities"
    return "checksums" if any(kind.checksums for kind in kinds) else ""


def drafts_of(rows: Rows) -> Sequence[int]:
    """How many drafts each row has."""
    return rows.drafts or [0] * len(rows)


def drafts_answering(rows: Rows) -> list[int]:
    """The same of those rows that answer."""
    phases = zip(drafts_of(rows), rows.phase, strict=True)
    return [each for each, phase in phases if phase != Phase.CHUNK]
