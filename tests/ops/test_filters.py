"""Filters by their definition: order, ties, borders and special values."""

from __future__ import annotations

import math
import random

import torch

from unisono.ops.reference.filters import filter_logits


def kept(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """Ids that stay; what stays has its logit."""
    row = torch.tensor([logits])
    left = filter_logits(
        row,
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float64),
    )
    stays = left > -math.inf
    assert torch.equal(left[stays], row[stays])
    return stays[0].nonzero().flatten().tolist()


def logs(*chances: float) -> list[float]:
    return [math.log(chance) for chance in chances]


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 2.0], top_k=3) == [1, 2, 3]
    assert kept([0.0] * 500, top_k=2) == [0, 1]
    assert kept([-0.0, 0.0, -0.0], top_k=2) == [0, 1]
    assert kept([1.0, 2.0], top_k=100) == [0, 1]


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    assert kept(logs(0.5, 0.3, 0.2), top_p=0.4) == [0]
    assert kept(logs(0.5, 0.3, 0.2), top_p=0.51) == [0, 1]
    assert kept(logs(0.2, 0.3, 0.5), top_p=0.81) == [0, 1, 2]
    assert kept([0.0] * 4, top_p=0.5) == [0, 1]
    assert kept([0.0] * 4, top_p=0.50001) == [0, 1, 2]
    assert kept([0.0] * 4, top_p=1e-300) == [0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert kept([0.0, -1.0, -2.0], min_p=math.exp(-1.5)) == [0, 1]
    assert kept([0.0, 0.0, -1e-3], min_p=1.0) == [0, 1]


def test_temperature_comes_first_and_top_p_takes_shares_of_what_top_k_left() -> None:
    assert kept([2.0, 1.0, 0.0], min_p=0.3) == [0, 1]
    assert kept([2.0, 1.0, 0.0], temperature=2.0, min_p=0.3) == [0, 1, 2]
    assert kept(logs(0.4, 0.3, 0.2, 0.1), top_p=0.5) == [0, 1]
    assert kept(logs(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == [0]


def test_special_values() -> None:
    inf = math.inf
    assert kept([-inf, 1.0, -inf], top_p=0.9, top_k=3, min_p=0.1) == [1]
    assert kept([1.0, inf, inf, 0.0], top_p=0.9, min_p=0.5) == [1, 2]
    assert kept([3.0, 2.0], temperature=1e-300, top_p=0.99) == [0]
    row = torch.tensor([[1.0, math.nan, 2.0]])
    one = torch.ones(1, dtype=torch.float64)
    assert filter_logits(row, one, torch.tensor([1]), one / 2, one / 2).isnan().any()


def test_against_the_definition_on_random_rows() -> None:
    for _ in range(200):
        logits = [random.randint(-8, 8) / 4 for _ in range(random.randint(1, 40))]
        top_k, top_p = random.randint(0, 10), random.choice([1.0, random.uniform(0.05, 0.99)])
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
        weights = [math.exp(logits[i]) for i in order]
        want, mass = [], 0.0
        for i, weight in zip(order, weights, strict=True):
            if top_p == 1.0 or mass < top_p * sum(weights):
                want.append(i)
            mass += weight
        assert kept(logits, top_k=top_k, top_p=top_p) == sorted(want), (logits, top_k, top_p)
