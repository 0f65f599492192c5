"""Penalties and biases on the GPU have the bits of the CPU: whole counts, and fp64 step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels.penalties import add_bias, penalize
from unisono.ops.reference import penalties as reference

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]


def on_device(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.to(kernel_rig.DEVICE) for tensor in tensors]


def biases(rows: int, vocabulary: int) -> tuple[Tensor, ...]:
    """Some of every row; a few ids stand twice, once with 0 or -inf."""
    row = torch.arange(rows).repeat_interleave(9)
    ids = torch.stack([torch.randperm(vocabulary)[:9] for _ in range(rows)]).flatten()
    bias = torch.randn(9 * rows, dtype=torch.float64) * 20
    ids[1::9], bias[1::9] = ids[0::9], -math.inf
    ids[3::9], bias[3::9] = ids[2::9], 0.0
    bias[5::9] = -0.0
    return row, ids, bias


def some_logits(rows: int, vocabulary: int) -> Tensor:
    logits = torch.randn(rows, vocabulary)
    logits[:, ::5] = -0.0
    logits[1, ::3] = -math.inf
    logits[2, ::3] = math.inf
    return logits


@pytest.mark.parametrize("vocabulary", [17, 1003, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_biases_have_the_bits_of_the_reference(vocabulary: int) -> None:
    logits, (rows, ids, bias) = some_logits(150, vocabulary), biases(150, vocabulary)
    bias[logits[rows, ids] == math.inf] = 1.5  # infinities of both signs have no sum
    moved = on_device((rows, ids, bias))
    for first, stop in [(0, vocabulary), (0, vocabulary // 2), (vocabulary // 2, vocabulary)]:
        part = logits[:, first:stop].contiguous()
        got = add_bias(part.to(kernel_rig.DEVICE), *moved, first)
        want = reference.add_bias(part, rows, ids, bias, first)
        assert_same_bits(f"shard {first}:{stop}", got.cpu(), want)
    shuffled = torch.randperm(len(ids)).to(kernel_rig.DEVICE)
    again = add_bias(part.to(kernel_rig.DEVICE), *(x[shuffled] for x in moved), first)
    assert_same_bits("biases in another order", again, got)


def test_no_biases() -> None:
    logits = torch.randn(2, 7).to(kernel_rig.DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=logits.device)
    assert_same_bits("none", add_bias(logits, none, none, none.double(), 0), logits)
    assert add_bias(logits[:0], none, none, none.double(), 0).shape == (0, 7)


def history_of(rows: int, vocabulary: int, length: int = 3000) -> tuple[Tensor, ...]:
    """Penalties of both signs and of none; nothing told, all of it, and prompts alone."""
    history = torch.randint(0, min(vocabulary, 2000), (rows, length))
    history[0] = history[0, 0]
    num_tokens = torch.randint(2, length, (rows,))
    num_prompt = (num_tokens * torch.rand(rows)).long().clamp_min(1)
    num_tokens[0] = length
    num_prompt[1] = num_tokens[1] = 0
    num_prompt[2] = num_tokens[2]
    repetition = 0.5 + torch.rand(rows, dtype=torch.float64)
    repetition[::3] = 1.0
    presence, frequency = torch.randn(2, rows, dtype=torch.float64)
    presence[::4], frequency[1::4] = 0.0, 0.0
    return history, num_prompt, num_tokens, repetition, presence, frequency


@pytest.mark.parametrize(
    ("vocabulary", "length"),
    [
        (1, 40),
        (17, 1500),
        (1003, 3000),
        (5000, 1024),
        pytest.param(151_936, 3000, marks=pytest.mark.gpu),
    ],
)
def test_penalties_have_the_bits_of_the_reference(vocabulary: int, length: int) -> None:
    logits, options = some_logits(12, vocabulary), history_of(12, vocabulary, length)
    moved = on_device(options)
    for first, stop in [(0, vocabulary), (vocabulary // 3, vocabulary), (0, vocabulary // 2 + 1)]:
        part = logits[:, first:stop]
        on_gpu = part.to(kernel_rig.DEVICE)
        got = penalize(on_gpu, *moved, first)
        assert_same_bits("penalties", got.cpu(), reference.penalize(part, *options, first))
        alone = penalize(on_gpu[5:6], *(x[5:6] for x in moved), first)
        assert_same_bits("row alone", alone, got[5:6])


def test_no_rows_and_no_history() -> None:
    logits, options = some_logits(3, 50), history_of(3, 50, 20)
    moved, none = on_device((logits, *options)), torch.zeros(3, dtype=torch.int64)
    assert penalize(*(x[:0] for x in moved), 0).shape == (0, 50)
    without = (torch.zeros(3, 0, dtype=torch.int64), none, none, *options[3:])
    got = penalize(moved[0], *on_device(without), 0)
    assert_same_bits("no history", got.cpu(), reference.penalize(logits, *without, 0))


@pytest.mark.gpu
def test_a_full_batch_of_long_histories() -> None:
    rows, vocabulary = 128, 151_936
    logits = torch.randn(rows, vocabulary, device="cuda").bfloat16().float()
    told = torch.randint(0, vocabulary, (rows, 40_960), device="cuda")
    _, num_prompt, num_tokens, *values = on_device(history_of(rows, vocabulary, 40_960))
    options = (told, num_prompt, num_tokens, *values)
    got = penalize(logits, *options, 0)
    kernel_rig.assert_same_rows("penalties", got, reference.penalize(logits, *options, 0))


@pytest.mark.gpu
def test_more_logits_than_31_bits() -> None:
    rows, vocabulary = 15_000, 151_936
    logits = torch.randn(64, vocabulary, device="cuda").repeat(235, 1)[:rows]
    options = on_device(history_of(rows, vocabulary, 64))
    got = penalize(logits, *options, 0)[-64:].clone()
    tail = penalize(logits[-64:], *(option[-64:] for option in options), 0)
    assert_same_bits("penalties of the last rows", got, tail)
    row, ids, bias = on_device(biases(64, vocabulary))
    got = add_bias(logits, row + rows - 64, ids, bias, 0)[-64:].clone()
    assert_same_bits("biases of the last rows", got, add_bias(logits[-64:], row, ids, bias, 0))


@pytest.mark.gpu
def test_a_graph_replays_both() -> None:
    logits, options = torch.randn(4, 151_936).cuda(), on_device(history_of(4, 151_936))
    bias = on_device(biases(4, 151_936))

    def call() -> Tensor:
        return add_bias(penalize(logits, *options, 0), *bias, 0)

    assert_same_bits("graph", graph_rig.replayed(call), call())
