"""State of the running requests on the device: tokens and block tables by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import SlotSampling
from unisono.workers.sampling_state import SamplingState


class SlotTable:
    """Slots 1 .. num_slots; slot 0 is scratch. Opening a slot forgets its former request.

    token_ids [slots, max_model_len + 1 + num_drafts] int64: prompt, then answer, written where it
    is sampled, so a decode step needs no token from the host, then drafts. block_table [slots,
    blocks] int64. lengths [slots] int64: tokens that a slot holds, so that a decode step needs no
    position from the host either. states [slots] int64: the recurrent state of each, 0 where the
    model has none. num_pending [slots] int64: the last tokens of each that its state has not taken
    in. `sampling` says how the tokens of each slot are chosen.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, device: torch.device, num_drafts: int = 0
    ) -> None:
        self.max_model_len = max_model_len
        blocks = -(-max_model_len // BLOCK_SIZE)
        self.token_ids = torch.zeros(
            (num_slots + 1, max_model_len + 1 + num_drafts), dtype=torch.int64, device=device
        )
        self.block_table = torch.zeros((num_slots + 1, blocks), dtype=torch.int64, device=device)
        self.lengths = torch.ones(num_slots + 1, dtype=torch.int64, device=device)
        self.states = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_pending = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.sampling = SamplingState(num_slots, device)
        self.generation = 1
        self._num_blocks = [0] * (num_slots + 1)

    def open(
        self,
        slot: int,
        prompt_ids: Tensor,
        sampling: SlotSampling = SlotSampling(),  # noqa: B008
    ) -> None:
        """Give `slot` to a request with these prompt tokens [length]."""
        self.token_ids[slot, : len(prompt_ids)] = prompt_ids
        self.lengths[slot] = len(prompt_ids)
        self.num_pending[slot] = 0
        self.block_table[slot] = 0
        self._num_blocks[slot] = 0
        self.sampling.open(slot, sampling)

    def add_blocks(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Append blocks[i] to the table of slots[i], in order."""
        places = []
        for slot in slots:
            places.append(self._num_blocks[slot])
            self._num_blocks[slot] += 1
        packed = torch.tensor((slots, places, blocks), dtype=torch.int64)
        at_slot, at_place, block = packed.to(self.block_table.device)
        self.block_table[at_slot, at_place] = block

    def checksum_rows(self, slots: Sequence[int]) -> list[int]:
        """Those of the rows with these slots whose logits are to be summed up."""
        return [row for row, slot in enumerate(slots) if self.sampling.of(slot).checksums]

    def append(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Write sampled tokens [n] at their positions [n]."""
        self.token_ids[slots, positions] = token_ids
        self.lengths[slots] = positions + 1
