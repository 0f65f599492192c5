"""The rules of one answer, as rows: op, then layer, then model.

Each row takes a batch apart, in pieces and companies that the runtime may form, and asks for the
same bits. An op lands only with its row here.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import delta_rig, kernel_rig, pending_rig, symmetric_rig
from tests.rig import LocalEngine, run_ranks
from tests.tiny import random_ids, write_checkpoint
from unisono.models.config import DeltaConfig, ModelConfig, RopeConfig
from unisono.models.interface import Build, ForwardBatch, StateCache
from unisono.models.layers.delta_net import DeltaNet
from unisono.models.layers.mlp import GatedMLP
from unisono.models.partition import ModelPartition
from unisono.ops import dispatch
from unisono.ops.attention import AttentionShape
from unisono.ops.comm import Group, ordered_sum, solo_group
from unisono.ops.delta import PendingTokens
from unisono.ops.gpu import gpu_ops
from unisono.ops.linear import SMALL_HEIGHTS, ExactLinear, plain_product
from unisono.ops.reference.draft_plan import Table
from unisono.ops.reference.rope_kv import write_kv
from unisono.ops.reference.sampling import key_of_id
from unisono.ops.symmetric_layout import Layout
from unisono.ops.table import Ops
from unisono.runtime.protocol import SamplingParams

DTYPES = [torch.float32, torch.bfloat16]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
INTERPRETED = not kernel_rig.IS_GPU
KERNELS = "interpreter" if INTERPRETED else "gpu"


def on_every_backend(
    names: tuple[str, ...],
    cases: Sequence[tuple[Any, ...]],
    quick: Sequence[tuple[Any, ...]],
    compiled: Sequence[tuple[Any, ...]] | None = None,
) -> pytest.MarkDecorator:
    """Rows (backend, dtype, *case): the CPU's ops with `cases`, and the GPU's: where there is one
    with `compiled` (those of the CPU), else `quick`, in Triton's interpreter."""
    for_kernels = quick if INTERPRETED else cases if compiled is None else compiled
    rows = [pytest.param("cpu", dtype, *case) for case in cases for dtype in DTYPES]
    rows += [
        pytest.param(KERNELS, dtype, *case, marks=kernel_rig.MARKS)
        for case in for_kernels
        for dtype in ([torch.float16] if INTERPRETED else kernel_rig.DTYPES)
    ]
    return pytest.mark.parametrize(("backend", "dtype", *names), rows, ids=str)


def ops_of(backend: str, head_dim: int = 64, attn: str = "auto") -> Ops:
    if backend == "cpu":
        return dispatch.resolve(CPU, head_dim, attn)
    return gpu_ops(kernel_rig.DEVICE) if INTERPRETED else dispatch.resolve(GPU, head_dim, attn)


def device_of(backend: str) -> torch.device:
    return GPU if backend == "gpu" else CPU


def num_rows(backend: str, count: int, width: int = 0) -> int:
    """Fewer where each takes long."""
    return min(count, 10 if backend == "interpreter" else 34 if width > 10_000 else count)


def some(backend: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(device_of(backend))


@pytest.fixture(autouse=True)
def settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernel_rig.make_products_hide_their_shape(monkeypatch)
    with kernel_rig.kept_blas_settings():
        yield


def rows_keep_their_bits(name: str, op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """op(x)[a:b] has the bits of op(x[a:b]) for pieces of every size at every offset."""
    whole = op(x)
    rows = len(x)
    # Of few rows, where each costs much, one size on either side of a power of two.
    sizes = {1, 2, 3, 8} if rows <= 10 else {1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 33, 63, 64, 65}
    places = {0, 3} if rows <= 10 else {0, 1, 3}
    for count in sorted((sizes | {rows - 1}) & {*range(rows)}):
        for first in sorted({place for place in places if place + count <= rows} | {rows - count}):
            piece = op(x[first : first + count].clone())
            assert_same_bits(
                f"{name} rows {first}:{first + count}", piece, whole[first : first + count]
            )


# ---------------------------------------------------------------- ops


@on_every_backend(
    ("out_features", "in_features"),
    [(1, 64), (7, 5), (48, 136), (136, 72), (1003, 72), (960, 576), (576, 1536), (512, 4096)],
    quick=[(7, 5), (48, 136)],
)
def test_linear(backend: str, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    ops = ops_of(backend)
    weight = some(backend, out_features, in_features, dtype=dtype) / in_features**0.5
    x = some(backend, 300, in_features, dtype=dtype)
    if backend == "interpreter":
        # Its tiles round where a tensor core does not; sums of whole numbers need no rounding.
        weight, x = (4 * weight).round(), (2 * x[:67]).round()
    rows_keep_their_bits("linear", ops.pack_linear(weight, None), x)
    if backend == "cpu":
        rows_keep_their_bits("plain linear", ExactLinear(plain_product(weight), weight, {}), x)
    else:
        rows_keep_their_bits("head", ops.pack_head(weight), x)


def test_linear_on_a_product_that_changes_with_the_number_of_rows() -> None:
    """MKL has other bits at few rows, and this one at many: such heights are found and left out."""
    weight = torch.randn(40, 24)
    heights = []

    def product(x: Tensor) -> Tensor:
        heights.append(len(x))
        return x @ weight.T * (1 + 1e-6 * (len(x) > 48)) * (1 + 1e-6 * (len(x) < 16))

    linear = ExactLinear(product, weight, proven := {})
    rows_keep_their_bits("linear", linear, torch.randn(300, 24))
    assert {height for height, good in proven.items() if good} == {16, 32, 48}
    heights.clear()
    linear(torch.randn(37, 24))
    linear(torch.randn(1, 24))
    linear(torch.randn(100, 24))
    assert heights == [48, 16, 48, 48, 16]


def test_linear_on_a_product_that_changes_with_the_place_of_a_row() -> None:
    weight = torch.randn(7, 5)

    def product(x: Tensor) -> Tensor:
        return x @ weight.T * (1 + 1e-6 * (torch.arange(len(x))[:, None] % 4 == 3))

    rows_keep_their_bits("linear", ExactLinear(product, weight, {}), torch.randn(70, 5))


def test_equal_shapes_are_proven_once_and_nothing_is_proven_in_vain() -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ torch.ones(24, 8)

    weight = torch.ones(8, 24)
    proven: dict[int, bool] = {}
    ExactLinear(counted, weight, proven)
    first = len(calls)
    linear = ExactLinear(counted, weight, proven)
    assert len(calls) == first
    linear(torch.randn(64, 24))
    assert set(proven) == {*SMALL_HEIGHTS, 64}


_WIDTHS = [(5,), (64,), (72,), (576,), (1003,), (4096,)]


@on_every_backend(("width",), [*_WIDTHS, (40000,)], quick=[(72,), (577,)], compiled=_WIDTHS)
def test_rms_norm(backend: str, dtype: torch.dtype, width: int) -> None:
    """With weights of the model's dtype, and with those of a zero-centred norm, which are fp32."""
    ops, own = ops_of(backend), some(backend, width, dtype=dtype)
    x = some(backend, num_rows(backend, 70, width), width, dtype=dtype)
    for weight in (own, own.float() + 1):

        def norm_of_sum(rows: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.cat(ops.add_rms_norm(rows, rows / 2, weight, 1e-6), dim=1)

        rows_keep_their_bits("norm", lambda rows, w=weight: ops.rms_norm(rows, w, 1e-6), x)
        rows_keep_their_bits("norm of a sum", norm_of_sum, x)


_GATED_WIDTHS = [(5,), (12,), (128,), (1003,)]


@on_every_backend(
    ("width",), [*_GATED_WIDTHS, (40000,)], quick=[(12,), (72,)], compiled=_GATED_WIDTHS
)
def test_gated_rms_norm(backend: str, dtype: torch.dtype, width: int) -> None:
    ops, count = ops_of(backend), num_rows(backend, 70, width)
    x, gate = (some(backend, count, width, dtype=dtype) for _ in range(2))
    for weight in (some(backend, width, dtype=dtype), some(backend, width)):
        rows_keep_their_bits(
            "gated norm",
            lambda r, w=weight: ops.gated_rms_norm(x[r], gate[r], w, 1e-6),
            torch.arange(count, device=x.device),
        )


@on_every_backend(("width",), [(1,), (3,), (50,), (136,), (1536,)], quick=[(3,), (136,), (1030,)])
def test_sigmoid_and_mul(backend: str, dtype: torch.dtype, width: int) -> None:
    ops, count = ops_of(backend), num_rows(backend, 200)
    x, wide = (some(backend, count, n, dtype=dtype) for n in (width, 3 * width + 1))
    for gate in (4 * wide[:, :width], 4 * wide[:, -1:], wide[:, width : 2 * width]):
        rows_keep_their_bits(
            "gate",
            lambda r, g=gate: ops.sigmoid_and_mul(x[r], g[r[0] : r[-1] + 1]),
            torch.arange(count, device=x.device),
        )


@pytest.mark.parametrize(
    ("dtype", "ranks", "width"),
    [
        pytest.param(dtype, ranks, width, marks=kernel_rig.MARKS)
        for dtype in ([torch.float16] if INTERPRETED else kernel_rig.DTYPES)
        for ranks, width in ([(2, 264), (3, 512)] if INTERPRETED else [(2, 4096), (8, 2048)])
    ],
    ids=str,
)
def test_sum_over_ranks_in_any_company(dtype: torch.dtype, ranks: int, width: int) -> None:
    """By one-shot or two-shot, with the norm or before it: what serves a row depends on its
    company, its bits do not; they are those of rank order."""
    tokens = 9 if INTERPRETED else 60
    one_shot_bytes = (4 if INTERPRETED else 16) << 10
    layout = Layout(ranks, one_shot_bytes, two_shot_bytes=1 << 20, two_shot_lanes=tokens // 4)
    ends = symmetric_rig.local_ranks(ranks, layout)
    parts = some(KERNELS, ranks, tokens, width, dtype=dtype)
    residual, weight = parts[0].clone(), parts[1, 0].clone()
    norm = ops_of(KERNELS).add_rms_norm

    def total(rows: Tensor) -> Tensor:
        nbytes = rows.numel() * width * parts.element_size()
        totals = symmetric_rig.in_stages(
            ends,
            2 if nbytes <= layout.one_shot_bytes else 3,
            lambda end: end.all_reduce(parts[end.rank, rows]),
        )
        assert totals[0] is not None
        return totals[0]

    def apart(rows: Tensor) -> Tensor:
        return torch.cat(norm(total(rows), residual[rows], weight, 1e-6), dim=1)

    def fused(rows: Tensor) -> Tensor:
        both = symmetric_rig.in_stages(
            ends,
            symmetric_rig.num_norm_stages(layout, residual[rows]),
            lambda end: end.all_reduce_add_rms_norm(
                parts[end.rank, rows], None, residual[rows], weight, 1e-6
            ),
        )[-1]
        return apart(rows) if both is None else torch.cat(both, dim=1)

    rows = torch.arange(tokens, device=parts.device)
    assert_same_bits("definition", total(rows), ordered_sum(parts))
    rows_keep_their_bits("sum", total, rows)
    rows_keep_their_bits("sum and norm", fused, rows)
    assert_same_bits("in one kernel or not", fused(rows[:2]), apart(rows)[:2])


@on_every_backend(("width",), [(1,), (3,), (50,), (136,), (1536,)], quick=[(3,), (136,), (1030,)])
def test_silu_and_mul(backend: str, dtype: torch.dtype, width: int) -> None:
    x = 4 * some(backend, num_rows(backend, 200), 2 * width, dtype=dtype)
    rows_keep_their_bits("activation", ops_of(backend).silu_and_mul, x)


@on_every_backend(
    ("head_dim", "rotary_dim"),
    [(8, 8), (10, 10), (64, 64), (64, 16)],
    quick=[(64, 16)],
)
def test_rope_and_write_kv(
    backend: str, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    """Two query heads and one of keys and values, with norms of heads and without."""
    ops, count = ops_of(backend), num_rows(backend, 100)
    heads = some(backend, count, 4, head_dim, dtype=dtype)
    angle = some(backend, count, 1, rotary_dim // 2)
    for norms in (None, some(backend, 3, head_dim, dtype=dtype)):

        def op(rows: Tensor, norms: Tensor | None = norms) -> Tensor:
            k, v = (heads.new_zeros(-(-count // 16), 1, 16, head_dim) for _ in range(2))
            cos, sin = angle[rows].cos(), angle[rows].sin()
            q = ops.rope_and_write_kv(heads[rows], 2, norms, 1e-6, cos, sin, k, v, rows)
            return torch.cat([q, *(x[rows // 16, :, rows % 16] for x in (k, v))], dim=1)

        rows_keep_their_bits("rope", op, torch.arange(count, device=heads.device))


@on_every_backend((), [()], quick=[()])
def test_embedding_and_argmax(backend: str, dtype: torch.dtype) -> None:
    ops, count = ops_of(backend), num_rows(backend, 80)
    table = some(backend, 50, 24, dtype=dtype)
    ids = torch.arange(count, device=table.device)
    rows_keep_their_bits("embedding", lambda x: ops.embed_shard(x, table, 10), ids)
    logits = some(backend, count, 1003)
    rows_keep_their_bits("argmax", lambda x: ops.argmax_keys(x, 64, 2000), logits)


@pytest.mark.parametrize("backend", ["cpu", pytest.param(KERNELS, marks=kernel_rig.MARKS)])
def test_judged_drafts(backend: str) -> None:
    ops, count = ops_of(backend), num_rows(backend, 70)
    logits = some(backend, count, 5003)
    drafts, ids = logits + some(backend, count, 5003), torch.randint(5003, (count,))
    heat, luck = 0.5 + torch.rand(2, count, dtype=torch.float64).to(logits.device)
    rest = ids.to(logits.device), heat, luck - 0.5

    def judged(rows: Tensor) -> Tensor:
        return ops.judge_drafts(logits[rows], drafts[rows], *(each[rows] for each in rest))

    rows_keep_their_bits("judged", judged, torch.arange(count, device=logits.device))


@pytest.mark.parametrize("backend", ["cpu", pytest.param(KERNELS, marks=kernel_rig.MARKS)])
def test_settled_drafts(backend: str) -> None:
    """What a row answers, and what is left of its slot, is the same alone and in any company, and
    with any number of places: up to a wrong draft, a stop id, its limit, or nothing at all."""
    ops, device, count, length = ops_of(backend), device_of(backend), 40, 30
    lengths = torch.randint(1, 16, (1 + count,))
    held = Table(
        token_ids=torch.randint(6, (1 + count, length)),
        lengths=lengths,
        block_table=torch.zeros(1 + count, 1, dtype=torch.int64),
        num_pending=torch.randint(5, (1 + count,)),
        states=torch.arange(1 + count),
        limits=lengths + torch.randint(9, (1 + count,)),
        stop_ids=torch.where(torch.rand(1 + count, 8) < 0.1, torch.randint(6, (1 + count, 8)), -1),
    )
    said = torch.randint(6, (count, 9))
    at = lengths[1:, None] + torch.arange(9)
    right = torch.rand(count, 9) < 0.8
    said = torch.where(right, held.token_ids[1:].gather(1, at), said)
    drafts = torch.randint(9, (count,))

    def settled(rows: Sequence[int], width: int) -> list[tuple[list[int], list[Tensor]]]:
        table = Table(*(part.clone().to(device) for part in held))
        slots = torch.tensor(rows) + 1
        keys = key_of_id(said[list(rows), :width].flatten())
        given = (each.to(device) for each in (keys, slots, drafts[list(rows)]))
        answers = ops.settle_drafts(*given, table, width).answers.tolist()
        parts = [[part[slot].cpu() for part in table] for slot in slots.tolist()]
        return [(row[1 : 1 + row[0]], part) for row, part in zip(answers, parts, strict=True)]

    together = settled(range(count), 9)
    assert {len(answer) for answer, _ in together} >= {0, 1, 2, 5}
    alone = [([row], 1 + int(drafts[row])) for row in range(count)]
    for rows, width in (*alone, (torch.randperm(count)[:17].tolist(), 9)):
        for row, (answer, parts) in zip(rows, settled(rows, width), strict=True):
            assert answer == together[row][0]
            assert all(map(torch.equal, parts, together[row][1]))


@pytest.mark.parametrize(
    ("backend", "width"),
    [
        *(("cpu", width) for width in (1, 3, 199, 1003, 40000)),
        *(pytest.param(KERNELS, width, marks=kernel_rig.MARKS) for width in (1, 199, 1030)),
    ],
)
def test_noise_and_filters(backend: str, width: int) -> None:
    """Noise and what may be drawn depend on the row alone: logarithm and exponential keep bits."""
    ops, count = ops_of(backend), num_rows(backend, 24 if width < 2000 else 9)
    logits = 3 * torch.randn(count, width)
    temperature = torch.rand(count, dtype=torch.float64) + 0.1
    seeds = torch.randint(2**62, (count,))
    positions = torch.randint(5000, (count,))
    top_k = torch.randint(0, 50, (count,))
    top_p, min_p = torch.rand(count, dtype=torch.float64), torch.rand(count).double() / 20
    drawn, kept = (
        [x.to(device_of(backend)) for x in row]
        for row in (
            (logits, temperature, seeds, positions),
            (logits, temperature, top_k, top_p, min_p),
        )
    )
    rows = torch.arange(count, device=device_of(backend))
    rows_keep_their_bits("noise", lambda r: ops.add_noise(*(x[r] for x in drawn), 64), rows)
    keys = ops.argmax_keys(ops.add_noise(*drawn, 64), 64, 64 + width - 1)
    for part in (rows, rows[3:5]):
        fused = ops.noisy_argmax_keys(*(x[part] for x in drawn), 64, 64 + width - 1)
        assert torch.equal(fused, keys[part]), "the fused draw is another"
    rows_keep_their_bits("filters", lambda r: ops.filter_logits(*(x[r] for x in kept)), rows)


@pytest.mark.parametrize(
    ("backend", "width"),
    [
        *(("cpu", width) for width in (1, 1003, 40000)),
        *(pytest.param(KERNELS, width, marks=kernel_rig.MARKS) for width in (1, 199, 3000)),
    ],
)
def test_penalties_and_biases(backend: str, width: int) -> None:
    """They depend on the row alone, and not on the shard that its ids lie in."""
    ops, count = ops_of(backend), num_rows(backend, 24)
    logits, device = some(backend, count, width), device_of(backend)
    num_tokens = torch.randint(1, 90, (count,), device=device)
    histories = torch.randint(width, (count, 90), device=device)
    values = torch.rand((3, count), dtype=torch.float64, device=device) + 0.5
    ids = torch.randint(width, (count, 2), device=device)
    ids[:, 1] = ids[:, 0]
    bias = torch.randn((count, 2), dtype=torch.float64, device=device)
    bias[:, 1], bias[::2, 1] = -math.inf, 0.0

    def penalized(rows: Tensor, first: int = 0, stop: int = width) -> Tensor:
        told = (histories[rows], num_tokens[rows] // 2, num_tokens[rows], *values[:, rows])
        return ops.penalize(logits[rows, first:stop], *told, first)

    def biased(rows: Tensor, first: int = 0, stop: int = width) -> Tensor:
        at = torch.arange(len(rows), device=device).repeat_interleave(2)
        part = logits[rows, first:stop].contiguous()
        return ops.add_bias(part, at, ids[rows].flatten(), bias[rows].flatten(), first)

    rows = torch.arange(count, device=device)
    for name, op in (("penalties", penalized), ("biases", biased)):
        rows_keep_their_bits(name, op, rows)
        for cut in {width // 3, width - 1} - {0}:
            both = op(rows, 0, cut), op(rows, cut, width)
            assert_same_bits(f"{name} on shards", torch.cat(both, dim=1), op(rows))


@pytest.mark.parametrize(
    ("backend", "width"),
    [
        *(("cpu", width) for width in (1, 3, 199, 1003, 40000)),
        *(
            pytest.param(KERNELS, width, marks=kernel_rig.MARKS)
            for width in ((1030,) if INTERPRETED else (1, 3, 199, 1003, 40000))
        ),
    ],
)
def test_log_probabilities(backend: str, width: int) -> None:
    """They depend on the row alone: not on its company, nor on how its vocabulary was cut."""
    token_logprobs = ops_of(backend).token_logprobs
    count = num_rows(backend, 80 if width < 2000 else 9)
    logits = 4 * some(backend, count, width)
    ids = torch.randint(width, (count,)).to(logits.device)

    def in_one(rows: Tensor) -> Tensor:
        logprob, rank, top_ids, top = token_logprobs(logits[rows], ids[rows], 5)
        own = torch.stack((logprob.view(torch.int32), rank), dim=1)
        return torch.cat((own, top_ids, top.view(torch.int32)), dim=1)

    rows_keep_their_bits("log-probabilities", in_one, torch.arange(count, device=logits.device))
    whole = token_logprobs(logits, ids, 5)
    for ranks in (2, 3, 4):
        cuts = [width * rank // ranks for rank in range(ranks + 1)]
        widths = [b - a for a, b in itertools.pairwise(cuts)]

        def shard(group: Group, cuts: list[int] = cuts, widths: list[int] = widths) -> Tensor:
            mine = logits[:, cuts[group.rank] : cuts[group.rank + 1]].contiguous()
            return group.gather(mine, widths)

        for row in run_ranks(ranks, shard):
            for part, want in zip(token_logprobs(row, ids, 5), whole, strict=True):
                assert_same_bits(f"log-probabilities on {ranks} shards", part, want)


_HEADS = (
    (9, 3, 64, 0),
    (8, 1, 8, 0),
    (14, 2, 4, 100),
    (4, 2, 16, 6),
    (32, 1, 16, 0),
    (3, 3, 10, 70),
)
_BY_FORMULA = [("reference", *heads) for heads in (_HEADS[0], _HEADS[5])]


@on_every_backend(
    ("attn", "heads", "kv_heads", "head_dim", "window"),
    [*(("auto", *heads) for heads in _HEADS), *_BY_FORMULA],
    quick=[("auto", 4, 2, 16, 6), ("auto", 3, 1, 16, 0)],
)
def test_attention_in_any_company_and_chunk(
    backend: str,
    dtype: torch.dtype,
    attn: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
) -> None:
    shape, ops = AttentionShape(heads, kv_heads, head_dim), ops_of(backend, head_dim, attn)
    lengths = [1, 5, 64, 65, 130, 300]
    trials = 3 if backend == "interpreter" else 24 if attn == "auto" else 6
    caches = [torch.zeros(40, kv_heads, 64, head_dim).to(dtype) for _ in range(2)]
    caches = [cache.to(device_of(backend)) for cache in caches]
    tables = torch.zeros(len(lengths), 5, dtype=torch.int64)
    free = iter((torch.randperm(39) + 1).tolist())
    for row, length in enumerate(lengths):
        pages = -(-length // 64)
        tables[row, :pages] = torch.tensor([next(free) for _ in range(pages)])
    tables = tables.to(device_of(backend))

    def attend(spans: Sequence[tuple[int, int, int]]) -> Tensor:
        rows, starts, counts = zip(*spans, strict=True)
        plan = ops.plan_attention(shape, starts, counts, tables[list(rows)], window)
        q = torch.cat([queries[row][start : start + count] for row, start, count in spans])
        return ops.paged_attention(q, *caches, plan, 0.3)

    queries, whole = [], []
    for row, length in enumerate(lengths):
        at = torch.arange(length, device=tables.device)
        k, v = (some(backend, length, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        write_kv(k, v, *caches, tables[row, at // 64] * 64 + at % 64)
        queries.append(some(backend, length, heads, head_dim, dtype=dtype))
        whole.append(attend([(row, 0, length)]))
    for trial in range(trials):
        spans = []
        for row in random.sample(range(len(lengths)), random.randint(1, len(lengths))):
            start = random.randrange(lengths[row])
            spans.append(
                (row, start, 1 if trial % 3 == 0 else random.randint(1, lengths[row] - start))
            )
        want = torch.cat([whole[row][start : start + count] for row, start, count in spans])
        assert_same_bits(f"attention {spans}", attend(spans), want)


def assert_same_states(layer: delta_rig.Layer, number: int, want: tuple[Tensor, Tensor]) -> None:
    for part, got, right in zip(("inputs", "state"), layer.state_of(number), want, strict=True):
        assert_same_bits(f"{part} of state {number}", got, right)


_DELTA_SHAPES = [
    (delta_rig.Shape(2, 6, 8, 12), torch.float32),
    (delta_rig.Shape(1, 1, 16, 16, 2), torch.float32),
    (delta_rig.Shape(2, 4, 8, 8), torch.bfloat16),
    (delta_rig.Shape(3, 3, 5, 7, 3), torch.float32),
    (delta_rig.Shape(4, 8, 64, 72), torch.float32),
]


@on_every_backend(
    ("shape", "state_dtype"),
    _DELTA_SHAPES,
    quick=[
        (delta_rig.Shape(1, 2, 16, 24), torch.float32),
        (delta_rig.Shape(1, 1, 12, 8, 2), torch.float16),
    ],
    compiled=[
        *_DELTA_SHAPES,
        (delta_rig.Shape(16, 32, 128, 128), torch.float32),
        (delta_rig.Shape(4, 12, 128, 128), torch.bfloat16),
    ],
)
def test_delta_rule_in_any_company_and_cut(
    backend: str, dtype: torch.dtype, shape: delta_rig.Shape, state_dtype: torch.dtype
) -> None:
    """Outputs and states: a prompt cut anywhere on the grid, an answer cut anywhere, both again
    from a state that was saved, beside others that do as they like."""
    lengths = [(1, 9), (5, 5), (64, 90), (65, 70), (130, 150), (200, 201), (300, 340)]
    if backend == "interpreter":
        lengths = [(1, 4), (64, 67), (130, 133)]
    layer = delta_rig.Layer(ops_of(backend), shape, lengths, dtype, state_dtype, device_of(backend))
    whole, states, ends = [], {}, []
    for i, request in enumerate(layer.requests):
        borders = range(64, request.num_prompt + 1, 64)
        free = range(len(lengths) + 1, len(lengths) + 1 + len(borders))
        saves = tuple(zip(borders, free, strict=True))
        whole += layer.run([delta_rig.Span(i, 0, len(request), saves)])
        states |= {(i, length): layer.state_of(number) for length, number in saves}
        ends.append(layer.state_of(i + 1))
    for _ in range(1 if backend == "interpreter" else 3):
        answer_in_company(layer, whole, states, ends)


def answer_in_company(
    layer: delta_rig.Layer,
    whole: Sequence[Tensor],
    states: dict[tuple[int, int], tuple[Tensor, Tensor]],
    ends: Sequence[tuple[Tensor, Tensor]],
) -> None:
    requests = layer.requests
    position = [0] * len(requests)
    for i in range(len(requests)):
        layer.spoil(i + 1)
        borders = [length for of, length in states if of == i]
        if borders and random.random() < 0.5:  # A prefix that is already known.
            position[i] = random.choice(borders)
            layer.put_state(i + 1, states[i, position[i]])
    while unfinished := [i for i, request in enumerate(requests) if position[i] < len(request)]:
        spans = []
        for i in random.sample(unfinished, random.randint(1, len(unfinished))):
            count = requests[i].next_cut(position[i], random.choice([1, 1, 4, 40]))
            inside = range(position[i] + 1, position[i] + count + 1)
            saved = [length for of, length in states if of == i and length in inside]
            saves = ((random.choice(saved), len(requests) + 1 + i),) if saved else ()
            spans.append(delta_rig.Span(i, position[i], count, saves))
        for span, got in zip(spans, layer.run(spans), strict=True):
            i, stop = span.request, span.start + span.count
            assert_same_bits(f"delta rule {span} of {spans}", got, whole[i][span.start : stop])
            position[i] = stop
            for length, number in span.saves:
                assert_same_states(layer, number, states[i, length])
    for i, end in enumerate(ends):
        assert_same_states(layer, i + 1, end)


_PENDING_SHAPES = [
    (delta_rig.Shape(2, 6, 8, 12), torch.float32),
    (delta_rig.Shape(2, 4, 8, 8), torch.bfloat16),
    (delta_rig.Shape(1, 1, 16, 16, 2), torch.bfloat16),
    (delta_rig.Shape(4, 8, 64, 72), torch.float32),
]


@on_every_backend(
    ("shape", "state_dtype"),
    _PENDING_SHAPES,
    quick=[
        (delta_rig.Shape(1, 2, 8, 12), torch.float32),
        (delta_rig.Shape(1, 1, 12, 8, 2), torch.float16),
    ],
    compiled=[
        *_PENDING_SHAPES,
        (delta_rig.Shape(16, 32, 128, 128), torch.float32),
        (delta_rig.Shape(4, 12, 128, 128), torch.bfloat16),
    ],
)
def test_tokens_held_back_from_a_state(
    backend: str, dtype: torch.dtype, shape: delta_rig.Shape, state_dtype: torch.dtype
) -> None:
    """B38, B39: states and accepted tokens as token by token: with 1 to 8 drafts, by scripts of
    how many are made and accepted, beside rows without any, and again after a pre-emption."""
    lengths = [(1, 27), (2, 20), (3, 22), (64, 80), (70, 96), (130, 150)]
    if backend == "interpreter":
        lengths = [(1, 13), (3, 12), (66, 76)]
    layer = delta_rig.Layer(ops_of(backend), shape, lengths, dtype, state_dtype, device_of(backend))
    walks = [pending_rig.Walk.of(layer, i) for i in range(len(lengths))]
    # Of the interpreter's two shapes one drafts the fewest, and one rounds what it holds back.
    few = [1] if state_dtype == torch.float32 else [3]
    for num_drafts in few if backend == "interpreter" else range(1, 9):
        layer.keep_pending(num_drafts)
        patterns = random.choices(pending_rig.PATTERNS, k=len(lengths))
        run_in_company(pending_rig.Drafting(layer, walks), num_drafts, patterns)


def run_in_company(
    drafting: pending_rig.Drafting, num_drafts: int, patterns: Sequence[str]
) -> None:
    requests, steps = drafting.layer.requests, [0] * len(patterns)
    while unfinished := [i for i in range(len(patterns)) if drafting.left(i)]:
        rows = []
        for i in random.sample(unfinished, random.randint(1, len(unfinished))):
            if random.random() < 0.02:
                drafting.restart(i)
            if drafting.in_prompt(i) or random.random() < 0.1:
                count = requests[i].next_cut(drafting.position[i], random.choice([1, 3, 12]))
                rows.append(drafting.plain(i, count))
            else:
                script = pending_rig.scripted(patterns[i], steps[i], num_drafts)
                rows.append(drafting.drafted(i, *script))
                steps[i] += 1
        drafting.step(rows)


@on_every_backend(
    ("num_experts", "num_chosen", "renormalise"),
    [(6, 2, True), (5, 5, False), (60, 4, True), (512, 10, True)],
    quick=[(6, 2, True), (5, 5, False)],
)
def test_route_experts(
    backend: str, dtype: torch.dtype, num_experts: int, num_chosen: int, renormalise: bool
) -> None:
    ops, logits = ops_of(backend), some(backend, num_rows(backend, 70), num_experts, dtype=dtype)
    for place in range(2):
        rows_keep_their_bits(
            "routes", lambda x, p=place: ops.route_experts(x, num_chosen, renormalise)[p], logits
        )


@on_every_backend(
    ("num_experts", "num_chosen", "hidden", "width"),
    [(6, 2, 64, 24), (4, 4, 20, 7), (16, 3, 136, 40)],
    quick=[(4, 2, 20, 7)],
    compiled=[(6, 2, 64, 24), (4, 4, 20, 7), (2, 1, 136, 40), (128, 8, 512, 96)],
)
def test_experts(
    backend: str, dtype: torch.dtype, num_experts: int, num_chosen: int, hidden: int, width: int
) -> None:
    ops, count = ops_of(backend), num_rows(backend, 70)
    experts = ops.pack_experts(
        some(backend, num_experts, 2 * width, hidden, dtype=dtype) / hidden**0.5,
        some(backend, num_experts, hidden, width, dtype=dtype) / width**0.5,
    )
    x, extra = (some(backend, count, hidden, dtype=dtype) for _ in range(2))
    weights, ids = ops.route_experts(some(backend, count, num_experts), num_chosen, True)
    rows = torch.arange(count, device=x.device)
    rows_keep_their_bits("experts", lambda r: experts(x[r], weights[r], ids[r], None), rows)
    rows_keep_their_bits("and more", lambda r: experts(x[r], weights[r], ids[r], extra[r]), rows)


# ---------------------------------------------------------------- a layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlp_layer(dtype: torch.dtype) -> None:
    config = ModelConfig(
        family="llama",
        vocab_size=199,
        hidden_size=72,
        intermediate_size=136,
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        rope=RopeConfig(rotary_dim=8),
        mlp_bias=True,
    )
    build = Build(dispatch.resolve(CPU, 8), solo_group(), dtype, CPU)
    mlp = GatedMLP(build, ModelPartition.of(config, 1))
    for _, target in mlp.targets(""):
        target.copy_(torch.randn(target.shape) / 9)
    mlp.pack()
    rows_keep_their_bits("mlp", lambda x: mlp(x).total(), torch.randn(130, 72).to(dtype))


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_net_with_drafts(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """B39: an answer to 5 tokens, token by token and in rows of up to 4 of which some are kept."""
    config = ModelConfig(
        family="qwen3_next",
        vocab_size=199,
        hidden_size=72,
        intermediate_size=136,
        num_layers=1,
        num_heads=3,
        num_kv_heads=3,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        rope=RopeConfig(rotary_dim=8),
        delta=DeltaConfig(
            num_key_heads=2, num_value_heads=6, key_head_dim=8, value_head_dim=12, conv_width=4
        ),
        delta_layers=(True,),
    )
    partition, ops = ModelPartition.of(config, 1), dispatch.resolve(CPU, 8)
    net = DeltaNet(Build(ops, solo_group(), dtype, CPU), partition)
    for _, target in net.targets(""):
        target.copy_(torch.randn(target.shape) / 9)
    net.pack()
    x = torch.randn(60, 72).to(dtype)
    kept = partition.pending_shapes(0, 3)
    pending = PendingTokens(
        torch.full((2, *kept[0]), float("nan"), dtype=dtype),
        *(torch.full((2, *shape), float("nan")) for shape in kept[1:]),
    )
    conv, state = torch.zeros(2, 3, 104, dtype=dtype), torch.zeros(2, 6, 12, 8, dtype=state_dtype)
    caches = [StateCache(conv, state), StateCache(conv.clone(), state.clone(), pending)]

    def run(cache: StateCache, start: int, count: int, before: int = 0, true: int = 0) -> Tensor:
        plan = ops.plan_delta([start], [count], [5], [1], (), [before], [true > 0])
        tokens = x[start : start + count].clone()
        if true:
            tokens[true:] = float("nan")
        at = torch.zeros(count, dtype=torch.int64)
        batch = ForwardBatch(at, at, at, {}, plan)
        return net(tokens, (tokens, tokens), batch, cache).total()

    single = [run(caches[0], 0, 5), *(run(caches[0], at, 1) for at in range(5, 60))]
    outputs, at, before = [run(caches[1], 0, 5)], 5, 0
    for count, true in itertools.cycle([(4, 4), (4, 1), (4, 3), (1, 0), (2, 1), (1, 0), (1, 0)]):
        if at + count > 60:
            break
        outputs.append(run(caches[1], at, count, before, true)[: true or count])
        at, before = at + (true or count), true
    outputs.append(run(caches[1], at, 60 - at, before))
    assert_same_bits("outputs", torch.cat(outputs), torch.cat(single))
    assert_same_bits("state", caches[1].state, caches[0].state)
    assert_same_bits("inputs", caches[1].conv, caches[0].conv)


# ---------------------------------------------------------------- the model


MODELS = ("llama", "qwen2-sliding", "qwen3", "qwen3-next")


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    write_checkpoint(request.param, directory)
    return directory


ONE_OR_TWO_RANKS = pytest.mark.parametrize("turn", [0, 1], ids=["float32", "bfloat16"])
"""Both dtypes of each model, and one or two ranks with each in turn from model to model."""


def ranks_of(model: Path, turn: int) -> int:
    return 1 + (MODELS.index(model.name) + turn) % 2


@ONE_OR_TWO_RANKS
def test_model_alone_and_in_company(checkpoint: Path, turn: int) -> None:
    """Solo and in random batches, with prompts cut anywhere: same tokens, same logits' bits."""
    tp, dtype = ranks_of(checkpoint, turn), ("float32", "bfloat16")[turn]
    prompts = [random_ids(count, seed=count) for count in (1, 2, 12, 63, 64, 65, 90, 100)]
    engine = LocalEngine(checkpoint, tp=tp, dtype=dtype, max_model_len=128)
    solo = [engine.generate([prompt], max_tokens=6)[0] for prompt in prompts]
    for max_step_tokens in (64, 150, 2048):
        limits = {"max_step_tokens": max_step_tokens, "max_requests": 5}
        arrivals = [random.randint(0, 6) for _ in prompts]
        answers = engine.generate(prompts, max_tokens=6, arrivals=arrivals, scheduling=limits)
        for alone, answer in zip(solo, answers, strict=True):
            assert answer.token_ids == alone.token_ids
            assert_same_bits("logits", torch.stack(answer.logits), torch.stack(alone.logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_with_attention_by_the_formula(checkpoint: Path, dtype: str) -> None:
    """`--attn reference`: close to the tiles, within a hundredth a layer of bf16 roundings, and one
    answer of its own."""
    prompts = [random_ids(count, seed=count) for count in (2, 64, 65, 90)]
    engine = LocalEngine(checkpoint, dtype=dtype, attn="reference")
    tiled = LocalEngine(checkpoint, dtype=dtype).prompt_logits(prompts[-1])
    assert_close(
        "logits",
        engine.prompt_logits(prompts[-1]),
        tiled,
        {"float32": 1e-5, "bfloat16": 0.01 * engine.config.num_layers}[dtype],
    )
    solo = [engine.generate([prompt], max_tokens=6)[0] for prompt in prompts]
    crowded = LocalEngine(
        checkpoint, dtype=dtype, attn="reference", max_step_tokens=64, num_blocks=5, max_requests=3
    )
    answers = crowded.generate(prompts, max_tokens=6, arrivals=[0, 1, 1, 3])
    for alone, answer in zip(solo, answers, strict=True):
        assert answer.token_ids == alone.token_ids
        assert_same_bits("logits", torch.stack(answer.logits), torch.stack(alone.logits))


@ONE_OR_TWO_RANKS
def test_model_after_a_prefix_hit_and_after_pre_emption(checkpoint: Path, turn: int) -> None:
    """With KV that others left, and computed again from the start: same logits' bits."""
    tp, dtype = ranks_of(checkpoint, turn), ("float32", "bfloat16")[turn]
    stem = random_ids(140, seed=1)
    prompts = [stem[:120], stem[:128], stem[:70] + random_ids(50, seed=2), stem]
    plain = LocalEngine(checkpoint, tp=tp, dtype=dtype, max_model_len=200, prefix_cache=False)
    solo = [plain.generate([prompt], max_tokens=20)[0] for prompt in prompts]
    for prefix_cache in (False, True):
        crowded = LocalEngine(
            checkpoint,
            tp=tp,
            dtype=dtype,
            max_model_len=200,
            num_blocks=5,
            max_step_tokens=100,
            prefix_cache=prefix_cache,
        )
        answers = crowded.generate(prompts, max_tokens=20, arrivals=[0, 3, 5, 9])
        assert crowded.num_preemptions > 0
        assert any(crowded.num_cached_tokens) is prefix_cache
        for alone, answer in zip(solo, answers, strict=True):
            assert answer.token_ids == alone.token_ids
            assert_same_bits("logits", torch.stack(answer.logits), torch.stack(alone.logits))


@pytest.mark.parametrize("tp", [1, 2])
def test_model_with_steps_planned_ahead(checkpoint: Path, tp: int) -> None:
    """Planned before the last results are in, past ends of text: same logits' bits."""
    stem = random_ids(140, seed=1)
    prompts = [stem[:60], stem[:128], stem[:70] + random_ids(50, seed=2), stem, stem[:3]]
    plain = LocalEngine(checkpoint, max_model_len=200).generate(prompts, max_tokens=16)
    ends = [answer.token_ids[8] for answer in plain[3:]]
    answers = {}
    for max_in_flight in (1, 2, 3):
        engine = LocalEngine(
            checkpoint,
            tp=tp,
            max_model_len=200,
            num_blocks=6,
            max_step_tokens=100,
            max_in_flight=max_in_flight,
        )
        answers[max_in_flight] = engine.generate(
            prompts, max_tokens=16, arrivals=[0, 3, 5, 9, 9], eos_token_ids=ends
        )
    assert sum(answer.reason == "stop" for answer in answers[1]) >= 2
    for ahead in (answers[2], answers[3]):
        for in_turn, answer in zip(answers[1], ahead, strict=True):
            assert (answer.token_ids, answer.reason) == (in_turn.token_ids, in_turn.reason)
            assert_same_bits("logits", torch.stack(answer.logits), torch.stack(in_turn.logits))


def test_sampled_answers_after_a_prefix_hit_and_after_pre_emption(checkpoint: Path) -> None:
    """A resumed request draws on with its own noise, and counts its own answer only."""
    stem = random_ids(140, seed=1)
    prompts = [stem[:120], stem[:128], stem[:70] + random_ids(50, seed=2), stem]
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.2, top_p=0.9, seed=2, repetition_penalty=1.3),
        SamplingParams(frequency_penalty=1.0, presence_penalty=0.5),
        SamplingParams(temperature=0.8, top_k=30, seed=3, min_tokens=20, logit_bias=((5, 1.0),)),
    ]
    plain = LocalEngine(checkpoint, tp=2, max_model_len=200, prefix_cache=False)
    crowded = LocalEngine(checkpoint, tp=2, max_model_len=200, num_blocks=5, max_step_tokens=100)
    answers = crowded.generate(prompts, max_tokens=22, arrivals=[0, 3, 5, 9], params=params)
    assert crowded.num_preemptions > 0
    assert any(crowded.num_cached_tokens)
    for prompt, recipe, answer in zip(prompts, params, answers, strict=True):
        alone = plain.generate([prompt], max_tokens=22, params=[recipe])[0]
        assert answer.token_ids == alone.token_ids


@torch.inference_mode()
def test_blocks_change_hands_without_a_trace(checkpoint: Path) -> None:
    """A request on blocks full of NaN answers as on fresh ones."""
    engine = LocalEngine(checkpoint, num_blocks=3)
    prompt = random_ids(70)
    before = engine.generate([prompt], max_tokens=8)[0]
    for layer in engine.ranks[0].cache.layers:
        layer.k[1:].fill_(float("nan"))
        layer.v[1:].fill_(float("nan"))
    after = engine.generate([prompt], max_tokens=8)[0]
    assert_same_bits("logits", torch.stack(after.logits), torch.stack(before.logits))


@pytest.mark.usefixtures("nan_filled_empty")
def test_memory_that_nobody_wrote_is_never_read(checkpoint: Path) -> None:
    """With every fresh tensor full of NaN a run ends, on NaN-free logits."""
    engine = LocalEngine(checkpoint, tp=2)
    prompts = [random_ids(count, seed=count) for count in (3, 70)]
    for answer in engine.generate(prompts, max_tokens=8):
        assert not torch.stack(answer.logits).isnan().any()


@torch.inference_mode()
def test_scratch_never_reaches_a_live_row(checkpoint: Path) -> None:
    """Block 0 and slot 0 are never read for a request."""
    engine = LocalEngine(checkpoint)
    prompts = [random_ids(count, seed=count) for count in (3, 70)]
    before = engine.generate(prompts, max_tokens=8)
    for layer in engine.ranks[0].cache.layers:
        layer.k[0].fill_(float("nan"))
        layer.v[0].fill_(float("nan"))
    for got, want in zip(engine.generate(prompts, max_tokens=8), before, strict=True):
        assert_same_bits("logits", torch.stack(got.logits), torch.stack(want.logits))


def test_seeded_answers_alone_and_in_company(tmp_path: Path) -> None:
    """B70: a seeded request answers the same alone, in any company and row, on 1 to 3 ranks."""
    write_checkpoint("llama", tmp_path)
    prompts = [random_ids(count, seed=count) for count in (1, 5, 12, 64, 70)] * 2
    seeded = [
        SamplingParams(temperature=1.0, seed=42),
        SamplingParams(temperature=0.7, top_k=20, seed=42),
        SamplingParams(temperature=1.5, top_p=0.8, seed=0),
        SamplingParams(temperature=1.2, min_p=0.05, seed=2**63 - 1),
        SamplingParams(temperature=2.0, top_k=50, top_p=0.9, min_p=0.01, seed=7),
    ]
    others = [
        SamplingParams(repetition_penalty=1.5, logit_bias=((3, 2.0),)),
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=1.0, frequency_penalty=1.0, min_p=0.02, seed=42),
        SamplingParams(temperature=1.0, presence_penalty=2.0, seed=42, min_tokens=5),
    ]
    params = [*seeded, *others]
    engine = LocalEngine(tmp_path)
    solo = [
        engine.generate([prompt], max_tokens=8, params=[choice])[0].token_ids
        for prompt, choice in zip(prompts, params, strict=True)
    ]
    assert (
        solo[6] != engine.generate([prompts[6]], max_tokens=8, params=[params[6]])[0].token_ids
    ), "unseeded"
    for tp in (1, 2, 3):
        crowded = LocalEngine(tmp_path, tp=tp, max_step_tokens=64, max_requests=5)
        order = random.sample(range(len(prompts)), len(prompts))
        answers = crowded.generate(
            [prompts[i] for i in order],
            max_tokens=8,
            params=[params[i] for i in order],
            arrivals=[random.randint(0, 6) for _ in order],
        )
        for i, answer in zip(order, answers, strict=True):
            if params[i].temperature == 0 or params[i].seed is not None:
                assert answer.token_ids == solo[i], (tp, order, i)


def test_biases_penalties_and_late_ends_hold_at_every_position(tmp_path: Path) -> None:
    """B71: whatever greedy decoding would say next is barred, and an end comes when it may."""
    write_checkpoint("llama", tmp_path)
    engine = LocalEngine(tmp_path, tp=2)
    prompt = random_ids(12)
    plain = engine.generate([prompt], max_tokens=12)[0].token_ids
    barred = SamplingParams(logit_bias=tuple((token, -100.0) for token in sorted({*plain})))
    answer = engine.generate([prompt], max_tokens=12, params=[barred])[0].token_ids
    assert len(answer) == 12
    assert not {*answer} & {*plain}
    once = SamplingParams(repetition_penalty=100.0, frequency_penalty=2.0)
    answer = engine.generate([prompt], max_tokens=12, params=[once])[0].token_ids
    assert len({*answer}) == 12
    ends = [*range(0, 199, 2)]
    answers = engine.generate(
        [prompt] * 3,
        max_tokens=30,
        eos_token_ids=ends,
        params=[
            SamplingParams(temperature=5.0, seed=seed, min_tokens=min_tokens)
            for seed, min_tokens in [(1, 0), (1, 8), (2, 8)]
        ],
    )
    assert all(answer.token_ids[-1] in ends for answer in answers)
    assert len(answers[0].token_ids) < 8
    for answer in answers[1:]:
        assert len(answer.token_ids) > 8
        assert not {*answer.token_ids[:8]} & {*ends}
    assert min(len(answer.token_ids) for answer in answers[1:]) == 9, (
        "not a token later than it may"
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_min_p_bars_the_unlikely_at_every_position(tp: int, tmp_path: Path) -> None:
    """B71: beside greedy and unfiltered company; without it the unlikely come too."""
    write_checkpoint("llama", tmp_path)
    engine = LocalEngine(tmp_path, tp=tp)
    wild = SamplingParams(temperature=5.0, seed=4)
    strict = replace(wild, min_p=0.5)
    company = [strict, SamplingParams(), wild, strict]
    answers = engine.generate([random_ids(9)] * 4, max_tokens=24, params=company)
    gaps = []
    for answer in answers:
        logits, ids = torch.stack(answer.logits) / 5.0, torch.tensor(answer.token_ids)
        gaps.append(logits.amax(1) - logits[torch.arange(24), ids])
    assert float(max(gaps[0].max(), gaps[3].max())) <= math.log(2) + 1e-6
    assert float(gaps[0].max()) > 0.05
    assert float(gaps[2].max()) > math.log(2)
    assert answers[0].token_ids == answers[3].token_ids


def test_prompts_that_share_a_seed_share_no_noise(tmp_path: Path) -> None:
    """B73: with logits all but equal (a high temperature) two prompts have unrelated answers."""
    write_checkpoint("llama", tmp_path)
    engine = LocalEngine(tmp_path)
    params = SamplingParams(temperature=100.0, seed=3)
    first, again, other = (
        answer.token_ids
        for answer in engine.generate(
            [random_ids(9, seed=1), random_ids(9, seed=1), random_ids(9, seed=2)],
            max_tokens=24,
            params=[params] * 3,
        )
    )
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) <= 3
