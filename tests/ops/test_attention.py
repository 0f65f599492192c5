"""Paged attention against the formula, over odd shapes, pages in any order and windows."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_close
from unisono.ops import attention as paged
from unisono.ops.attention import AttentionShape, paged_attention, plan_attention
from unisono.ops.exactness import attention_threads
from unisono.ops.reference.attention import attention
from unisono.ops.reference.rope_kv import write_kv


def filled(length: int, shape: AttentionShape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Keys and values of one request, the caches that hold them, and its block table."""
    pages = -(-length // 64)
    table = (torch.randperm(pages + 3)[:pages] + 1)[None, :]
    k, v = (torch.randn(length, shape.num_kv_heads, shape.head_dim).to(dtype) for _ in range(2))
    caches = [
        torch.zeros(pages + 4, shape.num_kv_heads, 64, shape.head_dim).to(dtype) for _ in range(2)
    ]
    at = torch.arange(length)
    write_kv(k, v, *caches, table[0, at // 64] * 64 + at % 64)
    return k, v, *caches, table


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("window", [0, 1, 6, 64, 100])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(9, 3, 64),
        AttentionShape(8, 1, 8),
        AttentionShape(7, 7, 10),
        AttentionShape(40, 2, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 200), (63, 2), (64, 1), (130, 70)])
def test_against_the_formula(
    start: int, count: int, shape: AttentionShape, window: int, dtype: torch.dtype, bound: float
) -> None:
    k, v, k_cache, v_cache, table = filled(start + count, shape, dtype)
    q = torch.randn(count, shape.num_heads, shape.head_dim).to(dtype)
    plan = plan_attention(shape, [start], [count], table, window)
    got = paged_attention(q, k_cache, v_cache, plan, 0.3)
    at = torch.arange(start, start + count)
    want = attention(q.float(), k.float(), v.float(), at, 0.3, window)
    assert_close("attention", got, want, bound)


def test_scratch_stays_bounded_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are batched by the pages they read; the batches change nothing."""
    shape = AttentionShape(3, 1, 8)
    _, _, k_cache, v_cache, table = filled(1500, shape, torch.float32)
    q = torch.randn(1500, 3, 8)
    whole = plan_attention(shape, [0], [1500], table)
    monkeypatch.setattr(paged, "_SCRATCH_ROWS", 4096)
    pieces = plan_attention(shape, [0], [1500], table)
    assert len(whole.batches) == 1 < len(pieces.batches)
    assert all(
        batch.num_tiles == 1 or len(batch.pair_tile) * batch.height <= 4096
        for batch in pieces.batches
    )
    threads = attention_threads(8)
    a = paged_attention(q, k_cache, v_cache, whole, 0.3, threads)
    b = paged_attention(q, k_cache, v_cache, pieces, 0.3, threads)
    assert torch.equal(a, b)


def test_products_run_on_one_thread_where_threads_change_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.bmm

    def bits_move(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return real(a, b) * (1 + 1e-7 * (len(a) == 1 and torch.get_num_threads() > 1))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(torch, "bmm", bits_move)
        assert attention_threads(16) == 1
        seen = []

        def watch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return real(a, b)

        monkeypatch.setattr(torch, "bmm", watch)
        shape = AttentionShape(2, 1, 16)
        _, _, k_cache, v_cache, table = filled(5, shape, torch.float32)
        plan = plan_attention(shape, [0], [5], table)
        paged_attention(torch.randn(5, 2, 16), k_cache, v_cache, plan, 0.3, threads=1)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
