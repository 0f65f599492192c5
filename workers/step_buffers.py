"""Inputs and outputs of captured steps: fixed addresses, outside the graphs' memory pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RING = 4
"""Steps whose pinned numbers are kept apart: two are in flight, and a third may be filled."""


class StepBuffers:
    """Buffers for up to `max_rows` decode rows.

    slots, token_ids, positions, slot_mapping [max_rows] int64 and hidden [max_rows, width] are on
    the device. Padding rows belong to slot 0, whose block is scratch.
    """

    def __init__(self, max_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        def numbers() -> Tensor:
            return torch.zeros(max_rows, dtype=torch.int64, device=device)

        self.max_rows = max_rows
        self.slots, self.token_ids = numbers(), numbers()
        self.positions, self.slot_mapping = numbers(), numbers()
        self.hidden = torch.zeros(max_rows, width, dtype=dtype, device=device)
        self._given = torch.zeros(RING, max_rows, dtype=torch.int64, pin_memory=True)
        self._results = torch.zeros(RING, max_rows, dtype=torch.int64, pin_memory=True)
        self._place = 0
        self._held: list[int] = []

    def give_slots(self, slots: Sequence[int], height: int) -> None:
        """Have rows [0, height) belong to `slots`, and what is left over to slot 0."""
        wanted = [*slots, *[0] * (height - len(slots))]
        if self._held[:height] == wanted:
            return
        place = self._given[self._place, :height]
        place.copy_(torch.tensor(wanted))
        self.slots[:height].copy_(place, non_blocking=True)
        self._held = wanted

    def take_result(self, tokens: Tensor) -> Result:
        """Start the copy of `tokens` [rows] to the host; the ring moves on."""
        place = self._results[self._place, : len(tokens)]
        place.copy_(tokens, non_blocking=True)
        self._place = (self._place + 1) % RING
        return Result(place)


class Result:
    """Numbers on their way to the host. They must be read before RING further steps."""

    def __init__(self, place: Tensor) -> None:
        self._place = place
        self._event = torch.cuda.Event()
        self._event.record()

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event.query()

    def read(self) -> list[int]:
        """Wait, and return them."""
        self._event.synchronize()
        numbers: list[int] = self._place.tolist()
        return numbers
