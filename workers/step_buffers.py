"""Inputs of captured steps and what passes between their pieces: fixed addresses, outside the
graphs' memory pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.ops.transfer import upload_all


class StepBuffers:
    """Buffers for up to `max_rows` decode rows, each with up to `num_drafts` drafts.

    slots [2 * max_rows] (those of the rows, then what `drafts` shows), token_ids, positions,
    slot_mapping [max_rows] int64 and hidden [max_rows * (1 + num_drafts), width] are on the device.
    Padding rows belong to slot 0, whose block is scratch. With `padding_ids` they compute random
    tokens below it, the same on every rank, and not all of them what slot 0 holds.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        num_drafts: int = 0,
        padding_ids: int = 0,
    ) -> None:
        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self.max_rows, self.num_drafts = max_rows, num_drafts
        self.slots, self.token_ids = numbers(2 * max_rows), numbers(max_rows)
        self.positions, self.slot_mapping = numbers(max_rows), numbers(max_rows)
        self.hidden = torch.zeros(max_rows * (1 + num_drafts), width, dtype=dtype, device=device)
        self._padding: Tensor | None = None
        if padding_ids:
            self._padding = random_tokens(padding_ids, len(self.hidden), device)
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
        self.slots[: len(wanted)] = upload_all(self.slots.device, wanted)[0]
        self._held = wanted

    def padded(self, token_ids: Tensor, height: int) -> Tensor:
        """`token_ids` of as many places of each of the rows [0, height), and what padding has."""
        if self._padding is None:
            return token_ids
        is_padding = (self.slots[:height, None] == 0).expand(height, len(token_ids) // height)
        return torch.where(is_padding.flatten(), self._padding[: len(token_ids)], token_ids)


def random_tokens(below: int, count: int, device: torch.device) -> Tensor:
    """Tokens for padding, the same on every rank; all are token 0 where `below` is 0."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(max(below, 1), (count,), generator=seeded).to(device)
