"""Expanding rows with drafts out of the slot table, and what becomes of the drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import kernel_rig
from unisono.ops.kernels.draft_plan import expand_drafts, place_drafts, settle_drafts
from unisono.ops.reference import draft_plan as reference
from unisono.ops.reference.draft_plan import Table
from unisono.ops.reference.sampling import argmax_keys

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
DEVICE = kernel_rig.DEVICE
SLOTS, LENGTH, BLOCKS, VOCABULARY, NEVER = 9, 300, 5, 50, 1 << 40
ROWS = ([1], [0, 0, 0], [8, 3, 0, 5], [*range(1, SLOTS), *[0] * 60])
ENDS = {"some": (3, (9, 2, 0, 3, 1, 9, 2, 0)), "most": (8, (0, 0, 1, 0, 0, 2, 0, 5))}
"""Stop ids that slots have, and how many tokens each may still take; none: it has ended."""
ENDINGS = ("none", *ENDS)


def table(endings: str = "none") -> Table:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SLOTS, LENGTH), generator=generator)
    blocks = torch.randint(1, 1 << 40, (SLOTS, BLOCKS), generator=generator)
    lengths = torch.tensor([1, 1, 2, 64, 65, 66, 129, 200, 290])
    states = torch.tensor([0, 5, 4, 3, 9, 8, 7, 2, 1])
    pending = torch.tensor([0, 0, 1, 3, 2, 0, 6, 1, 4])
    limits, stop_ids = torch.full((SLOTS,), NEVER), torch.full((SLOTS, 8), -1)
    if endings != "none":
        count, left = ENDS[endings]
        limits[1:] = lengths[1:] + torch.tensor(left)
        stop_ids[2:, :count] = torch.randint(0, VOCABULARY, (SLOTS - 2, count), generator=generator)
    parts = (tokens, lengths, blocks, pending, states, limits, stop_ids)
    return Table(*(x.to(DEVICE) for x in parts))


def seen(of: Tensor, drafts: Tensor, held: Table) -> tuple[Tensor, Tensor]:
    """Slots and drafts of rows as a step takes them."""
    goes_on = held.lengths[of] < held.limits[of]
    return torch.where(goes_on, of, 0), torch.where(goes_on, drafts, 0)


def rows(slots: list[int], width: int, seed: int) -> tuple[Tensor, Tensor]:
    """The slots, and how many drafts each has: none at scratch."""
    drafts = torch.randint(0, width, (len(slots),), generator=torch.Generator().manual_seed(seed))
    of = torch.tensor(slots)
    return of.to(DEVICE), torch.where(of == 0, 0, drafts).to(DEVICE)


@pytest.mark.parametrize("endings", ENDINGS)
@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("slots", ROWS)
def test_rows_are_expanded_with_their_drafts(slots: list[int], width: int, endings: str) -> None:
    """Rows of slots that have ended are rows of scratch, as padding is."""
    given, held = rows(slots, width, 0), table(endings)
    got = expand_drafts(*given, held, width, 64, 3)
    want = reference.expand_drafts(*given, held, width, 64)
    for mine, theirs in zip(got[:3], want, strict=True):
        assert torch.equal(mine, theirs.flatten())
    of, drafts = seen(*given, held)
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


@pytest.mark.parametrize("endings", ENDINGS)
@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("slots", ROWS)
def test_slots_get_their_tokens_up_to_the_first_wrong_draft(
    slots: list[int], right: float, width: int, endings: str
) -> None:
    """Or the end of their answer; what has ended keeps what it has, and so does scratch."""
    (of, drafts), held = rows(slots, width, 2), table(endings)
    keys, wanted, before = keys_of(of, held, width, right), table(endings), table(endings)
    want = reference.settle_drafts(keys, of, drafts, wanted, width)
    got = settle_drafts(keys, of, drafts, held, width)
    counts = want.answers[:, 0].tolist()
    assert got.answers[:, 0].tolist() == counts
    assert torch.equal(got.last, want.last)
    used = seen(of, drafts, before)[1].tolist()
    for row, count in enumerate(counts):
        assert torch.equal(got.answers[row, 1 : 1 + count], want.answers[row, 1 : 1 + count])
        places = slice(row * width, row * width + 1 + used[row])
        assert torch.equal(got.following[places], want.following[places])
        if count == 0 or slots[row] == 0:
            for part, old in zip(held, before, strict=True):
                assert torch.equal(part[slots[row]], old[slots[row]])
    for mine, theirs in zip(held, wanted, strict=True):
        assert torch.equal(mine, theirs)
    if right == 1.0 and endings == "none":
        assert counts == (drafts + 1).tolist()


def test_only_a_nan_that_a_row_has_counts() -> None:
    of, drafts = torch.tensor([4, 2], device=DEVICE), torch.tensor([1, 3], device=DEVICE)
    for place, bad in ((0, 0), (1, 0), (2, None), (7, 1)):
        held = table()
        keys = keys_of(of, held, 4, 0.0, place)
        counts = settle_drafts(keys, of, drafts, held, 4).answers[:, 0]
        assert [row for row, count in enumerate(counts.tolist()) if count < 0] == (
            [] if bad is None else [bad]
        )


@pytest.mark.parametrize("endings", ENDINGS)
@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("slots", ROWS)
def test_drafts_are_written_behind_what_a_slot_holds(
    slots: list[int], number: int, endings: str
) -> None:
    of, held, wanted = torch.tensor(slots, device=DEVICE), table(endings), table(endings)
    keys = keys_of(of, held, 1, 0.0)
    keys[-1] = argmax_keys(torch.tensor([[0.0, float("nan")]]), 0, 2)[0]
    answers = torch.ones(len(slots), 4, dtype=torch.int64, device=DEVICE)
    got = place_drafts(keys, of, answers, held, number, 288, 64, 3)
    token_ids = ((1 << 31) - 1) - (keys & ((1 << 31) - 1))
    goes_on = wanted.lengths[of] < wanted.limits[of]
    of = torch.where(goes_on, of, 0)
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
    assert answers[:, 0].tolist() == [1] * (len(slots) - 1) + [-1 if goes_on[-1] else 1]
    assert bool((answers[:, 1:] == 1).all())
