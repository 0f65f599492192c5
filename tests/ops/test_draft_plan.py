"""Expanding rows with drafts out of the slot table, and what becomes of the drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import kernel_rig
from unisono.ops.kernels.draft_plan import (
    Table,
    expand_drafts,
    place_drafts,
    settle_drafts,
)
from unisono.ops.reference import draft_plan as reference
from unisono.ops.reference.sampling import argmax_keys

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
DEVICE = kernel_rig.DEVICE
SLOTS, LENGTH, BLOCKS, VOCABULARY = 9, 300, 5, 50
ROWS = ([1], [0, 0, 0], [8, 3, 0, 5], [*range(1, SLOTS), *[0] * 60])


def table() -> Table:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SLOTS, LENGTH), generator=generator)
    blocks = torch.randint(1, 1 << 40, (SLOTS, BLOCKS), generator=generator)
    lengths = torch.tensor([1, 1, 2, 64, 65, 66, 129, 200, 290])
    states = torch.tensor([0, 5, 4, 3, 9, 8, 7, 2, 1])
    pending = torch.tensor([0, 0, 1, 3, 2, 0, 6, 1, 4])
    return Table(*(x.to(DEVICE) for x in (tokens, lengths, blocks, pending, states)))


def rows(slots: list[int], width: int, seed: int) -> tuple[Tensor, Tensor]:
    """The slots, and how many drafts each has: none at scratch."""
    drafts = torch.randint(0, width, (len(slots),), generator=torch.Generator().manual_seed(seed))
    of = torch.tensor(slots)
    return of.to(DEVICE), torch.where(of == 0, 0, drafts).to(DEVICE)


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("slots", ROWS)
def test_rows_are_expanded_with_their_drafts(slots: list[int], width: int) -> None:
    given, held = rows(slots, width, 0), table()
    got = expand_drafts(*given, held, width, 64, 3)
    want = reference.expand_drafts(*given, *held[:3], width, 64)
    for mine, theirs in zip(got[:3], want, strict=True):
        assert torch.equal(mine, theirs.flatten())
    of, drafts = given
    order, start = torch.arange(len(slots), device=DEVICE), held.lengths[of] - 1
    attention = torch.stack((of, order * width, start, drafts + 1, order * 3))
    assert torch.equal(got.attention, attention.int())
    pending = held.num_pending[of]
    delta = (order * width, start, drafts + 1, order * 0, pending, (drafts > 0).long())
    assert torch.equal(got.delta, torch.stack(delta).int())
    assert torch.equal(got.states, held.states[of])


def keys_of(slots: Tensor, held: Table, width: int, right: float, nan: int = -1) -> Tensor:
    """Of random tokens, which are those of the drafts with the odds `right`; NaN at place `nan`."""
    generator = torch.Generator().manual_seed(1)
    at = held.lengths[slots, None].cpu() + torch.arange(width)
    drafted = held.token_ids.cpu()[slots.cpu()[:, None], at]
    other = torch.randint(0, VOCABULARY, drafted.shape, generator=generator)
    chosen = torch.where(torch.rand(drafted.shape, generator=generator) < right, drafted, other)
    logits = torch.nn.functional.one_hot(chosen.flatten(), VOCABULARY).float()
    if nan >= 0:
        logits[nan, 7] = float("nan")
    return argmax_keys(logits, 0, VOCABULARY).to(DEVICE)


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("slots", ROWS)
def test_slots_get_their_tokens_up_to_the_first_wrong_draft(
    slots: list[int], right: float, width: int
) -> None:
    (of, drafts), held = rows(slots, width, 2), table()
    keys, wanted = keys_of(of, held, width, right), table()
    answers, following = reference.settle_drafts(
        keys.view(-1, width), of, drafts, wanted.token_ids, wanted.lengths, wanted.num_pending
    )
    got = settle_drafts(keys, of, drafts, held, width)
    for row, tokens in enumerate(answers):
        assert got.answers[row, 0] == len(tokens)
        assert got.answers[row, 1 : 1 + len(tokens)].tolist() == tokens
        begin = row * width
        assert got.following[begin : begin + len(following[row])].tolist() == following[row]
        assert got.last[row] == begin + len(tokens) - 1
    for mine, theirs in zip(held, wanted, strict=True):
        assert torch.equal(mine, theirs)
    if right == 1.0:
        assert got.answers[:, 0].tolist() == (drafts + 1).tolist()


def test_only_a_nan_that_a_row_has_counts() -> None:
    of, drafts = torch.tensor([4, 2], device=DEVICE), torch.tensor([1, 3], device=DEVICE)
    for place, bad in ((0, 0), (1, 0), (2, None), (7, 1)):
        held = table()
        keys = keys_of(of, held, 4, 0.0, place)
        counts = settle_drafts(keys, of, drafts, held, 4).answers[:, 0]
        assert [row for row, count in enumerate(counts.tolist()) if count < 0] == (
            [] if bad is None else [bad]
        )


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("slots", ROWS)
def test_drafts_are_written_behind_what_a_slot_holds(slots: list[int], number: int) -> None:
    of, held, wanted = torch.tensor(slots, device=DEVICE), table(), table()
    keys = keys_of(of, held, 1, 0.0)
    keys[-1] = argmax_keys(torch.tensor([[0.0, float("nan")]]), 0, 2)[0]
    answers = torch.ones(len(slots), 4, dtype=torch.int64, device=DEVICE)
    got = place_drafts(keys, of, answers, held, number, 288, 64, 3)
    token_ids = ((1 << 31) - 1) - (keys & ((1 << 31) - 1))
    live, behind = of != 0, wanted.lengths[of] + number
    wanted.token_ids[of[live], behind[live]] = token_ids[live]
    for mine, theirs in zip(held, wanted, strict=True):
        assert torch.equal(mine, theirs)
    at = torch.where(live, (behind - 1).clamp(max=288), 0)
    kept_at = torch.where(live, wanted.block_table[of, at // 64] * 64 + at % 64, 63)
    assert torch.equal(got.token_ids, token_ids)
    assert torch.equal(got.positions, at)
    assert torch.equal(got.slot_mapping, kept_at)
    order = torch.arange(len(slots), device=DEVICE)
    attention = torch.stack((of, order, at, torch.ones_like(of), order * 3))
    assert torch.equal(got.attention, attention.int())
    assert answers[:, 0].tolist() == [1] * (len(slots) - 1) + [-1]
    assert bool((answers[:, 1:] == 1).all())
