"""What graphs read and write: the slots of a step are there whatever steps came before."""

from __future__ import annotations

import random

import pytest
import torch

from unisono.workers import step_buffers
from unisono.workers.step_buffers import RING, StepBuffers


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> StepBuffers:
    zeros = torch.zeros

    def unpinned(*args: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return zeros(*args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(step_buffers.torch, "zeros", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent())
    return StepBuffers(8, 4, torch.float32, torch.device("cpu"))


class FakeEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def test_rows_belong_to_the_slots_of_this_step_and_the_rest_to_scratch(
    buffers: StepBuffers,
) -> None:
    """B32: requests come, leave and change places, heights grow and shrink; most steps repeat."""
    dice = random.Random(0)
    slots, height = [1], 1
    for _ in range(400):
        if dice.random() < 0.6:
            slots = dice.sample(range(1, 9), dice.randint(1, 8))
            height = dice.randint(len(slots), 8)
        buffers.give_slots(slots, height)
        assert buffers.slots[:height].tolist() == [*slots, *[0] * (height - len(slots))]
        buffers.take_result(torch.tensor(slots))


def test_results_wait_for_as_many_steps_as_the_ring_has_places(buffers: StepBuffers) -> None:
    results = [buffers.take_result(torch.tensor([10 + step, step])) for step in range(RING)]
    assert [result.read() for result in results] == [[10 + step, step] for step in range(RING)]
