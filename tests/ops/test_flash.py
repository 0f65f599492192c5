"""torch's flash attention over a paged cache: on the CPU torch has one too, with the same rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close
from tests.ops.kernel_rig import DEVICE, MARKS, poisoned
from unisono.launcher.resolve import FLASH_HEAD_DIM
from unisono.ops import dispatch, flash
from unisono.ops.attention import AttentionShape
from unisono.ops.reference.attention import attention

pytestmark = MARKS

BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
SCALE = 0.17
SPANS = [(0, 300), (299, 1), (100, 33), (63, 2), (0, 1), (63, 1), (64, 64)]
"""A prompt, a decoded token, a chunk, and both sides of a page."""


@torch.inference_mode()
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(9, 3, 64),
        AttentionShape(4, 4, 16),
        AttentionShape(8, 1, 80),
        AttentionShape(4, 2, 128),
        AttentionShape(2, 1, 256),
        AttentionShape(3, 3, 10),
    ],
    ids=str,
)
def test_rows_of_a_step_against_the_formula(shape: AttentionShape, dtype: torch.dtype) -> None:
    q, k, v, k_cache, v_cache, table = _request(300, shape, dtype)
    starts, counts = zip(*SPANS, strict=True)
    plan = flash.plan_attention(shape, starts, counts, table.expand(len(SPANS), -1))
    queries = torch.cat([q[start : start + count] for start, count in SPANS])
    got = flash.paged_attention(queries, k_cache, v_cache, plan, SCALE)
    assert got.dtype == dtype
    for (start, count), rows in zip(SPANS, got.split(counts), strict=True):
        at = torch.arange(start, start + count, device=DEVICE)
        want = attention(q[at].float(), k.float(), v.float(), at, SCALE)
        assert_close(f"{count} rows at {start}", rows, want, BOUND[dtype])


def test_what_the_launcher_lets_through_is_served() -> None:
    assert FLASH_HEAD_DIM == flash.MAX_HEAD_DIM


@pytest.mark.gpu
@pytest.mark.parametrize("attn", ["torch-flash", "reference"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_every_attention_of_a_gpu_computes_the_same(attn: str, dtype: torch.dtype) -> None:
    shape = AttentionShape(32, 8, 128)
    q, _, _, k_cache, v_cache, table = _request(700, shape, dtype)
    outputs = []
    for name in ("triton", attn):
        ops = dispatch.resolve(DEVICE, shape.head_dim, name)
        plan = ops.plan_attention(shape, [0, 699, 200], [700, 1, 60], table.expand(3, -1))
        queries = torch.cat((q, q[699:], q[200:260]))
        outputs.append(ops.paged_attention(queries, k_cache, v_cache, plan, SCALE))
    assert_close(attn, outputs[1], outputs[0], BOUND[dtype])


def _request(length: int, shape: AttentionShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v of every position, the two caches, NaN elsewhere, and the block table [1, pages]."""
    q = torch.randn(length, shape.num_heads, shape.head_dim).to(dtype).to(DEVICE)
    pages = -(-length // 64)
    table = (torch.randperm(pages) + 1).to(DEVICE)
    at = torch.arange(length, device=DEVICE)
    made = []
    for _ in range(2):
        x = torch.randn(length, shape.num_kv_heads, shape.head_dim).to(dtype).to(DEVICE)
        cache = poisoned(pages + 1, shape.num_kv_heads, 64, shape.head_dim, dtype=dtype)
        cache[table[at // 64], :, at % 64] = x
        made.append((x, cache))
    (k, k_cache), (v, v_cache) = made
    return q, k, v, k_cache, v_cache, table[None]
