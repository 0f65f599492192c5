"""Expanding decode rows out of the slot table, and writing their tokens back."""

from __future__ import annotations

import pytest
import torch

from tests.ops import kernel_rig
from unisono.ops.kernels import decode
from unisono.ops.reference import decode as reference
from unisono.ops.reference.draft_plan import Table
from unisono.ops.reference.sampling import argmax_keys

pytestmark = kernel_rig.MARKS
DEVICE = kernel_rig.DEVICE
SLOTS, LENGTH, BLOCKS = 9, 300, 5


def table() -> Table:
    """Slots 3 and 7 have ended, 5 has one token left; 4 and 7 end with an id."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 1, 2, 64, 65, 66, 129, 200, 299])
    limits = torch.tensor([500, 500, 500, 64, 500, 67, 500, 150, 500])
    stop_ids = torch.full((SLOTS, 8), -1)
    stop_ids[4, 2], stop_ids[7, 0] = 300, 300
    parts = {
        "token_ids": torch.randint(0, 1003, (SLOTS, LENGTH), generator=generator),
        "lengths": lengths,
        "block_table": torch.randint(1, 1 << 40, (SLOTS, BLOCKS), generator=generator),
        "num_pending": torch.zeros(SLOTS, dtype=torch.int64),
        "states": torch.arange(SLOTS),
        "limits": limits,
        "stop_ids": stop_ids,
    }
    return Table(**{name: part.to(DEVICE) for name, part in parts.items()})


@pytest.mark.parametrize("rows", [[1], [0, 0, 0], [8, 3, 0, 5], [i % SLOTS for i in range(300)]])
def test_rows_are_expanded_from_what_the_slots_hold(rows: list[int]) -> None:
    held, slots = table(), torch.tensor(rows, device=DEVICE)
    want = reference.expand_rows(slots, held, 64)
    got = [torch.full_like(slots, -7) for _ in range(3)]
    records = torch.full((5, len(rows)), -7, dtype=torch.int32, device=DEVICE)
    decode.expand_rows(slots, held, 64, 3, *got, records)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    order = torch.arange(len(rows), device=DEVICE)
    live = torch.tensor([0 if row in (3, 7) else row for row in rows], device=DEVICE)
    expected = torch.stack((live, order, want[1], torch.ones_like(order), order * 3))
    assert torch.equal(records, expected.int())


def test_tokens_are_appended_and_scratch_and_what_has_ended_are_left_alone() -> None:
    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(1))
    logits[2, 77] = logits[6, 77] = float("nan")
    logits[0, 300] = logits[3, 300] = 100.0
    keys = argmax_keys(logits, 0, 1003).to(DEVICE)
    slots = torch.tensor([4, 0, 6, 2, 0, 5, 7], device=DEVICE)
    held, wanted, before = table(), table(), table()
    want = reference.advance_rows(keys, slots, wanted)
    got = decode.advance_rows(keys, slots, held)
    assert torch.equal(got[:, 0], want[:, 0])
    assert got[:, 0].tolist() == [1, 1, -1, 1, 1, 1, 0]
    answered = got[:, 0] > 0
    assert torch.equal(got[answered], want[answered])
    for mine, theirs in zip(held, wanted, strict=True):
        assert torch.equal(mine, theirs)
    for part, old in zip(held, before, strict=True):
        assert torch.equal(part[[0, 1, 3, 7, 8]], old[[0, 1, 3, 7, 8]])
    assert (held.lengths >= held.limits).nonzero().flatten().tolist() == [3, 4, 5, 7]
