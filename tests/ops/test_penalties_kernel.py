"""Penalties and biases on the GPU have the bits of the CPU: whole counts, and fp64 step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels.penalties import add_bias
from unisono.ops.reference import penalties as reference

pytestmark = kernel_rig.MARKS


def biases(rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some of every row; a few ids stand twice, once with 0 or -inf."""
    row = torch.arange(rows).repeat_interleave(9)
    ids = torch.stack([torch.randperm(vocabulary)[:9] for _ in range(rows)]).flatten()
    bias = torch.randn(9 * rows, dtype=torch.float64) * 20
    ids[1::9], bias[1::9] = ids[0::9], -math.inf
    ids[3::9], bias[3::9] = ids[2::9], 0.0
    return row, ids, bias


@pytest.mark.parametrize("vocabulary", [17, 1003, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_biases_have_the_bits_of_the_reference(vocabulary: int) -> None:
    logits, (rows, ids, bias) = torch.randn(20, vocabulary), biases(20, vocabulary)
    moved = [x.to(kernel_rig.DEVICE) for x in (rows, ids, bias)]
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


def history_of(rows: int, vocabulary: int) -> tuple[Tensor, ...]:
    length = 3000
    history = torch.randint(0, min(vocabulary, 2000), (rows, length))
    num_tokens = torch.randint(2, length, (rows,))
    num_prompt = (num_tokens * torch.rand(rows)).long().clamp_min(1)
    penalties = 0.5 + torch.rand(3, rows, dtype=torch.float64)
    penalties[0, ::3] = 1.0
    return history, num_prompt, num_tokens, *penalties


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1003, 151_936])
def test_penalties_have_the_bits_of_the_cpu(vocabulary: int) -> None:
    logits, options = torch.randn(12, vocabulary), history_of(12, vocabulary)
    moved = [option.cuda() for option in options]
    for first, stop in [(0, vocabulary), (vocabulary // 3, vocabulary)]:
        part = logits[:, first:stop].contiguous()
        got = reference.penalize(part.cuda(), *moved, first)
        assert_same_bits("penalties", got.cpu(), reference.penalize(part, *options, first))
        alone = reference.penalize(part[5:6].cuda(), *(x[5:6] for x in moved), first)
        assert_same_bits("row alone", alone, got[5:6])


@pytest.mark.gpu
def test_a_graph_replays_both() -> None:
    logits, options = torch.randn(4, 151_936).cuda(), [x.cuda() for x in history_of(4, 151_936)]
    bias = [x.cuda() for x in biases(4, 151_936)]

    def call() -> Tensor:
        return add_bias(reference.penalize(logits, *options, 0), *bias, 0)

    assert_same_bits("graph", graph_rig.replayed(call), call())
