"""Inputs and outputs of captured steps: fixed addresses, outside the graphs' memory pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RING = 4
"""Steps whose pinned numbers are kept apart: two are in flight, and a third may be filled."""


class StepBuffers:
    """Buffers for up to `max_rows` decode rows, each with up to `num_drafts` drafts.

    slots [2 * max_rows] (those of the rows, then what `drafts` shows), token_ids, positions,
    slot_mapping [max_rows] int64 and hidden [max_rows * (1 + num_drafts), width] are on the device.
    Padding rows belong to slot 0, whose block is scratch.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        num_drafts: int = 0,
    ) -> None:
        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        def ring(count: int) -> Tensor:
            is_pinned = device.type == "cuda"
            return torch.zeros(RING, count, dtype=torch.int64, pin_memory=is_pinned)

        self.max_rows, self.num_drafts = max_rows, num_drafts
        self.slots, self.token_ids = numbers(2 * max_rows), numbers(max_rows)
        self.positions, self.slot_mapping = numbers(max_rows), numbers(max_rows)
        self.hidden = torch.zeros(max_rows * (1 + num_drafts), width, dtype=dtype, device=device)
        self._given, self._results = ring(2 * max_rows), ring(max_rows * (2 + num_drafts))
        self._place = 0
        self._held: list[int] = []

    def drafts(self, height: int) -> Tensor:
        """How many drafts each of the rows [0, height) has, where `give_slots` was told so."""
        return self.slots[height : 2 * height]

    def give_slots(
        self, slots: Sequence[int], height: int, drafts: Sequence[int] | None = None
    ) -> None:
        """Have rows [0, height) belong to `slots`, and what is left over to slot 0; with `drafts`,
        if any, of which the latter have none."""
        padding = [0] * (height - len(slots))
        wanted = [*slots, *padding] if drafts is None else [*slots, *padding, *drafts, *padding]
        if self._held[: len(wanted)] == wanted:
            return
        place = self._given[self._place, : len(wanted)]
        place.copy_(torch.tensor(wanted))
        self.slots[: len(wanted)].copy_(place, non_blocking=True)
        self._held = wanted

    def take_result(self, numbers: Tensor) -> Result:
        """Start the copy of `numbers`, a list of int64, to the host; the ring moves on."""
        place = self._results[self._place, : len(numbers)]
        place.copy_(numbers, non_blocking=True)
        self._place = (self._place + 1) % RING
        return Result(place, self.slots.is_cuda)


class Result:
    """Numbers on their way to the host. They must be read before RING further steps."""

    counts: Sequence[int] = ()
    """How many of them each row has; none: one each."""

    def __init__(self, place: Tensor, on_their_way: bool) -> None:
        self._place = place
        self._event = torch.cuda.Event() if on_their_way else None
        if self._event is not None:
            self._event.record()

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        """Wait, and return them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._place.tolist()
        return numbers
