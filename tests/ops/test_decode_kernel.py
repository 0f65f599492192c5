"""Expanding decode rows out of the slot table, and writing their tokens back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import kernel_rig
from unisono.ops.kernels import decode
from unisono.ops.reference import decode as reference
from unisono.ops.reference.sampling import argmax_keys

pytestmark = kernel_rig.MARKS
DEVICE = kernel_rig.DEVICE
SLOTS, LENGTH, BLOCKS = 9, 300, 5


def table() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1003, (SLOTS, LENGTH), generator=generator)
    lengths = torch.tensor([1, 1, 2, 64, 65, 66, 129, 200, 299])
    blocks = torch.randint(1, 1 << 40, (SLOTS, BLOCKS), generator=generator)
    return tokens.to(DEVICE), lengths.to(DEVICE), blocks.to(DEVICE)


@pytest.mark.parametrize("rows", [[1], [0, 0, 0], [8, 3, 0, 5], [i % SLOTS for i in range(300)]])
def test_rows_are_expanded_from_what_the_slots_hold(rows: list[int]) -> None:
    tokens, lengths, blocks = table()
    slots = torch.tensor(rows, device=DEVICE)
    want = reference.expand_rows(slots, tokens, lengths, blocks, 64)
    got = [torch.full_like(slots, -7) for _ in range(3)]
    records = torch.full((5, len(rows)), -7, dtype=torch.int32, device=DEVICE)
    decode.expand_rows(slots, tokens, lengths, blocks, 64, 3, *got, records)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    order = torch.arange(len(rows), device=DEVICE)
    expected = torch.stack((slots, order, want[1], torch.ones_like(order), order * 3))
    assert torch.equal(records, expected.int())


def test_tokens_are_appended_and_scratch_is_left_alone() -> None:
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(1))
    logits[2, 77] = float("nan")
    keys = argmax_keys(logits, 0, 1003).to(DEVICE)
    slots = torch.tensor([4, 0, 7, 2, 0], device=DEVICE)
    tokens, lengths, _ = table()
    want_tokens, want_lengths = tokens.clone(), lengths.clone()
    want = reference.advance_rows(keys, slots, want_tokens, want_lengths)
    got = decode.advance_rows(keys, slots, tokens, lengths)
    assert got.tolist() == want.tolist()
    assert got[2] == -1
    assert torch.equal(tokens, want_tokens)
    assert torch.equal(lengths, want_lengths)
