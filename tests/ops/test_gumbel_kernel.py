"""Gumbel noise on the GPU: the reference's whole numbers, its noise but for the last bit of a log,
and one noise for an id whatever shard, piece or company asks for it.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import gumbel
from unisono.ops.kernels.gumbel import stream_bits, stream_start
from unisono.ops.kernels.sampling import argmax_keys
from unisono.ops.reference import gumbel as reference

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]


@triton.jit
def bits_kernel(seeds_ptr, positions_ptr, out_ptr, first_id, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0)
    start = stream_start(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    columns = tl.arange(0, WIDTH)
    bits = stream_bits(start, columns.to(tl.int64) + first_id)
    tl.store(out_ptr + row * WIDTH + columns, bits.to(tl.int64))


def requests(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds with both signs and their extremes, positions."""
    temperature = torch.rand(rows, dtype=torch.float64) + 0.2
    seeds = torch.randint(-(2**62), 2**62, (rows,))
    seeds[:3] = torch.tensor([0, 2**63 - 1, -(2**63)])[: min(3, rows)]
    positions = torch.randint(0, 40_000, (rows,))
    positions[0] = 0
    return on_device(temperature, seeds, positions)


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(kernel_rig.DEVICE) for tensor in tensors)


def test_whole_numbers_are_those_of_the_reference() -> None:
    _, seeds, positions = requests(40)
    got = torch.empty((40, 256), dtype=torch.int64, device=kernel_rig.DEVICE)
    for first_id in (0, 1, 151_000, 2**31 - 300):
        bits_kernel[(40,)](seeds, positions, got, first_id, WIDTH=256)
        cpu = seeds.cpu(), positions.cpu()
        start = reference._mix(
            reference._mix(cpu[0] + reference._GOLDEN) + (cpu[1] + 1) * reference._GOLDEN
        )
        ids = torch.arange(first_id + 1, first_id + 257)
        want = reference._mix(start[:, None] + ids * reference._GOLDEN)
        assert_same_bits(f"from id {first_id}", got.cpu(), reference._shifted(want, 12))


@pytest.mark.parametrize("shard", [1, 1003, 1024, 2500])
def test_noise_is_the_references_but_for_its_last_bit(shard: int) -> None:
    keys, logits = requests(6), torch.randn(6, shard)
    got = gumbel.add_noise(logits.to(kernel_rig.DEVICE), *keys, 77)
    want = reference.add_noise(logits, *(key.cpu() for key in keys), 77)
    assert_close(f"noise of {shard} ids", got, want, 3e-8)


def test_an_id_has_one_noise_in_every_shard_and_company() -> None:
    rows, width = 12, 2600
    logits, keys = torch.randn(rows, width).to(kernel_rig.DEVICE), requests(rows)
    whole = gumbel.add_noise(logits, *keys, 5)
    for first, stop in [(0, 1), (1, 1300), (1023, 1026), (1300, 2600), (2599, 2600)]:
        part = gumbel.add_noise(logits[:, first:stop], *keys, 5 + first)
        assert_same_bits(f"shard {first}:{stop}", part, whole[:, first:stop].contiguous())
    order = torch.randperm(rows).to(logits.device)
    shuffled = gumbel.add_noise(logits[order], *(key[order] for key in keys), 5)
    assert_same_bits("shuffled", shuffled, whole[order])
    for row in (0, 7, rows - 1):
        alone = gumbel.add_noise(
            logits[row : row + 1], *(key[row : row + 1].clone() for key in keys), 5
        )
        assert_same_bits(f"row {row} alone", alone, whole[row : row + 1])


@triton.jit
def rough_kernel(
    bits_ptr, out_ptr, count, BLOCK: tl.constexpr, UPPER: tl.constexpr, IS_CUDA: tl.constexpr
) -> None:
    at = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0)
    if UPPER:
        noise = gumbel._rougher_noise((bits >> 20).to(tl.uint32), IS_CUDA)
    else:
        noise = gumbel._rough_noise(bits, IS_CUDA)
    tl.store(out_ptr + at, noise, mask=at < count)


@pytest.mark.parametrize("upper", [False, True])
def test_noise_in_fp32_is_as_near_as_the_kernel_takes_it_to_be(upper: bool) -> None:
    """Wherever the number lies, at both ends and where the formula changes, too; from the upper 32
    bits between the ends."""
    ends = torch.arange(0, 600)
    powers = (2.0 ** torch.arange(0, 52, 0.25, dtype=torch.float64)).long()
    turn = (1 << 52) - (1 << 48) + torch.arange(-300, 300)
    bits = torch.cat([ends, powers, (1 << 52) - 1 - ends, (1 << 52) - powers, turn])
    bits = torch.cat([bits, torch.randint(0, 1 << 52, (6000,))])
    if upper:
        border = gumbel._ENDS.value << 20
        bits = bits[(bits >= border) & (bits < (1 << 52) - border)]
        bits = torch.cat([bits, border + ends, (1 << 52) - 1 - border - ends])
        # Where an upper number stands for the most that it can.
        bits = torch.cat([bits, bits >> 20 << 20, bits | (1 << 20) - 1])
    got = torch.empty(len(bits), device=kernel_rig.DEVICE)
    block = triton.next_power_of_2(len(bits))
    rough_kernel[(1,)](
        bits.to(got.device), got, len(bits), BLOCK=block, UPPER=upper, IS_CUDA=got.is_cuda
    )
    # log(1 - w) where u is near 1: u itself has lost digits there.
    u, w = (bits.double() + 0.5) * 2.0**-52, ((1 << 52) - 1 - bits).double() * 2.0**-52 + 2.0**-53
    want = -(-torch.where(u < 0.5, u.log(), torch.log1p(-w))).log()
    off = (got.cpu().double() - want).abs().max().item()
    assert off < gumbel._ROUGH.value / 8, off


@pytest.mark.parametrize("shard", [1, 1003, 2600, 20_000])
def test_fused_keys_are_those_of_the_noisy_logits(shard: int) -> None:
    logits, keys = torch.randn(9, shard).to(kernel_rig.DEVICE), requests(9)
    logits[3, shard // 2], logits[4, 0] = math.nan, -math.inf
    logits[5] = -math.inf
    noisy = gumbel.add_noise(logits, *keys, 40)
    for num_ids in (40 + shard, 40 + shard // 2, 40):
        got = gumbel.noisy_argmax_keys(logits, *keys, 40, num_ids)
        assert_same_bits(f"ids to {num_ids}", got, argmax_keys(noisy, 40, num_ids))


def test_fused_keys_where_noise_in_fp32_cannot_tell() -> None:
    """Logits that differ by less than they round, huge and tiny temperatures, equal infinities."""
    rows, shard = 7, 2100
    logits, (temperature, seeds, positions) = torch.randn(rows, shard), requests(rows)
    logits[0] = 3e7 + torch.randint(0, 8, (shard,)) * 2.0
    logits[1] = -1e30
    logits[2] *= 1e-6
    logits[3, 5::100] = math.inf
    logits[4] = torch.randint(0, 3, (shard,)).float()
    logits[5] = -3e3
    temperature = temperature.cpu()
    temperature[:] = torch.tensor([1.0, 0.5, 1e-7, 0.9, 1e-300, 1e3, 1e30])
    logits, temperature = on_device(logits, temperature)
    noisy = gumbel.add_noise(logits, temperature, seeds, positions, 3)
    got = gumbel.noisy_argmax_keys(logits, temperature, seeds, positions, 3, 2**31)
    assert_same_bits("keys", got, argmax_keys(noisy, 3, 2**31))


def test_a_temperature_of_zero_leaves_the_fused_keys_greedy() -> None:
    logits, (temperature, seeds, positions) = torch.randn(8, 1500), requests(8)
    logits = logits.to(kernel_rig.DEVICE)
    logits[1, ::2] = -math.inf
    got = gumbel.noisy_argmax_keys(logits, temperature * 0, seeds, positions, 0, 1400)
    assert_same_bits("greedy", got, argmax_keys(logits, 0, 1400))


def test_a_tiny_temperature_is_all_but_greedy_and_specials_stay() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[1.0, 2.0, 1.5], [-inf, -inf, 0.0], [3.0, nan, 1.0], [1.0, inf, 2.0]])
    temperature = torch.full((4,), 1e-300, dtype=torch.float64)
    moved = on_device(logits, temperature, torch.arange(4), torch.arange(4))
    noisy = gumbel.add_noise(*moved, 0).cpu()
    assert torch.equal(noisy.nan_to_num(9.0), logits.nan_to_num(9.0))


@pytest.mark.gpu
def test_draws_follow_the_distribution() -> None:
    count, ids = 400_000, 8
    logits = torch.tensor([2.0, -1.0, 0.5, 0.5, 1.9, -3.0, 0.0, 1.0], device="cuda")
    temperature = torch.full((count,), 0.8, dtype=torch.float64, device="cuda")
    seeds = torch.full((count,), 1234, device="cuda")
    keys = gumbel.noisy_argmax_keys(
        logits.expand(count, ids), temperature, seeds, torch.arange(count, device="cuda"), 0, ids
    )
    drawn = (2**31 - 1) - (keys & (2**31 - 1))
    got = torch.bincount(drawn, minlength=ids).double() / count
    want = (logits.double() / 0.8).softmax(0)
    spread = (want * (1 - want) / count).sqrt()
    assert bool(((got - want).abs() < 5 * spread).all()), (got.tolist(), want.tolist())


@pytest.mark.gpu
def test_more_logits_than_31_bits_at_a_real_vocabulary() -> None:
    rows, shard = 15_000, 151_936
    logits = torch.zeros(rows, shard, device="cuda")
    keys = requests(rows)
    noisy = gumbel.add_noise(logits, *keys, 0)
    tail = gumbel.add_noise(logits[-2:], *(key[-2:].clone() for key in keys), 0)
    assert_same_bits("last rows", noisy[-2:], tail)
    assert_same_bits(
        "keys", gumbel.noisy_argmax_keys(logits, *keys, 0, shard), argmax_keys(noisy, 0, shard)
    )


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    logits, keys = torch.randn(3, 151_936, device="cuda"), requests(3)

    def call() -> Tensor:
        return gumbel.noisy_argmax_keys(logits, *keys, 0, 151_669)

    assert_same_bits("graph", graph_rig.replayed(call), call())
