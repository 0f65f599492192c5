"""State of the running requests on the device: tokens and block tables by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.ops.reference.draft_plan import Table
from unisono.ops.transfer import on_host, runs, upload_all
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import NUM_STOP_IDS, SlotSampling, StepPlan, unpack_sampling
from unisono.workers.sampling_state import SamplingState


class SlotTable:
    """Slots 1 .. num_slots; slot 0 is scratch. Opening a slot forgets its former request.

    token_ids [slots, max_model_len + 1 + num_drafts] int64: prompt, then answer, written where it
    is sampled, so a decode step needs no token from the host, then drafts. block_table [slots,
    blocks] int64. lengths [slots] int64: tokens that a slot holds, so that a decode step needs no
    position from the host either. states [slots] int64: the recurrent state of each, 0 where the
    model has none. num_pending [slots] int64: the last tokens of each that its state has not taken
    in. limits [slots] and stop_ids [slots, NUM_STOP_IDS] int64: where the answer of each ends, as
    `Table` says. `sampling` says how the tokens of each slot are chosen.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, device: torch.device, num_drafts: int = 0
    ) -> None:
        self.max_model_len, self.num_drafts = max_model_len, num_drafts

        def numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full((num_slots + 1, *shape), value, dtype=torch.int64, device=device)

        self.token_ids = numbers(max_model_len + 1 + num_drafts)
        self.block_table = numbers(-(-max_model_len // BLOCK_SIZE))
        self.states, self.num_pending = numbers(), numbers()
        self.lengths, self.limits = numbers(value=1), numbers(value=SlotSampling().max_length)
        self.stop_ids = numbers(NUM_STOP_IDS, value=-1)
        self.tensors = Table(
            *(self.token_ids, self.lengths, self.block_table, self.num_pending, self.states),
            *(self.limits, self.stop_ids),
        )
        self._itself = torch.arange(num_slots + 1, device=device)
        self.sampling = SamplingState(num_slots, device)
        self.generation = 1
        self._num_blocks = [0] * (num_slots + 1)

    def change(self, plan: StepPlan) -> None:
        """Open slots and append blocks to tables as `plan` says: the host does not wait."""
        if not len(plan.open_slot) and not len(plan.block_id):
            return
        recipes = unpack_sampling(plan.open_sampling) or [SlotSampling()] * len(plan.open_slot)
        self.sampling.open(plan.open_slot, recipes)
        for slot in plan.open_slot:
            self._num_blocks[slot] = 0
        first = on_host(plan.open_slot) * self.token_ids.shape[1]
        opened, lengths, limits, stop_ids, states, at, tokens, block_at, blocks = upload_all(
            self.token_ids.device,
            plan.open_slot,
            plan.open_length,
            [recipe.max_length for recipe in recipes],
            [token_id for recipe in recipes for token_id in recipe.known_stop_ids],
            plan.open_state,
            runs(first, on_host(plan.open_length), len(plan.open_tokens)),
            plan.open_tokens,
            self._block_places(plan.block_slot),
            plan.block_id,
        )
        self.token_ids.view(-1)[at] = tokens
        self.lengths[opened], self.limits[opened] = lengths, limits
        self.stop_ids[opened] = stop_ids.view(-1, NUM_STOP_IDS)
        self.num_pending.index_fill_(0, opened, 0)
        self.block_table.index_fill_(0, opened, 0)
        if len(states):
            self.states[opened] = states
        self.block_table.view(-1)[block_at] = blocks

    def going_on(self) -> Tensor:
        """[slots] int64: each slot itself, or slot 0 where its answer has ended."""
        return self._itself.masked_fill(self.lengths >= self.limits, 0)

    def _block_places(self, slots: Sequence[int]) -> list[int]:
        """Where in `block_table`, flattened, the next block of each of these goes."""
        places = []
        for slot in slots:
            places.append(slot * self.block_table.shape[1] + self._num_blocks[slot])
            self._num_blocks[slot] += 1
        return places
