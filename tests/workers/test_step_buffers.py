"""What graphs read: the slots of a step are there whatever steps came before."""

from __future__ import annotations

import random

import torch

from unisono.workers.step_buffers import StepBuffers


def test_rows_belong_to_the_slots_of_this_step_and_the_rest_to_scratch() -> None:
    """B32: requests come, leave and change places, heights grow and shrink; most steps repeat."""
    buffers = StepBuffers(8, 4, torch.float32, torch.device("cpu"))
    dice = random.Random(0)
    slots, height = [1], 1
    for _ in range(400):
        if dice.random() < 0.6:
            slots = dice.sample(range(1, 9), dice.randint(1, 8))
            height = dice.randint(len(slots), 8)
        buffers.give_slots(slots, height)
        assert buffers.slots[:height].tolist() == [*slots, *[0] * (height - len(slots))]


def test_padding_has_random_tokens_where_that_is_asked() -> None:
    """In rows of slot 0 alone, the same in every engine; otherwise what is there stays."""
    cpu = torch.device("cpu")
    buffers = StepBuffers(8, 4, torch.float32, cpu, 1)
    asked, again = (StepBuffers(8, 4, torch.float32, cpu, 1, 1000) for _ in range(2))
    ids = -1 - torch.arange(16)
    for slots, height, width in (([3], 8, 1), ([2, 5], 8, 2), ([1, 2], 2, 2), ([4, 1, 6], 4, 1)):
        token_ids, padding = ids[: height * width], height * width - len(slots) * width
        for each in (buffers, asked, again):
            each.give_slots(slots, height)
        assert buffers.padded(token_ids, height) is token_ids
        got = asked.padded(token_ids, height)
        assert torch.equal(got, again.padded(token_ids, height))
        live = len(slots) * width
        assert torch.equal(got[:live], token_ids[:live])
        assert ((got[live:] >= 0) & (got[live:] < 1000)).all()
        assert len({*got[live:].tolist()}) == padding, "chosen so that no two are equal"
