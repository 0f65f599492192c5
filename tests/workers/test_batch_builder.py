"""Rows of a plan to the inputs of a model: token by token by the plain formula."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import NumbersOfTheHost
from tests.workers.few_parts import few_parts
from unisono.ops import dispatch
from unisono.ops.attention import AttentionShape
from unisono.workers.batch_builder import BatchBuilder, StepInputs
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s
from unisono.workers.slot_table import SlotTable

CPU = torch.device("cpu")
NUM_SLOTS, LONGEST, MOST_DRAFTS = 7, 300, 3


def table_of(lengths: list[int], num_drafts: int) -> SlotTable:
    """Slots full of numbers that say where they are from; slot s holds lengths[s] tokens."""
    table = SlotTable(NUM_SLOTS, LONGEST, CPU, num_drafts)
    for each in (table.token_ids, table.block_table):
        each.copy_(torch.arange(each.numel()).view(each.shape))
    table.lengths.copy_(torch.tensor(lengths))
    table.num_pending.fill_(1)
    return table


def builder_of(table: SlotTable, windows: tuple[int, ...]) -> BatchBuilder:
    ops, shape = dispatch.resolve(CPU, 8), AttentionShape(4, 2, 8)
    return BatchBuilder(few_parts(ops=ops, slots=table, shape=shape, windows=windows))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Rows, list[int], bool]:
    """Rows, what their slots hold by now, and whether rows may have drafts.

    Where they may, the plan says of a decode row the least that it can start at.
    """
    slots = draw(st.permutations(range(1, NUM_SLOTS + 1)))[: draw(st.integers(1, NUM_SLOTS))]
    speculates = draw(st.booleans())
    lengths, rows = [1] * (NUM_SLOTS + 1), []
    for slot in slots:
        phase = draw(st.sampled_from(Phase))
        length = lengths[slot] = draw(st.integers(1, LONGEST - MOST_DRAFTS - 1))
        if phase == Phase.DECODE:
            behind = draw(st.integers(0, min(length - 1, MOST_DRAFTS))) if speculates else 0
            drafts = draw(st.integers(0, MOST_DRAFTS)) if speculates else 0
            rows.append((slot, length - 1 - behind, 1, phase, drafts))
        else:
            start = draw(st.integers(0, length - 1))
            rows.append((slot, start, draw(st.integers(1, length - start)), phase, 0))
    columns = [int32s(column) for column in zip(*rows, strict=True)]
    slot, start, count, phase, drafts = columns
    has_drafts = any(drafts)
    made = Rows(
        slot=slot,
        start=start,
        count=count,
        phase=phase,
        drafts=drafts if has_drafts else int32s(),
    )
    return made, lengths, speculates


def built(
    rows: Rows, lengths: list[int], speculates: bool, ended: Collection[int] = ()
) -> tuple[StepInputs, SlotTable]:
    table = table_of(lengths, MOST_DRAFTS * speculates)
    for slot in ended:
        table.limits[slot] = lengths[slot]
    builder = builder_of(table, (0, 70))
    with NumbersOfTheHost() as mode:
        inputs = builder.build(StepPlan(step=1, rows=rows))
    assert not mode.copied
    return inputs, table


@given(steps(), st.sets(st.integers(1, NUM_SLOTS)))
def test_inputs_are_those_of_the_formula(
    step: tuple[Rows, list[int], bool], ended: set[int]
) -> None:
    """Rows of answers that have ended compute their positions in scratch, at the last place of its
    block."""
    rows, lengths, speculates = step
    decoding = zip(rows.slot, rows.phase, strict=True)
    ended &= {slot for slot, phase in decoding if phase == Phase.DECODE}
    got, table = built(rows, lengths, speculates, ended)
    tokens: list[tuple[int, int]] = []
    samples: list[int] = []
    slots, sizes = [], []
    drafts_of = rows.drafts or [0] * len(rows)
    columns = (rows.slot, rows.start, rows.count, rows.phase, drafts_of)
    for slot, start, count, phase, drafts in zip(*columns, strict=True):
        if phase == Phase.DECODE:
            start, count = lengths[slot] - 1, 1 + drafts
        tokens += [(slot, position) for position in range(start, start + count)]
        if phase != Phase.CHUNK:
            size = count if phase == Phase.DECODE else 1
            samples += range(len(tokens) - size, len(tokens))
            slots.append(slot)
            sizes.append(size)
    assert (got.row_slots, got.sizes) == (slots, sizes)
    places = [(0 if slot in ended else slot, position) for slot, position in tokens]
    assert got.slot_of_token.tolist() == [slot for slot, _ in places]
    assert got.batch.positions.tolist() == [position for _, position in tokens]
    assert got.batch.token_ids.tolist() == [int(table.token_ids[at]) for at in places]
    blocks = [
        int(table.block_table[slot, at // 64]) * 64 + (at % 64 if slot else 63)
        for slot, at in places
    ]
    assert got.batch.slot_mapping.tolist() == blocks
    assert got.logits_index.tolist() == samples
    assert got.sample_slots.tolist() == [tokens[at][0] for at in samples]
    assert got.sample_positions.tolist() == [tokens[at][1] + 1 for at in samples]
    assert sum(got.rows.count) == len(tokens)
    counts = got.rows.count
    begins = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    assert [tokens[begin][1] for begin in begins] == list(got.rows.start)
    assert set(got.batch.attention) == {0, 70}


def test_only_rows_behind_drafts_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's place is what the plan says, even while the device is behind."""
    asked: list[torch.Tensor] = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda parts: asked.append(parts[0]) or stack(parts))
    count = int32s([5, 3])
    for phases, num_asked in (([0, 1], 0), ([0, 2], 1)):
        rows = Rows(slot=int32s([1, 2]), start=int32s([0, 4]), count=count, phase=int32s(phases))
        asked.clear()
        got, _ = built(rows, [1, 7, 9, 1, 1, 1, 1, 1], speculates=True)
        assert len(asked) == num_asked
        assert list(got.rows.start) == ([0, 8] if num_asked else [0, 4])


def test_a_step_of_one_token_each() -> None:
    table = table_of([1] * 8, 0)
    builder = builder_of(table, (0,))
    dice = random.Random(0)
    slots, positions = [3, 1, 6], [dice.randrange(LONGEST) for _ in range(3)]
    table.block_table[0] = 0
    for ended in (0, 1):
        table.limits[ended] = 1
        check_one_each(builder, table, slots, positions)


def check_one_each(
    builder: BatchBuilder, table: SlotTable, slots: list[int], positions: list[int]
) -> None:
    token_ids = torch.tensor([9, 8, 7])
    with NumbersOfTheHost() as mode:
        batch = builder.one_each(slots, positions, token_ids)
    assert not mode.copied
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([9, 8, 7], positions)
    mapping = [
        int(table.block_table[slot, at // 64]) * 64 + at % 64 if table.limits[slot] > 1 else 63
        for slot, at in zip(slots, positions, strict=True)
    ]
    assert batch.slot_mapping.tolist() == mapping
