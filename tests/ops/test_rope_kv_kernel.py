"""Norm, rotation and the way to the cache in one kernel: by the reference, and no more written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels.rope_kv import rope_and_write_kv
from unisono.ops.reference import rope_kv as reference

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
EPS = 1e-6
BLOCKS, BLOCK_SIZE = 5, 16
BOUND = {torch.float32: 4e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    kv_heads: int
    dim: int
    rotary_dim: int


SHAPES = [
    Shape(9, 3, 64, 64),
    Shape(4, 2, 24, 24),
    Shape(3, 1, 80, 20),
    Shape(16, 8, 128, 128),
    Shape(2, 2, 256, 64),
    Shape(1, 1, 11, 6),
]
REAL_SHAPES = [
    Shape(16, 8, 128, 128),
    Shape(32, 8, 128, 128),
    Shape(16, 4, 128, 128),
    Shape(8, 1, 256, 256),
    Shape(32, 32, 96, 96),
    Shape(24, 8, 192, 64),
]


@dataclass(frozen=True)
class Inputs:
    heads: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor

    def rows(self, order: Tensor | slice) -> Inputs:
        return Inputs(self.heads[order], self.cos[order], self.sin[order], self.slots[order])

    def cpu(self) -> Inputs:
        return Inputs(self.heads.cpu(), self.cos.cpu(), self.sin.cpu(), self.slots.cpu())


def some_inputs(shape: Shape, tokens: int, dtype: torch.dtype, blocks: int = BLOCKS) -> Inputs:
    heads = torch.randn(tokens, shape.num_heads + 2 * shape.kv_heads, shape.dim).to(dtype)
    angle = torch.rand(tokens, 1, shape.rotary_dim // 2) * 100
    slots = torch.randperm(blocks * BLOCK_SIZE)[:tokens]
    device = kernel_rig.DEVICE
    return Inputs(
        heads.to(device), angle.cos().to(device), angle.sin().to(device), slots.to(device)
    )


def some_norms(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.num_heads + shape.kv_heads, shape.dim).to(dtype).to(kernel_rig.DEVICE)


def run(
    shape: Shape, norms: Tensor | None, x: Inputs, blocks: int = BLOCKS
) -> tuple[Tensor, Tensor, Tensor]:
    """q and both caches, poisoned before."""
    cache_shape = (blocks, shape.kv_heads, BLOCK_SIZE, shape.dim)
    k_cache = kernel_rig.poisoned(*cache_shape, dtype=x.heads.dtype)
    v_cache = k_cache.clone()
    q = rope_and_write_kv(
        x.heads, shape.num_heads, norms, EPS, x.cos, x.sin, k_cache, v_cache, x.slots
    )
    return q, k_cache, v_cache


def by_reference(
    shape: Shape, norms: Tensor | None, x: Inputs, blocks: int = BLOCKS
) -> tuple[Tensor, Tensor, Tensor]:
    cache_shape = (blocks, shape.kv_heads, BLOCK_SIZE, shape.dim)
    k_cache = torch.full(cache_shape, float("nan"), dtype=x.heads.dtype)
    v_cache = k_cache.clone()
    cpu, weight = x.cpu(), None if norms is None else norms.cpu()
    q = reference.rope_and_write_kv(
        cpu.heads, shape.num_heads, weight, EPS, cpu.cos, cpu.sin, k_cache, v_cache, cpu.slots
    )
    return q, k_cache, v_cache


def check_formula(shape: Shape, tokens: int, dtype: torch.dtype, blocks: int = BLOCKS) -> None:
    x = some_inputs(shape, tokens, dtype, blocks)
    for norms in (None, some_norms(shape, dtype), some_norms(shape, torch.float32) + 1):
        got, want = run(shape, norms, x, blocks), by_reference(shape, norms, x, blocks)
        name = f"{shape}, norm {norms is not None}"
        for what, one, other in zip(("q", "k cache"), got[:2], want[:2], strict=True):
            # NaN where nothing was written must still be there: assert_close compares it.
            assert_close(f"{what} of {name}", one, other, BOUND[dtype])
        assert_same_bits(f"v cache of {name}", got[2].cpu().nan_to_num(7), want[2].nan_to_num(7))
        if norms is None:
            assert_same_bits(f"q of {name}", got[0].cpu(), want[0])


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_the_reference_and_nothing_else_is_written(shape: Shape, dtype: torch.dtype) -> None:
    check_formula(shape, 7, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_real_shapes(shape: Shape) -> None:
    check_formula(shape, 300, torch.bfloat16, blocks=40)
    check_company(shape, 300, torch.bfloat16, blocks=40)


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_a_token_has_its_bits_in_any_company(shape: Shape, dtype: torch.dtype) -> None:
    check_company(shape, 9, dtype)


def check_company(shape: Shape, tokens: int, dtype: torch.dtype, blocks: int = BLOCKS) -> None:
    x, norms = some_inputs(shape, tokens, dtype, blocks), some_norms(shape, dtype)
    q, k_cache, v_cache = run(shape, norms, x, blocks)
    order = torch.randperm(tokens).to(x.heads.device)
    shuffled = run(shape, norms, x.rows(order), blocks)
    assert_same_bits(f"shuffled q of {shape}", shuffled[0], q[order])
    assert_same_bits(f"shuffled k of {shape}", shuffled[1].nan_to_num(7), k_cache.nan_to_num(7))
    assert_same_bits(f"shuffled v of {shape}", shuffled[2].nan_to_num(7), v_cache.nan_to_num(7))
    for cut in (slice(0, 1), slice(tokens - 1, tokens), slice(2, 5)):
        part = run(shape, norms, x.rows(cut), blocks)
        assert_same_bits(f"q of {cut} of {shape}", part[0], q[cut])
        block, offset = x.slots[cut] // BLOCK_SIZE, x.slots[cut] % BLOCK_SIZE
        written = part[1][block, :, offset]
        assert_same_bits(f"k of {cut} of {shape}", written, k_cache[block, :, offset])


def test_a_head_has_its_bits_on_a_rank_with_other_heads() -> None:
    """A rank holds a part of the heads, so a head's place in a program is another."""
    shape, half = Shape(6, 2, 64, 64), Shape(3, 1, 64, 64)
    x, norms = some_inputs(shape, 5, torch.float32), some_norms(shape, torch.float32)
    q, k_cache, _ = run(shape, norms, x)
    mine = [3, 4, 5, 7, 9]
    part = Inputs(x.heads[:, mine].contiguous(), x.cos, x.sin, x.slots)
    got = run(half, norms[[3, 4, 5, 7]], part)
    assert_same_bits("q of the second rank", got[0], q[:, 3:].contiguous())
    assert_same_bits("k", got[1].nan_to_num(7), k_cache[:, 1:].contiguous().nan_to_num(7))


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
def test_heads_may_be_a_part_of_wider_rows(dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    x, norms = some_inputs(shape, 5, dtype), some_norms(shape, dtype)
    count, width = x.heads.shape[1], x.heads[0].numel()
    wide = kernel_rig.poisoned(5, width + 4 * shape.dim, dtype=dtype)
    wide[:, :width] = x.heads.flatten(1)
    part = wide[:, :width].unflatten(1, (count, shape.dim))
    got, want = (run(shape, norms, replace(x, heads=heads)) for heads in (part, x.heads))
    for what, one, other in zip(("q", "k", "v"), got, want, strict=True):
        assert_same_bits(what, one.nan_to_num(7), other.nan_to_num(7))


def test_a_negative_slot_is_not_written_and_an_interleaved_cache_serves() -> None:
    shape = Shape(4, 2, 64, 32)
    x, norms = some_inputs(shape, 6, torch.float32), some_norms(shape, torch.float32)
    q, k_cache, v_cache = run(shape, norms, x)
    x.slots[2] = -1
    both = kernel_rig.poisoned(BLOCKS, 2, 2, BLOCK_SIZE, 64, dtype=torch.float32)
    got = rope_and_write_kv(x.heads, 4, norms, EPS, x.cos, x.sin, both[:, 0], both[:, 1], x.slots)
    assert_same_bits("q", got, q)
    written = both.isfinite().flatten(3).any(-1)
    assert int(both.isfinite().sum()) == 2 * 5 * 2 * 64, f"written: {written.sum(0).tolist()}"
    kept = both.isfinite()
    assert torch.equal(both[:, 0][kept[:, 0]], k_cache[kept[:, 0]])
    assert torch.equal(both[:, 1][kept[:, 1]], v_cache[kept[:, 1]])


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_31_bits_and_many_tokens() -> None:
    shape, dtype = Shape(2, 8, 128, 128), torch.bfloat16
    blocks = 2**31 // (8 * BLOCK_SIZE * 128) + 100
    norms = some_norms(shape, dtype)
    few = some_inputs(shape, 3, dtype)
    heads = few.heads[:1].repeat(70_001, 1, 1)
    heads[-3:] = few.heads
    cos, sin = few.cos[:1].repeat(70_001, 1, 1), few.sin[:1].repeat(70_001, 1, 1)
    cos[-3:], sin[-3:] = few.cos, few.sin
    slots = torch.arange(70_001, device="cuda") + blocks * BLOCK_SIZE - 70_001
    k_cache = torch.zeros(blocks, 8, BLOCK_SIZE, 128, dtype=dtype, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    q = rope_and_write_kv(heads, 2, norms, EPS, cos, sin, k_cache, v_cache, slots)
    want_q, small_k, small_v = run(shape, norms, few)
    block, offset = few.slots // BLOCK_SIZE, few.slots % BLOCK_SIZE
    assert_same_bits("last q", q[-3:], want_q)
    assert_same_bits("last k", k_cache[-1, :, -3:], small_k[block, :, offset].transpose(0, 1))
    assert_same_bits("last v", v_cache[-1, :, -3:], small_v[block, :, offset].transpose(0, 1))
    first_block = blocks - -(-70_001 // BLOCK_SIZE)
    assert not bool(k_cache[:first_block].any()), "a block that no token has was written"


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    shape = Shape(16, 8, 128, 128)
    x, norms = some_inputs(shape, 5, torch.bfloat16), some_norms(shape, torch.bfloat16)
    k_cache = torch.zeros(BLOCKS, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)

    def call() -> Tensor:
        return rope_and_write_kv(x.heads, 16, norms, EPS, x.cos, x.sin, k_cache, v_cache, x.slots)

    assert_same_bits("graph", graph_rig.replayed(call), run(shape, norms, x)[0])
