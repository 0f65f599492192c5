"""The sampler: shards, companies and kinds of rows change no token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.launcher.fakes import tiny_model
from tests.rig import run_ranks
from unisono.models.partition import ModelPartition
from unisono.ops import dispatch
from unisono.ops.checksum import row_checksums
from unisono.ops.comm import Group
from unisono.workers.protocol import (
    Rows,
    SlotSampling,
    int32s,
    logprob_width,
    pack_sampling,
    unpack_sampling,
)
from unisono.workers.sampler import Sampler
from unisono.workers.sampling_state import SamplingState

CPU = torch.device("cpu")
KINDS = [
    SlotSampling(),
    SlotSampling(temperature=1.0, seed=1),
    SlotSampling(temperature=0.8, top_k=9, seed=2),
    SlotSampling(temperature=1.3, top_p=0.7, seed=3),
    SlotSampling(temperature=2.0, min_p=0.1, seed=4),
    SlotSampling(temperature=5.0, top_k=90, top_p=0.95, min_p=0.01, seed=2**63 - 1),
    SlotSampling(repetition_penalty=1.7, frequency_penalty=0.5, num_prompt_tokens=20),
    SlotSampling(bias=((7, -100.0), (280, 9.5)), num_prompt_tokens=20),
    SlotSampling(
        temperature=1.5,
        top_k=40,
        seed=9,
        presence_penalty=2.0,
        bias=((3, 4.0), (5, 2.0)),
        num_prompt_tokens=20,
        min_tokens=400,
        stop_ids=(5, 100, 289),
    ),
    SlotSampling(temperature=1.0, seed=2**62, rejects=1),
]
HISTORY = 900
NUM_IDS = 290
TOKEN_IDS = torch.arange((len(KINDS) + 1) * HISTORY).reshape(-1, HISTORY) * 7919 % NUM_IDS


def sample(logits: Tensor, slots: list[int], positions: Tensor, ranks: int) -> list[int]:
    """Tokens of rows in `slots` (slot i + 1 is of KINDS[i]), the same on every rank; -1: a NaN."""

    def chosen(sampler: Sampler, state: SamplingState, own: Tensor) -> Tensor:
        token_ids, is_nan = sampler.choose(own, state.rows(slots, positions, TOKEN_IDS))
        return token_ids.masked_fill(is_nan, -1)

    return on_ranks(logits, ranks, chosen)


def on_ranks(
    logits: Tensor, ranks: int, choose: Callable[[Sampler, SamplingState, Tensor], Tensor]
) -> list[int]:
    """What `choose` makes of each rank's own logits, where slot i + 1 is of KINDS[i]."""
    partition = ModelPartition.of(dataclasses.replace(tiny_model(), num_kv_heads=4), ranks)
    ops = dispatch.resolve(CPU, 8)

    def body(group: Group) -> list[int]:
        state = SamplingState(len(KINDS), CPU)
        for slot, kind in enumerate(KINDS, start=1):
            state.open([slot], [kind])
        first, stop = partition.vocab.ranges[group.rank]
        sampler = Sampler(ops, group, partition, NUM_IDS)
        return choose(sampler, state, logits[:, first:stop].contiguous()).tolist()

    answers = run_ranks(ranks, body)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def many_rows(count: int = 144) -> tuple[Tensor, list[int], Tensor]:
    logits = 2 * torch.randn(count, tiny_model().vocab_size)
    logits[:, NUM_IDS:] += 50  # unknown to the tokenizer
    return logits, [1 + row % len(KINDS) for row in range(count)], torch.randint(900, (count,))


def test_shards_alone_and_order_give_the_same_tokens() -> None:
    logits, slots, positions = many_rows()
    want = sample(logits, slots, positions, 1)
    assert max(want) < NUM_IDS
    for ranks in (2, 3, 4):
        assert sample(logits, slots, positions, ranks) == want
    for row in range(0, len(slots), 7):
        here = slice(row, row + 1)
        assert sample(logits[here], slots[here], positions[here], 1) == want[here]
    order = torch.randperm(len(slots))
    shuffled = sample(logits[order], [slots[i] for i in order], positions[order], 1)
    assert shuffled == [want[i] for i in order]


def test_greedy_rows_take_the_likeliest_and_drawn_rows_do_not_always() -> None:
    logits, slots, positions = many_rows()
    best = logits[:, :NUM_IDS].argmax(-1).tolist()
    tokens = sample(logits, slots, positions, 2)
    same = [token == top for token, top in zip(tokens, best, strict=True)]
    for slot in range(1, len(KINDS) + 1):
        hits = [hit for hit, at in zip(same, slots, strict=True) if at == slot]
        assert all(hits) == KINDS[slot - 1].is_plain


def test_only_greedy_rows_run_the_plain_path() -> None:
    state = SamplingState(3, CPU)
    state.open([2], [KINDS[1]])
    assert state.rows([1, 3], torch.tensor([4, 4]), TOKEN_IDS) is None
    assert state.rows([1, 2], torch.tensor([4, 4]), TOKEN_IDS) is not None
    state.open([2], [SlotSampling()])
    assert state.rows([1, 2], torch.tensor([4, 4]), TOKEN_IDS) is None, (
        "a new request forgets the former"
    )


def test_what_a_device_needs_of_draws_is_forgotten_too() -> None:
    state, slots = SamplingState(3, CPU), torch.tensor([0, 1, 2, 3])
    state.open([1], [SlotSampling(temperature=0.7, seed=11)])
    state.open([2], [SlotSampling(temperature=0.3, seed=12)])
    state.open([2], [SlotSampling()])
    assert state.draw([0, 1])
    assert not state.draw([0, 2, 3])
    assert state.want_only_tokens([0, 1, 2, 3])
    temperature, seeds = state.draws(slots)
    assert temperature.tolist() == [0.0, 0.7, 0.0, 0.0]
    assert seeds.tolist()[1] == 11


def test_drafts_that_may_be_rejected_have_noise_of_their_own() -> None:
    state, at = SamplingState(3, CPU), torch.tensor([4, 4, 4])
    for slot, rejects in ((1, 0), (2, 1), (3, 0)):
        state.open([slot], [SlotSampling(temperature=0.7, seed=10 + slot, rejects=rejects)])
    assert state.reject([1, 2])
    assert not state.reject([0, 1, 3])
    chosen, drafted = (
        state.rows([1, 2, 3], at, TOKEN_IDS, drafting=drafting) for drafting in (False, True)
    )
    assert chosen is not None
    assert drafted is not None
    assert chosen.seeds.tolist() == [11, 12, 13]
    assert (chosen.seeds != drafted.seeds).tolist() == [False, True, False]
    state.open([2], [SlotSampling()])
    assert not state.reject([1, 2]), "a new request forgets the former"


@pytest.mark.parametrize("ranks", [1, 3])
def test_keys_drawn_in_one_pass_are_those_of_the_rows(ranks: int) -> None:
    """What a captured step draws: greedy rows and drawn ones by one call."""
    logits, slots, positions = many_rows(40)
    kinds = [row for row, slot in enumerate(slots) if KINDS[slot - 1].needs_noise_only]
    logits, positions = logits[kinds], positions[kinds]
    slots = [slots[row] for row in kinds]
    assert set(slots) == {1, 2, len(KINDS)}

    def drawn(sampler: Sampler, state: SamplingState, own: Tensor) -> Tensor:
        keys = sampler.drawn_keys(own, *state.draws(torch.tensor(slots)), positions)
        return dispatch.resolve(CPU, 8).unpack_keys(keys)[0]

    assert on_ranks(logits, ranks, drawn) == sample(logits, slots, positions, 1)


@pytest.mark.parametrize(
    "more",
    [
        KINDS[2],
        SlotSampling(logprobs=0),
        SlotSampling(checksums=1),
        SlotSampling(stop_ids=(3,), min_tokens=1),
    ],
    ids=["filtered", "log-probabilities", "checksums", "late ids"],
)
def test_one_row_that_wants_more_than_its_token_is_enough(more: SlotSampling) -> None:
    state = SamplingState(3, CPU)
    state.open([1], [SlotSampling(prompt_logprobs=0)])
    assert state.want_only_tokens([0, 1, 3])
    state.open([2], [more])
    assert not state.want_only_tokens([1, 2])
    assert state.want_only_tokens([1, 3])
    state.open([2], [SlotSampling()])
    assert state.want_only_tokens([1, 2]), "a new request forgets the former"


@pytest.mark.parametrize("phases", [[2, 2], [2, 1], [0, 2], [1]])
def test_a_step_decodes_only_if_all_of_its_rows_do(phases: list[int]) -> None:
    assert Rows(slot=int32s(phases), phase=int32s(phases)).decode_only == (set(phases) == {2})


@pytest.mark.parametrize("slot", [1, 2, 3], ids=lambda slot: f"kind {slot}")
def test_nan_is_found_in_every_kind_of_row(slot: int) -> None:
    logits = torch.randn(2, tiny_model().vocab_size)
    logits[1, 200] = float("nan")
    good, bad = sample(logits, [slot, slot], torch.tensor([1, 2]), 1)
    assert good >= 0 > bad


WHOLE = st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(allow_nan=False)


@st.composite
def slot_samplings(draw: st.DrawFn) -> SlotSampling:
    values = {"float": REAL, "int": WHOLE}
    scalars = {
        item.name: draw(values[str(item.type)])
        for item in dataclasses.fields(SlotSampling)
        if item.type in values
    }
    return SlotSampling(
        **scalars,
        bias=tuple(draw(st.lists(st.tuples(WHOLE, REAL), max_size=3))),
        stop_ids=tuple(draw(st.lists(WHOLE, max_size=3))),
    )


@given(st.lists(slot_samplings(), max_size=4))
def test_packed_sampling_comes_back_exactly(slots: list[SlotSampling]) -> None:
    assert unpack_sampling(pack_sampling(slots)) == slots
    assert unpack_sampling(pack_sampling(KINDS)) == KINDS


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int, ranks: int) -> Tensor:
    partition = ModelPartition.of(dataclasses.replace(tiny_model(), num_kv_heads=4), ranks)
    ops = dispatch.resolve(CPU, 8)

    def body(group: Group) -> Tensor:
        first, stop = partition.vocab.ranges[group.rank]
        sampler = Sampler(ops, group, partition, NUM_IDS)
        return sampler.logprobs(logits[:, first:stop].contiguous(), token_ids, num_top)

    records = run_ranks(ranks, body)
    assert all(torch.equal(record, records[0]) for record in records)
    return records[0]


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_the_same_on_every_rank_and_for_every_cut(num_top: int) -> None:
    """Ids unknown to the tokenizer, though likeliest here, take no part."""
    logits, _, _ = many_rows(70)
    token_ids = torch.randint(NUM_IDS, (70,))
    alone = logprobs(logits, token_ids, num_top, 1)
    assert alone.dtype == torch.int32
    assert alone.shape == (70, logprob_width(num_top))
    want = logits[:, :NUM_IDS].double().log_softmax(-1)
    own = alone[:, 0].contiguous().view(torch.float32).double()
    assert bool(((own - want[torch.arange(70), token_ids]).abs() < 2e-6).all())
    ids = alone[:, 2::2]
    order = logits[:, :NUM_IDS].sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(ids.long(), order[:, :num_top])
    for ranks in (2, 3, 4):
        assert torch.equal(logprobs(logits, token_ids, num_top, ranks), alone)
    assert torch.equal(logprobs(logits[5:6], token_ids[5:6], num_top, 2), alone[5:6])


def test_nan_has_no_logprob() -> None:
    logits = torch.zeros(2, tiny_model().vocab_size)
    logits[1, 3] = float("nan")
    with pytest.raises(FloatingPointError, match="asked for hold NaN"):
        logprobs(logits, torch.tensor([0, 0]), 1, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checksums_of_logits_do_not_depend_on_the_cut(ranks: int) -> None:
    logits = torch.randn(6, tiny_model().vocab_size)
    logits[4] = logits[1]
    partition = ModelPartition.of(dataclasses.replace(tiny_model(), num_kv_heads=4), ranks)

    def body(group: Group) -> list[int]:
        first, stop = partition.vocab.ranges[group.rank]
        sampler = Sampler(dispatch.resolve(CPU, 8), group, partition, NUM_IDS)
        assert not sampler.checksums(logits[:, first:stop], [])
        return list(sampler.checksums(logits[:, first:stop], [1, 4, 5]))

    sums = run_ranks(ranks, body)
    assert all(each == row_checksums(logits[[1, 4, 5]]).tolist() for each in sums)
    assert sums[0][0] == sums[0][1] != sums[0][2]
