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
