"""Changes of the slot table: all of a plan at once, as one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch

from unisono.ops.reference.draft_plan import settle_drafts
from unisono.ops.reference.sampling import key_of_id
from unisono.workers.protocol import Rows, SlotSampling, StepPlan, int32s, pack_sampling
from unisono.workers.slot_table import SlotTable

CPU = torch.device("cpu")
NUM_SLOTS, LONGEST = 5, 200
BLOCKS = -(-LONGEST // 64)


def plan(
    opened: Sequence[tuple[int, list[int], int]],
    blocks: Sequence[tuple[int, int]],
    recipes: Sequence[SlotSampling],
) -> StepPlan:
    """opened: slot, tokens, state; blocks: slot, block."""
    return StepPlan(
        step=1,
        rows=Rows(),
        open_slot=int32s([slot for slot, _, _ in opened]),
        open_length=int32s([len(tokens) for _, tokens, _ in opened]),
        open_tokens=int32s([token for _, tokens, _ in opened for token in tokens]),
        open_sampling=pack_sampling(recipes),
        open_state=int32s([state for _, _, state in opened]),
        block_slot=int32s([slot for slot, _ in blocks]),
        block_id=int32s([block for _, block in blocks]),
    )


def test_plans_in_a_row_leave_what_their_changes_one_by_one_would() -> None:
    table, dice = SlotTable(NUM_SLOTS, LONGEST, CPU, 2), random.Random(0)
    table.token_ids.zero_()
    tokens: dict[int, list[int]] = {}
    kinds = {slot: SlotSampling() for slot in range(NUM_SLOTS + 1)}
    states: dict[int, int] = {}
    blocks: dict[int, list[int]] = {}
    for _ in range(60):
        opened = [
            (slot, [dice.randrange(1, 999) for _ in range(dice.randint(1, LONGEST))], slot + 7)
            for slot in dice.sample(range(1, NUM_SLOTS + 1), dice.randint(0, NUM_SLOTS))
        ]
        recipes = [
            SlotSampling(
                temperature=dice.choice([0.0, 0.5]),
                top_k=dice.randrange(9),
                seed=slot,
                max_length=len(tokens) + dice.randint(1, 9),
                stop_ids=tuple(dice.sample(range(999), dice.choice([0, 2, 8, 12]))),
            )
            for slot, tokens, _ in opened
        ]
        for (slot, prompt, state), recipe in zip(opened, recipes, strict=True):
            tokens[slot], kinds[slot], states[slot], blocks[slot] = prompt, recipe, state, []
        added = [(slot, dice.randrange(99)) for slot in blocks for _ in range(dice.randint(0, 2))]
        dice.shuffle(added)
        added = [each for i, each in enumerate(added) if _fits(added[: i + 1], blocks, each[0])]
        for slot, block in added:
            blocks[slot].append(block)
        table.num_pending.fill_(3)
        just_opened = {slot for slot, _, _ in opened}
        table.change(plan(opened, added, recipes))
        for slot, prompt in tokens.items():
            assert table.token_ids[slot, : len(prompt)].tolist() == prompt
            assert table.lengths[slot] == len(prompt)
            assert table.states[slot] == states[slot]
            padded = blocks[slot] + [0] * (BLOCKS - len(blocks[slot]))
            assert table.block_table[slot].tolist() == padded
            assert table.sampling.of(slot) == kinds[slot]
            known = [*kinds[slot].stop_ids[:8]]
            assert table.stop_ids[slot].tolist() == known + [-1] * (8 - len(known))
            assert table.limits[slot] == kinds[slot].max_length
        pending = [0 if slot in just_opened else 3 for slot in range(NUM_SLOTS + 1)]
        assert table.num_pending.tolist() == pending
        heat, seeds = table.sampling.draws(torch.arange(1, NUM_SLOTS + 1))
        drawing = [slot for slot in range(1, NUM_SLOTS + 1) if kinds[slot].temperature]
        assert [slot for slot in range(1, NUM_SLOTS + 1) if heat[slot - 1]] == drawing
        assert all(seeds[slot - 1] == slot for slot in drawing)
    assert table.token_ids[0].tolist() == [0] * (LONGEST + 3)
    assert len(tokens) == NUM_SLOTS


def test_what_has_ended_goes_on_where_it_is_opened_anew_and_only_there() -> None:
    table = SlotTable(NUM_SLOTS, LONGEST, CPU)
    recipe = SlotSampling(max_length=4, stop_ids=(7,))
    opened = [(slot, [1, 2], 0) for slot in (1, 2, 3)]
    table.change(plan(opened, [], [recipe] * 3))
    settle = partial(settle_drafts, table=table.tensors, width=1)
    slots, none = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)
    for tokens, left in (([7, 5, 6], [0, 0, 2, 3]), ([8, 7, 5], [0, 0, 0, 0])):
        answers = settle(key_of_id(torch.tensor(tokens)), slots, none).answers
        assert table.going_on()[:4].tolist() == left
    assert answers[:, 0].tolist() == [0, 1, 1]
    assert table.token_ids[1:4, :5].tolist() == [[1, 2, 7, 0, 0], [1, 2, 5, 7, 0], [1, 2, 6, 5, 0]]
    table.change(plan([(2, [1, 2, 5], 0)], [], [recipe]))
    assert table.going_on().tolist() == [0, 0, 2, 0, 4, 5]
    table.change(plan([(1, [1], 0)], [], []))
    assert int(table.limits[1]) == 1 << 40


def _fits(added: list[tuple[int, int]], blocks: dict[int, list[int]], slot: int) -> bool:
    return len(blocks[slot]) + sum(other == slot for other, _ in added) <= BLOCKS


def test_a_plan_that_changes_nothing_touches_nothing() -> None:
    table = SlotTable(NUM_SLOTS, LONGEST, CPU)
    before = [table.token_ids.clone(), table.block_table.clone(), table.lengths.clone()]
    table.change(plan([], [], []))
    after = (table.token_ids, table.block_table, table.lengths)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
