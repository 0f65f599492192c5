"""Paged attention on the GPU: the formula, and one answer for a row however it is computed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close, assert_same_bits
from tests.ops.kernel_rig import (
    DEVICE,
    DTYPES,
    IS_GPU,
    MARKS,
    make_products_hide_their_shape,
    poisoned,
)
from unisono.ops.attention import AttentionShape
from unisono.ops.kernels import attention, attention_launch
from unisono.ops.kernels.attention import (
    most_runs,
    paged_attention,
    plan_attention,
    plan_padded,
    plan_records,
    splits_of_row,
    view_records,
)
from unisono.ops.kernels.attention_launch import Launch
from unisono.ops.reference.attention import attention as reference

pytestmark = MARKS

BOUND = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SCALE = 0.17
LENGTHS = [1, 63, 64, 65, 255, 256, 257, 700, 1100]
DTYPE = torch.bfloat16 if IS_GPU else torch.float16


@pytest.fixture(autouse=True)
def products_that_do_not_show_their_shape(monkeypatch):
    make_products_hide_their_shape(monkeypatch)


@dataclass
class Request:
    """Queries, keys and values of every position, and caches in which all else is NaN."""

    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor

    def attend(self, starts, counts, window=0, slopes=None, table=None):
        """Outputs of rows of this request, all in one step."""
        tables = (self.table if table is None else table).expand(len(starts), -1)
        q = torch.cat([self.q[s : s + c] for s, c in zip(starts, counts, strict=True)])
        plan = plan_attention(self.shape, starts, counts, tables, window)
        out = paged_attention(q, self.k_cache, self.v_cache, plan, SCALE, slopes)
        return list(out.split(counts))


def plan_on_the_device(shape, starts, counts, table, *, max_count, max_keys, window=0):
    """Row i owns tokens [i * max_count, (i + 1) * max_count), queries in the first counts[i]."""
    num_splits = splits_of_row(-(-max_keys // attention.SPLIT), window, max_count)
    order = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    columns = (order, order * max_count, starts.int(), counts.int(), order * num_splits)
    return plan_records(shape, torch.stack(columns), table, num_splits, window, max_count)


def request(length, shape, dtype, seed=0):
    torch.manual_seed(seed)
    pages = -(-length // 64)
    table = torch.randperm(pages + 3)[:pages] + 1
    k, v = (torch.randn(length, shape.num_kv_heads, shape.head_dim).to(dtype) for _ in range(2))
    q = torch.randn(length, shape.num_heads, shape.head_dim).to(dtype)
    k, v, q = k.to(DEVICE), v.to(DEVICE), q.to(DEVICE)
    caches = []
    for x in (k, v):
        cache = poisoned(pages + 4, shape.num_kv_heads, 64, shape.head_dim, dtype=dtype)
        write(cache, x, table)
        caches.append(cache)
    # Entries past the last page lead to NaN.
    table = torch.cat((table, torch.zeros(2, dtype=torch.int64)))[None].to(DEVICE)
    return Request(shape, q, k, v, *caches, table)


def write(cache, x, table):
    at = torch.arange(len(x))
    cache[table[at // 64].to(DEVICE), :, (at % 64).to(DEVICE)] = x


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("dtype", "window"), [*((dtype, 0) for dtype in DTYPES), (DTYPE, 100)], ids=str
)
@pytest.mark.parametrize(
    ("shape", "starts", "counts"),
    [
        (AttentionShape(9, 3, 64), [0, 63, 130], [1, 2, 30]),
        (AttentionShape(7, 1, 80), [600, 0, 64], [3, 20, 1]),
        (AttentionShape(2, 2, 16), [510, 17], [5, 33]),
        (AttentionShape(20, 1, 16), [508], [7]),
    ],
    ids=str,
)
def test_against_the_formula(shape, starts, counts, window, dtype):
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    made = [request(length, shape, dtype, seed) for seed, length in enumerate(lengths)]
    k_cache, v_cache = (
        torch.cat([getattr(one, name) for one in made]) for name in ("k_cache", "v_cache")
    )
    width = max(one.table.shape[1] for one in made)
    tables = torch.zeros(len(made), width, dtype=torch.int64, device=DEVICE)
    base = 0
    for row, one in enumerate(made):
        tables[row, : one.table.shape[1]] = one.table[0] + base
        base += len(one.k_cache)
    q = torch.cat([one.q[-count:] for one, count in zip(made, counts, strict=True)])
    plan = plan_attention(shape, starts, counts, tables, window)
    got = paged_attention(q, k_cache, v_cache, plan, SCALE).split(counts)
    for one, start, count, rows in zip(made, starts, counts, got, strict=True):
        at = torch.arange(start, start + count, device=DEVICE)
        want = reference(one.q[at].float(), one.k.float(), one.v.float(), at, SCALE, window)
        assert_close(f"row at {start}", rows, want, BOUND[dtype])


@pytest.mark.parametrize("window", [0, 70])
def test_slopes_are_those_of_the_formula(window):
    shape = AttentionShape(6, 2, 32)
    one = request(530, shape, DTYPE)
    slopes = torch.tensor([2.0 ** -(1 + i) for i in range(6)], device=DEVICE)
    prompt, last = one.attend([0, 529], [530, 1], window, slopes)
    at = torch.arange(530, device=DEVICE)
    want = reference(one.q.float(), one.k.float(), one.v.float(), at, SCALE, window, slopes)
    assert_close("slopes", prompt, want, BOUND[DTYPE])
    assert_same_bits("decoded with slopes", last, prompt[-1:])


@pytest.mark.parametrize(("window", "takes"), [(0, 1), (100, 1), (100, 2), (0, 4)])
def test_a_row_has_one_answer(window, takes, monkeypatch):
    monkeypatch.setattr(attention_launch, "_TAKES", ((0, takes),))
    # A window sees two splits at most; without one there are up to five to merge.
    lengths = LENGTHS[:-1] if window else LENGTHS
    _assert_one_answer(request(max(lengths), AttentionShape(3, 1, 16), DTYPE), window, lengths)


def _assert_one_answer(one, window, lengths, slopes=None):
    """Every way to compute a row gives the bits of the whole prompt's."""
    longest = max(lengths)
    (whole,) = one.attend([0], [longest], window, slopes)
    for length in lengths:
        (alone,) = one.attend([length - 1], [1], window, slopes)
        assert_same_bits(f"position {length - 1} alone", alone, whole[length - 1 : length])
    for starts, counts in [
        ([length - 1 for length in lengths], [1] * len(lengths)),
        ([max(0, length - 5) for length in lengths], [min(5, length) for length in lengths]),
        ([longest - 16, 3, longest - 1], [16, 9, 1]),
        ([0, 37, longest - 120], [37, 300, 120]),
        ([longest - 100, 500, 5], [17, 1, 200]),
    ]:
        for start, count, rows in zip(
            starts, counts, one.attend(starts, counts, window, slopes), strict=True
        ):
            name = f"rows [{start}, {start + count}) of {counts} queries"
            assert_same_bits(name, rows, whole[start : start + count])


def test_where_blocks_lie_changes_nothing():
    shape = AttentionShape(4, 2, 32)
    one = request(600, shape, DTYPE)
    other = torch.randperm(20)[:10]
    moved = Request(
        shape, one.q, one.k, one.v,
        *(poisoned(20, 2, 64, 32, dtype=DTYPE) for _ in range(2)), other[None].to(DEVICE),
    )  # fmt: skip
    write(moved.k_cache, one.k, other)
    write(moved.v_cache, one.v, other)
    for here, there in zip(
        one.attend([0, 599], [600, 1]), moved.attend([0, 599], [600, 1]), strict=True
    ):
        assert_same_bits("moved", there, here)


@pytest.mark.parametrize(
    ("window", "group", "takes"), [(0, 2, 1), (100, 2, 2), (0, 7, 2), (100, 7, 1), (0, 2, 4)]
)
def test_a_plan_made_on_the_device(window, group, takes, monkeypatch):
    """Upper bounds on the host, lengths on the device; 16 tokens of 7 heads take two tiles."""
    monkeypatch.setattr(attention_launch, "_TAKES", ((0, takes),))
    shape = AttentionShape(group, 1, 32)
    one = request(1100, shape, DTYPE)
    starts, counts = [1000, 0, 505, 40], [16, 3, 0, 11]
    q = torch.zeros(64, group, 32, dtype=DTYPE, device=DEVICE)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        q[row * 16 : row * 16 + count] = one.q[start : start + count]
    plan = plan_on_the_device(
        shape,
        torch.tensor(starts, device=DEVICE),
        torch.tensor(counts, device=DEVICE),
        one.table.expand(4, -1),
        max_count=16,
        max_keys=2000,
        window=window,
    )
    got = paged_attention(q, one.k_cache, one.v_cache, plan, SCALE)
    want = [one.attend([s], [c], window)[0] for s, c in zip(starts, counts, strict=True) if c]
    for row, rows in zip((0, 1, 3), want, strict=True):
        assert_same_bits(f"row {row}", got[row * 16 : row * 16 + len(rows)], rows)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("group", [2, 7])
def test_a_plan_padded_with_rows_of_no_tokens(window, group):
    """More tokens, rows and runs than the step has: outputs of its own stay, others are zeros."""
    shape = AttentionShape(group, 1, 32)
    one = request(700, shape, DTYPE)
    starts, counts = [600, 0, 3, 640, 130], [1, 16, 17, 60, 33]
    plan = plan_attention(shape, starts, counts, one.table.expand(5, -1), window)
    count, height = sum(counts), 192
    parts = []
    for queries, room in ((plan.few, 4), (plan.many, most_runs(shape, height))):
        kept = torch.full((5 * (room + 3),), -7, dtype=torch.int32, device=DEVICE)
        records = view_records(kept, room)
        records[:, queries.records.shape[1] :] = 0
        records[:, : queries.records.shape[1]] = queries.records
        parts.append(records)
    padded = plan_padded(shape, plan.block_table, *parts, longest=16, num_splits=4, window=window)
    q = poisoned(height, group, 32, dtype=DTYPE)
    q[:count] = torch.cat([one.q[s : s + c] for s, c in zip(starts, counts, strict=True)])
    got = paged_attention(q, one.k_cache, one.v_cache, padded, SCALE)
    want = torch.cat(one.attend(starts, counts, window))
    assert_same_bits("the step", got[:count], want)
    assert not got[count:].any()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 130))
def test_there_is_room_for_all_runs(counts, group):
    shape = AttentionShape(group, 1, 32)
    table = torch.zeros(len(counts), 1, dtype=torch.int64)
    plan = plan_attention(shape, [0] * len(counts), counts, table)
    runs = 0 if plan.many is None else plan.many.records.shape[1]
    assert runs <= most_runs(shape, sum(counts))


def test_queries_may_be_a_part_of_wider_rows():
    """As in q, k and v of one projection."""
    shape = AttentionShape(4, 2, 16)
    one = request(100, shape, DTYPE)
    plan = plan_attention(shape, [0], [100], one.table)
    wide = torch.cat((one.q, poisoned(100, 4, 16, dtype=DTYPE)), 1)
    a = paged_attention(wide[:, :4], one.k_cache, one.v_cache, plan, SCALE)
    b = paged_attention(one.q, one.k_cache, one.v_cache, plan, SCALE)
    assert_same_bits("strided", a, b)


def test_only_splits_in_sight_are_launched():
    shape = AttentionShape(8, 2, 16)
    table = torch.zeros(1, 200, dtype=torch.int64)
    for start, count, window, splits in [
        (255, 1, 0, 1),
        (256, 1, 0, 2),
        (254, 3, 0, 2),
        (10_100, 1, 100, 1),
        (10_240, 1, 2, 2),
        (10_240, 1, 1, 1),
    ]:
        plan = plan_attention(shape, [start], [count], table, window)
        assert plan.many is None
        assert plan.few is not None
        assert plan.few.num_splits == splits, (start, count, window)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "group", "window"),
    [(64, 1, 1000), (64, 3, 0), (128, 4, 0), (128, 7, 100), (256, 3, 1000), (256, 4, 100)],
)
def test_one_answer_at_real_widths(dim, group, window):
    one = request(3001, AttentionShape(2 * group, 2, dim), torch.bfloat16)
    _assert_one_answer(one, window, [1, 64, 256, 257, 512, 513, 700, 1500, 3001])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(80, torch.float16), (192, torch.float16), (112, torch.float32), (256, torch.float32)],
    ids=str,
)
def test_one_answer_in_other_dtypes_and_widths(dim, dtype):
    one = request(1100, AttentionShape(4, 2, dim), dtype)
    _assert_one_answer(one, 0, LENGTHS)
    at = torch.tensor([0, 511, 1099], device=DEVICE)
    want = reference(one.q[at].float(), one.k.float(), one.v.float(), at, SCALE)
    got = torch.cat(one.attend(at.tolist(), [1] * 3))
    assert_close(f"dim {dim}", got, want, BOUND[dtype])


@pytest.mark.gpu
def test_one_answer_with_slopes():
    one = request(1500, AttentionShape(8, 2, 128), torch.bfloat16)
    slopes = torch.tensor([2.0 ** -(1 + i) for i in range(8)], device=DEVICE)
    _assert_one_answer(one, 0, [1, 513, 1500], slopes)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 256])
def test_launch_settings_change_no_bits(dim, monkeypatch):
    """Height, warps and stages are free; `mma` below four warps of 16 rows, `wgmma` above."""
    one = request(1500, AttentionShape(8, 2, dim), torch.bfloat16)
    (want,) = one.attend([0], [1500])
    settings = [Launch(16, 1, 2), Launch(16, 4, 2), Launch(32, 2, 2), Launch(64, 4, 1)]
    settings += [Launch(64, 8, 2)] if dim == 256 else [Launch(128, 4, 2), Launch(128, 8, 2)]
    for launch in settings:
        monkeypatch.setattr(attention, "prefill_launch", lambda *_, launch=launch: launch)
        (got,) = one.attend([0], [1500])
        assert_same_bits(f"prompt, {launch}", got, want)
    settings = [(16, 1, 2, 1), (16, 8, 2, 2), (32, 2, 2, 4), (64, 4, 2, 2), (64, 8, 2, 8)]
    settings += [(16, 4, 3, takes) for takes in (1, 2, 4, 8)]
    for setting in settings:
        launch = Launch(*setting)
        monkeypatch.setattr(attention, "decode_launch", lambda *_, launch=launch: launch)
        for count in (1, 5, 16):
            (got,) = one.attend([1500 - count], [count])
            assert_same_bits(f"{count} rows, {launch}", got, want[-count:])


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    """The request's blocks lie at the end of a cache of 2.2e9 elements."""
    shape = AttentionShape(8, 2, 128)
    one = request(1000, shape, torch.bfloat16)
    blocks = 2_200_000_000 // (2 * 64 * 128)
    table = torch.arange(blocks - 16, blocks)
    caches = [
        torch.empty(blocks, 2, 64, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    ]
    for cache, x in zip(caches, (one.k, one.v), strict=True):
        cache[-17:] = float("nan")
        write(cache, x, table)
    far = Request(shape, one.q, one.k, one.v, *caches, table[None].to(DEVICE))
    for a, b in zip(far.attend([0, 999], [1000, 1]), one.attend([0, 999], [1000, 1]), strict=True):
        assert_same_bits("far blocks", a, b)


@pytest.mark.gpu
def test_a_prompt_of_33_000_tokens():
    one = request(33_000, AttentionShape(8, 2, 128), torch.bfloat16)
    (whole,) = one.attend([0], [33_000])
    starts = [0, 511, 512, 20_000, 32_767, 32_768, 32_999]
    for start, row in zip(starts, one.attend(starts, [1] * len(starts)), strict=True):
        assert_same_bits(f"position {start}", row, whole[start : start + 1])
    at = torch.tensor(starts, device=DEVICE)
    want = reference(one.q[at].float(), one.k.float(), one.v.float(), at, SCALE)
    assert_close("33,000 tokens", whole[at], want, BOUND[torch.bfloat16])


@pytest.mark.gpu
def test_more_rows_than_a_grid_axis_holds_otherwise():
    """70,000 rows of one query: tiles lie on the long axis of the grid."""
    shape = AttentionShape(2, 1, 64)
    one = request(128, shape, torch.bfloat16)
    starts = [i % 128 for i in range(70_000)]
    plan = plan_attention(shape, starts, [1] * 70_000, one.table.expand(70_000, -1))
    at = torch.tensor(starts, device=DEVICE)
    got = paged_attention(one.q[at], one.k_cache, one.v_cache, plan, SCALE)
    (whole,) = one.attend([0], [128])
    assert_same_bits("70,000 rows", got, whole[at])


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths_on_the_device():
    shape = AttentionShape(8, 2, 128)
    one = request(2000, shape, torch.bfloat16)
    starts = torch.tensor([0, 0, 0], device=DEVICE)
    counts = torch.tensor([1, 1, 1], device=DEVICE)
    q = torch.zeros(12, 8, 128, dtype=torch.bfloat16, device=DEVICE)

    def step():
        plan = plan_on_the_device(
            shape, starts, counts, one.table.expand(3, -1), max_count=4, max_keys=2000
        )
        return paged_attention(q, one.k_cache, one.v_cache, plan, SCALE)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for at, length in [([5, 600, 1996], [1, 4, 4]), ([511, 512, 1000], [2, 0, 3])]:
        starts.copy_(torch.tensor(at))
        counts.copy_(torch.tensor(length))
        for row in range(3):
            q[row * 4 : row * 4 + length[row]] = one.q[at[row] : at[row] + length[row]]
        graph.replay()
        for row in range(3):
            if length[row]:
                (want,) = one.attend([at[row]], [length[row]])
                got = out[row * 4 : row * 4 + length[row]]
                assert_same_bits(f"replayed row {row} at {at[row]}", got, want)
