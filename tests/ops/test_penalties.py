"""Penalties by their definition, against transformers where it has them; biases by shard."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from unisono.ops.reference.penalties import add_bias, penalize


def reals(value: float, count: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64)


def penalized(
    logits: Tensor,
    prompts: list[list[int]],
    answers: list[list[int]],
    penalties: tuple[float, float, float],
    first_id: int = 0,
) -> Tensor:
    """With a history whose rest is full of other tokens."""
    rows = len(logits)
    history = torch.randint(0, 199, (rows, 64))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        history[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    num_prompt = torch.tensor([len(prompt) for prompt in prompts])
    num_tokens = num_prompt + torch.tensor([len(answer) for answer in answers])
    numbers = [reals(penalty, rows) for penalty in penalties]
    return penalize(logits, history, num_prompt, num_tokens, *numbers, first_id)


def some(count: int) -> list[list[int]]:
    return [[random.randrange(60) for _ in range(random.randint(1, 30))] for _ in range(count)]


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompts, answers = torch.randn(10, 199), some(10), some(10)
    got = penalized(logits, prompts, answers, (1.3, 0.0, 0.0))
    for row in range(10):
        ids = torch.tensor([prompts[row] + answers[row]])
        want = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[row : row + 1].clone())
        torch.testing.assert_close(got[row : row + 1], want, rtol=1e-6, atol=0)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    logits, prompts, answers = torch.randn(6, 199), some(6), some(6)
    got = penalized(logits, prompts, answers, (1.0, 0.7, -0.25))
    for row, answer in enumerate(answers):
        for token in range(199):
            count = answer.count(token)
            want = float(logits[row, token]) + 0.25 * count - 0.7 * (count > 0)
            assert float(got[row, token]) == pytest.approx(want, rel=1e-6, abs=1e-7)


def test_all_three_by_hand() -> None:
    got = penalized(torch.tensor([[4.0, -1.0, 2.0, 3.0]]), [[0]], [[1, 1, 2]], (2.0, 0.5, 0.25))
    assert got.tolist() == [[2.0, -3.0, 0.25, 3.0]]


def test_shards_have_the_bits_of_the_whole() -> None:
    logits, prompts, answers = torch.randn(6, 199), some(6), some(6)
    whole = penalized(logits, prompts, answers, (1.3, 0.7, 0.2))
    rows, ids = torch.tensor([0, 0, 3, 5, 3]), torch.tensor([0, 63, 64, 198, 64])
    bias = torch.tensor([1.5, -2.0, 3.0, -math.inf, 0.0], dtype=torch.float64)
    biased = add_bias(whole, rows, ids, bias, 0)
    for first, stop in [(0, 64), (64, 198), (198, 199)]:
        part = penalized(logits[:, first:stop], prompts, answers, (1.3, 0.7, 0.2), first)
        assert_same_bits("penalties", part, whole[:, first:stop].contiguous())
        part = add_bias(part, rows, ids, bias, first)
        assert_same_bits("bias", part, biased[:, first:stop].contiguous())


def test_bias_is_added_once_where_it_belongs() -> None:
    logits = torch.zeros(2, 4)
    bias = torch.tensor([1.5, -math.inf, 2.0, -math.inf], dtype=torch.float64)
    got = add_bias(logits, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 3, 9, 0]), bias, 0)
    assert got.tolist() == [[0.0, 0.0, 1.5, -math.inf], [-math.inf, 0.0, 0.0, 0.0]]
