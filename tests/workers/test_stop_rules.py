"""Where an answer ends on the ranks is where the runtime ends it: one definition, kept twice.

A request goes the whole way: its parameters over the wire into the slot table, its tokens through
what settles a step. What comes back is compared with `finish_reason`, token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.ops.kernels import draft_plan
from unisono.ops.reference import draft_plan as reference
from unisono.ops.reference.draft_plan import Settled
from unisono.ops.reference.sampling import key_of_id
from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.runtime.sampling_wire import open_sampling
from unisono.runtime.stopping import finish_reason
from unisono.workers.protocol import NUM_STOP_IDS, Rows, StepPlan, int32s
from unisono.workers.slot_table import SlotTable

LONGEST, MOST_DRAFTS, VOCABULARY = 60, 8, 40
EOS = (3, 1)


@dataclass(frozen=True)
class Asked:
    """A request, the tokens that the model would say, and what drafts say at each place."""

    prompt: int
    max_tokens: int
    ignores: bool
    stops: tuple[int, ...]
    said: list[int]
    is_right: list[bool]
    resumed: int
    """Tokens of the answer that its slot is opened with, if it goes on so long."""

    def request(self) -> Request:
        return Request(
            client="c",
            request_id=1,
            prompt_ids=array("i", range(self.prompt)),
            params=SamplingParams(
                max_tokens=self.max_tokens, ignore_eos=self.ignores, stop_token_ids=self.stops
            ),
            max_tokens=min(self.max_tokens, LONGEST - self.prompt),
            arrived_s=0.0,
        )


ASKED = st.builds(
    Asked,
    prompt=st.integers(1, LONGEST - 1),
    max_tokens=st.integers(1, 40),
    ignores=st.booleans(),
    stops=st.lists(st.integers(0, VOCABULARY - 1), max_size=12, unique=True).map(tuple),
    said=st.lists(st.integers(0, VOCABULARY - 1), min_size=LONGEST, max_size=LONGEST),
    is_right=st.lists(st.sampled_from([True, True, False]), min_size=LONGEST, max_size=LONGEST),
    resumed=st.integers(0, 9),
)
STEPS = st.lists(st.integers(0, MOST_DRAFTS), min_size=1, max_size=8)


def ended(asked: Asked) -> tuple[Request, str]:
    """The request with its whole answer, and why that ends."""
    request = asked.request()
    for token in asked.said:
        request.answer_ids.append(token)
        if reason := finish_reason(request, token, EOS):
            return request, reason
    raise AssertionError("the context is shorter than what is said")


def opened(requests: list[tuple[Asked, Request, int]]) -> SlotTable:
    """Slots 1 on, opened with the prompts and the first tokens of each answer."""
    table = SlotTable(len(requests), LONGEST, torch.device("cpu"), MOST_DRAFTS)
    lengths = [whole.num_prompt_tokens + given for _, whole, given in requests]
    tokens = int32s()
    for (_, whole, _), length in zip(requests, lengths, strict=True):
        tokens += whole.tokens(0, length)
    table.change(
        StepPlan(
            step=1,
            rows=Rows(),
            open_slot=int32s(range(1, 1 + len(requests))),
            open_length=int32s(lengths),
            open_tokens=tokens,
            open_sampling=open_sampling([whole for _, whole, _ in requests], frozenset(EOS)),
        )
    )
    return table


def answers(
    table: SlotTable, asked: list[Asked], steps: list[int], settle: Callable[..., Settled]
) -> Iterator[list[list[int]]]:
    """What each step answers. Rows draft as many as the step does, as the model will say or not."""
    slots = torch.arange(1, 1 + len(asked))
    for drafts in steps:
        width, said = 1 + drafts, []
        for slot, each in enumerate(asked, start=1):
            # Past its end a slot is offered what comes next all the same.
            at = int(table.lengths[slot]) - each.prompt
            run = [each.said[place % LONGEST] for place in range(at, at + width)]
            said.append(run)
            for place, token in enumerate(run):
                right = each.is_right[(at + place) % LONGEST]
                table.token_ids[slot, each.prompt + at + place] = token if right else VOCABULARY
        keys = key_of_id(torch.tensor(said).flatten())
        settled = settle(keys, slots, torch.full_like(slots, drafts), table.tensors, width)
        yield [row[1 : 1 + row[0]] for row in settled.answers.tolist()]


def check(asked: list[Asked], steps: list[int], settle: Callable[..., Settled]) -> None:
    requests = []
    for each in asked:
        whole, _ = ended(each)
        requests.append((each, whole, min(each.resumed, whole.num_answered - 1)))
    table = opened(requests)
    got: list[list[int]] = [whole.answer_ids[:given].tolist() for _, whole, given in requests]
    is_known = [
        reason == "length" or whole.answer_ids[-1] in table.stop_ids[slot].tolist()
        for slot, (whole, reason) in enumerate(map(ended, asked), start=1)
    ]
    # Every slot gets to its end: a step answers one token at least.
    for step in answers(table, asked, [*steps, *[3] * LONGEST], settle):
        for row, tokens in enumerate(step):
            whole = requests[row][1].answer_ids.tolist()
            if is_known[row]:
                assert bool(tokens) == (len(got[row]) < len(whole)), "the end"
            got[row] += tokens
            assert got[row][: len(whole)] == whole[: len(got[row])]
        if all(len(got[row]) >= requests[row][1].num_answered for row in range(len(asked))):
            break
    for row, (_, whole, _) in enumerate(requests):
        assert not is_known[row] or got[row] == whole.answer_ids.tolist()
        assert is_known[row] or len({*EOS, *whole.params.stop_token_ids}) > NUM_STOP_IDS


@settings(max_examples=150, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=6), steps=STEPS)
def test_ranks_end_an_answer_where_the_runtime_does(asked: list[Asked], steps: list[int]) -> None:
    """Stop ids, the model's ends of text, max_tokens and the context; with every number of drafts,
    from a resumed answer on; of more ids than fit, those that fit."""
    check(asked, steps, reference.settle_drafts)


@settings(max_examples=12, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=6), steps=STEPS)
def test_so_does_the_kernel(asked: list[Asked], steps: list[int]) -> None:
    check(asked, steps, draft_plan.settle_drafts)


@pytest.mark.parametrize("settle", [reference.settle_drafts, draft_plan.settle_drafts])
@pytest.mark.parametrize("drafts", range(1, 9))
def test_an_end_at_each_place_of_an_accepted_run(
    drafts: int, settle: Callable[..., Settled]
) -> None:
    """That token included; nothing behind it, neither in this step nor in the next."""
    said = [10 + place for place in range(LONGEST)]
    right = [True] * LONGEST
    asked = [Asked(5, 40, False, (10 + place,), said, right, 0) for place in range(drafts + 1)] + [
        Asked(5, 1 + place, True, (), said, right, 0) for place in range(drafts + 1)
    ]
    table = opened([(each, each.request(), 0) for each in asked])
    first, second = answers(table, asked, [drafts, drafts], settle)
    lengths = [*range(1, drafts + 2)] * 2
    assert [len(tokens) for tokens in first] == lengths
    assert not any(second)
    assert table.lengths[1:].tolist() == [5 + length for length in lengths]
