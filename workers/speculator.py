"""Speculation on one rank: which drafts were right, and the drafts for the next step.

Drafts lie in the slot table behind the known tokens of their slot. A draft is right if it is the
token that the model itself chooses at its place: so whatever is drafted, the answer is the same.

Slots that say so have their drafts judged by rejection sampling instead: more of them are right,
and the answer is as likely as it always was, but which one it is depends on what was drafted. The
odds of each draft are computed anew from the state that it was drafted from, when it is judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.ops.reference.sampling import key_of_id
from unisono.ops.transfer import runs, upload_all
from unisono.workers.batch_builder import BatchBuilder, StepInputs
from unisono.workers.protocol import Phase
from unisono.workers.step_parts import StepParts

PIECE_PLACES = 32
"""Drafts that are judged at a time: with 150,000 ids these take 400 MB for a while."""
_UPPER = (1 << 32) - 1


def is_forced(share: float, slots: Tensor, positions: Tensor) -> Tensor:
    """Whether the draft at positions [n] of slots [n] is taken for right, [n] bool: of `share` of
    them, by a hash that every rank finds alike. Nothing is asked of the device."""
    x = (slots * 1_000_003 + positions) & _UPPER
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & _UPPER
    return (x ^ (x >> 16)) < round(share * 2**32)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What is left of a step's S sampled tokens once wrong drafts are gone. R rows."""

    answers: Tensor
    """[R, 1 + most] int64, as `settle_drafts` gives them."""
    last: Tensor
    """[R] int64: which of the S is each row's last answer; its first, if it has none."""
    counts: list[int]
    """How many answers each row has, as in `answers`."""


class Speculator:
    """Judges drafts and makes new ones with the model's own layer for it."""

    def __init__(self, parts: StepParts, builder: BatchBuilder, forced: float = 0.0) -> None:
        """`forced`: which part of the drafts is taken for right (`is_forced`)."""
        self._parts, self._builder, self._forced = parts, builder, forced
        self._slots, self._sampler = parts.slots, parts.sampler
        self._drafted_from: Tensor | None = None

    def drafted_from(self, like: Tensor) -> Tensor:
        """[slots, drafts, width]: the states, as `like` [n, width], that each slot's drafts were
        made from, if these may be rejected. Taken by the first call, and kept where it is: graphs
        read and write it."""
        if self._drafted_from is None:
            size = (len(self._slots.token_ids), self._slots.num_drafts, like.shape[1])
            self._drafted_from = like.new_zeros(size)
        return self._drafted_from

    def judged(self, inputs: StepInputs, logits: Tensor, keys: Tensor) -> Tensor:
        """Keys [S] of the tokens that drafts are compared with: those sampled from logits [S, this
        rank's rows]; of slots whose drafts may be rejected what rejection sampling gives; or, where
        one is forced, the draft itself."""
        keys = self._rejection_sampled(inputs, logits, keys)
        if not self._forced:
            return keys
        place = (inputs.sample_slots, inputs.sample_positions)
        is_last = torch.zeros(len(keys), dtype=torch.bool)
        is_last[torch.tensor(inputs.sizes).cumsum(0) - 1] = True
        forced = is_forced(self._forced, *place) & ~is_last.to(keys.device)
        return torch.where(forced, key_of_id(self._slots.token_ids[place]), keys)

    def accept(self, inputs: StepInputs, keys: Tensor) -> Accepted:
        """Append to each slot the tokens that keys [S] name, up to the first that ends its answer
        or is behind a wrong draft, that included.

        The recurrent states of rows with drafts do not hold these tokens yet: the slot table keeps
        how many they have to take in. Waits for the device: how many tokens are answers, the host
        must know to draft on.
        """
        sizes = torch.tensor(inputs.sizes)
        width, first = max(inputs.sizes), sizes.cumsum(0) - sizes
        at = runs(torch.arange(len(sizes)) * width, sizes, len(keys))
        slots, at, first, drafts = upload_all(keys.device, inputs.row_slots, at, first, sizes - 1)
        spread = keys.new_zeros(len(sizes) * width).index_copy_(0, at, keys)
        table = self._slots.tensors
        answers, _, last = self._parts.ops.settle_drafts(spread, slots, drafts, table, width)
        order = torch.arange(len(sizes), device=keys.device)
        counts: list[int] = answers[:, 0].tolist()
        return Accepted(answers, last - order * width + first, counts)

    def propose(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        num_drafts: int,
        accepted: Accepted | None,
    ) -> Tensor:
        """Show the drafting layer the step's tokens, then draft for every row that sampled.

        hidden [T, width] is what the model made of them; `accepted` is None where no row had
        drafts. Nothing is drafted for answers that have ended. Returns whether logits of a row's
        drafts held a NaN, [R] bool. Waits for nothing.
        The layer's keys and values lie at the position before the token that they are of, so at the
        end of a shared prefix there may be the pair of another continuation: that can only cost
        accepted drafts.
        """
        slots, batch = self._slots, inputs.batch
        following = slots.token_ids[inputs.slot_of_token, batch.positions + 1]
        drafting = self._parts.draft(following, hidden, batch)
        # The place before each row's newest token, and how long that made the row.
        ends, row_slots, lengths = inputs.logits_index, inputs.sample_slots, inputs.sample_positions
        counts = [1] * len(inputs.row_slots)
        if accepted is not None:
            ends, row_slots, lengths = (each[accepted.last] for each in (ends, row_slots, lengths))
            counts = [max(count, 1) for count in accepted.counts]
        lengths = lengths + 1
        goes_on = slots.going_on()[row_slots] > 0
        rows = zip(inputs.rows.start, inputs.rows.count, inputs.rows.phase, strict=True)
        behind = [start + count + 1 for start, count, phase in rows if phase != Phase.CHUNK]
        known = [at - size + n for at, size, n in zip(behind, inputs.sizes, counts, strict=True)]
        has_nan = torch.zeros_like(lengths, dtype=torch.bool)
        state, farthest = drafting[ends], slots.max_model_len - 1
        for number in range(num_drafts if counts else 0):
            positions = lengths + number
            sampling = slots.sampling.rows(
                inputs.row_slots, positions, slots.token_ids, drafting=True
            )
            if slots.sampling.reject(inputs.row_slots):
                self.drafted_from(state)[row_slots, number] = state
            logits = self._parts.model.draft_logits(state)
            token_ids, is_nan = self._sampler.choose(logits, sampling)
            has_nan |= is_nan & goes_on
            before = slots.token_ids[row_slots, positions]
            slots.token_ids[row_slots, positions] = torch.where(goes_on, token_ids, before)
            if number + 1 < num_drafts:
                at = [min(length + number - 1, farthest) for length in known]
                batch = self._builder.one_each(inputs.row_slots, at, token_ids)
                state = self._parts.draft(token_ids, state, batch)
        return has_nan

    def _rejection_sampled(self, inputs: StepInputs, logits: Tensor, keys: Tensor) -> Tensor:
        """keys [S], where drafts that may be rejected lie with their outcome."""
        table, first = self._slots, 0
        places: list[tuple[int, int, int]] = []
        for slot, size in zip(inputs.row_slots, inputs.sizes, strict=True):
            if table.sampling.of(slot).rejects:
                places += [(first + number, slot, number) for number in range(size - 1)]
            first += size
        for begin in range(0, len(places), PIECE_PLACES):
            part = places[begin : begin + PIECE_PLACES]
            at, slots, numbers = upload_all(logits.device, *zip(*part, strict=True))
            positions = inputs.sample_positions[at]
            rows = table.sampling.rows([slot for _, slot, _ in part], positions, table.token_ids)
            assert rows is not None, "slots that reject draw"
            assert self._drafted_from is not None, "drafts were made"
            draft_logits = self._parts.model.draft_logits(self._drafted_from[slots, numbers])
            drafted = table.token_ids[slots, positions]
            drawn = rows.temperature, rows.seeds, rows.positions
            outcome = self._sampler.judge(logits[at], draft_logits, drafted, drawn, rows)
            keys = keys.index_copy(0, at, outcome)
        return keys
