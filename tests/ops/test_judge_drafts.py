"""Rejection sampling leaves the odds as they are."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.chances import LIMIT, chi_square_deviation
from tests.waiting import NumbersOfTheHost
from unisono.ops.reference.filters import filter_logits
from unisono.ops.reference.gumbel import chance, gumbel_noise
from unisono.ops.reference.speculation import judge_drafts

NUM_IDS, NUM_DRAFTS, NUM_DRAWS = 6, 3, 20_000
OTHER_STREAM = 1 << 62
"""Makes other seeds of seeds, for drafts."""


def logits_of(seed: int, temperature: float, top_p: float) -> Tensor:
    """By the token before, [NUM_IDS, NUM_IDS], with -inf where top-p leaves nothing."""
    logits = 2 * torch.randn(NUM_IDS, NUM_IDS, generator=torch.Generator().manual_seed(seed))
    ones = torch.ones(NUM_IDS, dtype=torch.float64)
    return filter_logits(logits, temperature * ones, (0 * ones).long(), top_p * ones, 0 * ones)


def draw(logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor) -> Tensor:
    return (logits / temperature + gumbel_noise(seeds, positions, 0, NUM_IDS)).argmax(1)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.6, 0.8)])
def test_three_drafts_at_a_time_leave_three_tokens_their_odds(
    temperature: float, top_p: float
) -> None:
    """20,000 answers, step by step as ranks give them, with the same noise for a place whenever it
    is drafted again: chi-square over all that the three tokens may be together."""
    model, drafter = (logits_of(seed, temperature, top_p) for seed in (1, 2))
    p, q = ((each.double() / temperature).softmax(1) for each in (model, drafter))
    seeds = torch.arange(NUM_DRAWS) * 0x9E3779B9
    every = torch.arange(NUM_DRAWS)
    tokens = torch.zeros(NUM_DRAWS, 3 + 3 * (1 + NUM_DRAFTS), dtype=torch.int64)
    lengths = torch.ones(NUM_DRAWS, dtype=torch.int64)
    right = 0
    heat = torch.full((NUM_DRAWS,), temperature, dtype=torch.float64)
    for step in range(3):
        for place in range(NUM_DRAFTS):
            before = tokens[every, lengths + place - 1]
            drafted = draw(drafter[before], temperature, seeds ^ OTHER_STREAM, lengths + place)
            tokens[every, lengths + place] = drafted
        is_right = torch.ones(NUM_DRAWS, dtype=torch.bool)
        counts = torch.zeros_like(lengths)
        for place in range(NUM_DRAFTS + 1):
            at = lengths + place
            before, drafted = tokens[every, at - 1], tokens[every, at]
            if place < NUM_DRAFTS:
                told = (model[before], drafter[before], drafted, heat, chance(seeds, at))
                said = draw(judge_drafts(*told), 1.0, seeds, at)
            else:
                said = draw(model[before], temperature, seeds, at)
            tokens[every, at] = torch.where(is_right, said, drafted)
            counts += is_right
            is_right &= said == drafted
            if step == place == 0:
                right = int(is_right.sum())
        lengths += counts
    exact = {
        said: odds
        for said in itertools.product(range(NUM_IDS), repeat=3)
        if (odds := math.prod(float(p[a, b]) for a, b in itertools.pairwise((0, *said)))) > 0
    }
    seen = Counter(tuple(said) for said in tokens[:, 1:4].tolist())
    assert chi_square_deviation(seen, exact, NUM_DRAWS) < LIMIT
    # A draft is right as often as two distributions can agree at all.
    share = float(torch.minimum(p[0], q[0]).sum())
    assert 0.1 < share < 0.9
    assert abs(right - NUM_DRAWS * share) < LIMIT * (NUM_DRAWS * share * (1 - share)) ** 0.5


def judged(p: list[float], q: list[float], draft: int, luck: float) -> Tensor:
    """What is left to draw from, as odds."""
    logits, drafts = (torch.tensor([each]).log() for each in (p, q))
    one = torch.ones(1, dtype=torch.float64)
    left = judge_drafts(logits, drafts, torch.tensor([draft]), one, luck * one)
    return left[0].softmax(0)


def test_a_draft_is_kept_by_its_share_and_else_what_is_in_excess_is_drawn() -> None:
    p, q = [0.2, 0.5, 0.3], [0.4, 0.1, 0.5]
    assert judged(p, q, 0, 0.499).tolist() == [1, 0, 0]
    assert judged(p, q, 0, 0.501).tolist() == [0, 1, 0]
    assert judged(p, q, 1, 0.999999).tolist() == [0, 1, 0]
    some = judged([0.2, 0.5, 0.3], [0.7, 0.2, 0.1], 0, 0.5)
    assert torch.allclose(some, torch.tensor([0.0, 0.6, 0.4]))
    # What may not be drawn is never kept, and what both have is never in excess.
    assert judged([0.0, 0.5, 0.5], [0.5, 0.5, 0.0], 0, 1e-15).tolist() == [0, 0, 1]
    # The same but for rounding.
    assert judged(q, q, 2, 1 - 2**-53).tolist() == [0, 0, 1]


def test_graphs_can_hold_it() -> None:
    one = torch.ones(3, dtype=torch.float64)
    seeds = torch.arange(3)
    with NumbersOfTheHost() as mode:
        luck = chance(seeds, seeds)
        judge_drafts(torch.randn(3, 9), torch.randn(3, 9), seeds, one, luck)
    assert not mode.asked
    assert not mode.copied
    with NumbersOfTheHost() as mode:
        torch.where(one > 0, 0.0, one)
        int(seeds[0])
    assert (len(mode.copied), len(mode.asked)) == (1, 1), "what is looked for is seen"


def test_nan_and_infinities_are_not_hidden() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, 0.0], [math.inf, 0.0], [math.inf, math.inf]])
    drafts = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [0.0, 0.0], [0.0, 0.0]])
    half = torch.full((4,), 0.5, dtype=torch.float64)
    left = judge_drafts(logits, drafts, torch.ones(4, dtype=torch.int64), half + 0.5, half)
    assert left[:2].isnan().any(1).all()
    assert left[2:].softmax(1).tolist() == [[1, 0], [0, 1]]
