"""Paged attention on a GPU: the plan of a step, and which kernel serves which of its rows.

Rows with few queries (decoding, verification of drafts) go to `attention_decode`, the others to
`attention_prefill`; both write into one output. The definition that makes their bits equal is in
`attention_tiles`, how they are compiled in `attention_launch`, the reference in
`ops/reference/attention.py`.

A record is five int32 numbers, kept as the columns of a [5, records] tensor: row of the block
table, first token in the step, position of that token, number of tokens, first partial in the
scratch of the decode kernel. A kernel cuts a record into tiles of as many tokens as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.ops.attention import PAGE, AttentionShape
from unisono.ops.kernels.attention_launch import (
    decode_launch,
    decode_of,
    merge_of,
    prefill_launch,
    prefill_of,
)
from unisono.ops.kernels.attention_tiles import SPLIT_TILES
from unisono.ops.kernels.gaps import Outputs, output
from unisono.ops.kernels.launch import power_of_two
from unisono.ops.transfer import upload

SPLIT = PAGE * SPLIT_TILES.value
"""Keys of a split; its borders are absolute positions."""
FEW = 16
"""Most queries of a row that the decode kernel takes."""
LOG2_E = 1.4426950408889634
_RUN_ROWS = 128
"""Rows (tokens x query heads of a KV head) of a run: those of the tallest tile."""
_MERGE_HEIGHT = 8
"""Most rows that a program of the merge kernel takes."""
NUM_FIELDS = 5
"""Numbers of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewQueries:
    """Rows for the decode kernel, and upper bounds of what their records say on the device."""

    records: Tensor  # [5, rows] int32 on the device
    longest: int
    """Most queries of a row."""
    num_splits: int
    """Most splits that a row sees keys of."""
    num_partials: int
    """Splits that the rows see keys of, all rows together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyQueries:
    """Rows for the prefill kernel, cut into equal runs of tokens, the last of a row shorter."""

    records: Tensor  # [5, runs] int32 on the device
    longest: int
    """Tokens of a run."""
    num_keys: int
    """Most keys that a run sees, or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What the layers of one step share; made once a step for each window in use."""

    shape: AttentionShape
    block_table: Tensor  # [rows, blocks] int64
    window: int
    few: FewQueries | None
    many: ManyQueries | None
    outputs: Outputs | None = None
    """Where tokens of the step may be no row's: their outputs are zeros."""


def plan_attention(
    shape: AttentionShape,
    starts: Sequence[int],
    counts: Sequence[int],
    block_table: Tensor,
    window: int = 0,
) -> AttentionPlan:
    """Lay out the rows of a step: row i has queries at positions [starts[i], starts[i]+counts[i]).

    block_table [rows, blocks] int64 on the device of the cache: the block of each page of the
    row's request; entries past the row's last key are not read. The keys of the step itself are
    already in the cache. `window` as in the reference. Copies one int32 tensor to the device, and
    waits for nothing.
    """
    few: list[_Row] = []
    many: list[_Row] = []
    run = _tokens_of_run(shape)
    token = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if 0 < count <= FEW:
            few.append(_Row(row, token, start, count))
        else:
            many += (
                _Row(row, token + first, start + first, min(run, count - first))
                for first in range(0, count, run)
            )
        token += count
    # Long runs first: the short ones fill the gaps at the end.
    many.sort(key=lambda row: -row.start)
    spans = [_num_splits(row.start, row.count, window) for row in few]
    packed = _records(few, spans) + _records(many, [0] * len(many))
    records = upload(torch.tensor(packed, dtype=torch.int32), block_table.device)
    border = NUM_FIELDS * len(few)
    few_queries = many_queries = None
    if few:
        few_queries = FewQueries(
            records=records[:border].view(NUM_FIELDS, -1),
            longest=max(row.count for row in few),
            num_splits=max(spans),
            num_partials=sum(spans),
        )
    if many:
        many_queries = ManyQueries(
            records=records[border:].view(NUM_FIELDS, -1),
            longest=run,
            num_keys=max(row.start + row.count for row in many),
        )
    return AttentionPlan(
        shape=shape, block_table=block_table, window=window, few=few_queries, many=many_queries
    )


def splits_of_row(max_splits: int, window: int = 0, max_count: int = 1) -> int:
    """Most splits that up to `max_count` queries of a row see keys of, where its request has at
    most `max_splits`."""
    return min(max_splits, (max_count + window - 3) // SPLIT + 2) if window else max_splits


def plan_records(
    shape: AttentionShape,
    records: Tensor,
    block_table: Tensor,
    num_splits: int,
    window: int = 0,
    max_count: int = 1,
) -> AttentionPlan:
    """Plan a step of at most `max_count` <= FEW queries a row whose `records` [5, rows] int32 the
    device writes.

    No row sees keys of more than `num_splits` splits, and row i gives its first partial as
    i * num_splits. Of a step of several queries a row, tokens may be no row's.
    """
    assert 1 <= max_count <= FEW, f"{max_count} queries a row are not few"
    return AttentionPlan(
        shape=shape,
        block_table=block_table,
        window=window,
        few=_few_on_device(records, num_splits, max_count),
        many=None,
        outputs=Outputs() if max_count > 1 else None,
    )


def plan_padded(
    shape: AttentionShape,
    block_table: Tensor,
    few: Tensor,
    many: Tensor,
    *,
    longest: int,
    num_splits: int,
    window: int,
) -> AttentionPlan:
    """Plan a step by the records that `plan_attention` made of it, followed by some of no tokens.

    few, many [5, records] int32 on the device, either may have none; rows of few have at most
    `longest` queries and none sees keys of more than `num_splits` splits. Tokens may be no row's.
    """
    splits = splits_of_row(num_splits, window, longest)
    runs = ManyQueries(records=many, longest=_tokens_of_run(shape), num_keys=num_splits * SPLIT)
    return AttentionPlan(
        shape=shape,
        block_table=block_table,
        window=window,
        few=_few_on_device(few, splits, longest) if few.shape[1] else None,
        many=runs if many.shape[1] else None,
        outputs=Outputs(),
    )


def most_runs(shape: AttentionShape, num_tokens: int) -> int:
    """Most runs that rows of more than FEW tokens are cut into, `num_tokens` together."""
    return num_tokens // _tokens_of_run(shape) + num_tokens // (FEW + 1)


def view_records(numbers: Tensor, count: int) -> Tensor:
    """The first of `numbers` [5 * at least count] as [5, count] records."""
    return numbers[: NUM_FIELDS * count].view(NUM_FIELDS, count)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attention of the step's queries over the paged cache.

    q [T, heads, head_dim], heads of a token contiguous; caches [blocks, kv_heads, PAGE, head_dim]
    contiguous, of the dtype of q. `scale` > 0. slopes [heads] fp32 as in the reference. Returns
    [T, heads, head_dim] in the dtype of q; where the plan has `outputs`, good until the next call
    with it. Keys no query of the step sees may hold anything.
    """
    shape = plan.shape
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k_cache.shape[1:] == (shape.num_kv_heads, PAGE, shape.head_dim)
    assert scale > 0
    if q.stride(2) != 1 or q.stride(1) != shape.head_dim:
        q = q.contiguous()
    out = output(plan.outputs, q, *q.shape)
    if plan.few is not None:
        _run_decode(out, q, k_cache, v_cache, plan, plan.few, scale * LOG2_E, slopes)
    if plan.many is not None:
        _run_prefill(out, q, k_cache, v_cache, plan, plan.many, scale * LOG2_E, slopes)
    return out


@dataclass(frozen=True, slots=True)
class _Row:
    """`count` queries from position `start` on: those of a request, or some of them."""

    row: int
    token: int
    start: int
    count: int


def _few_on_device(records: Tensor, num_splits: int, longest: int) -> FewQueries:
    """Rows [5, rows] of which no more is known here than bounds."""
    return FewQueries(
        records=records,
        longest=longest,
        num_splits=num_splits,
        num_partials=records.shape[1] * num_splits,
    )


def _tokens_of_run(shape: AttentionShape) -> int:
    return max(1, _RUN_ROWS // shape.group)


def _run_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    few: FewQueries,
    scale: float,
    slopes: Tensor | None,
) -> None:
    shape, kv_heads, num_records = plan.shape, plan.shape.num_kv_heads, few.records.shape[1]
    launch = decode_launch(shape, q.dtype, few.longest, num_records * kv_heads, few.num_splits)
    per_tile = launch.height // shape.group
    tiles_per_record = -(-few.longest // per_tile)
    rows = min(per_tile, few.longest) * shape.group
    direct = few.num_splits <= launch.takes
    size = 0 if direct else few.num_partials * tiles_per_record * kv_heads * rows
    sums, partials = _scratch(size, shape.head_dim, q.device)
    kind = (shape, plan.window, launch, q.device)
    num_tiles = num_records * tiles_per_record
    decode_of(*kind, slopes is not None, q.dtype).launch(
        (num_tiles, kv_heads, -(-few.num_splits // launch.takes)),
        q,
        k_cache,
        v_cache,
        out,
        sums,
        partials,
        few.records,
        plan.block_table,
        out if slopes is None else slopes,
        scale,
        q.stride(0),
        k_cache.stride(0),
        plan.block_table.stride(0),
        num_records,
        tiles_per_record,
        rows,
    )
    if direct:
        return  # The kernel wrote the output.
    height = min(_MERGE_HEIGHT, power_of_two(rows))
    merge_of(*kind, height).launch(
        (num_tiles, kv_heads, -(-rows // height)),
        out,
        sums,
        partials,
        few.records,
        num_records,
        tiles_per_record,
        rows,
    )


def _run_prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    many: ManyQueries,
    scale: float,
    slopes: Tensor | None,
) -> None:
    shape, kv_heads, num_records = plan.shape, plan.shape.num_kv_heads, many.records.shape[1]
    launch = prefill_launch(shape, q.dtype, num_records * kv_heads, many.num_keys)
    per_tile = launch.height // shape.group
    tiles_per_record = -(-many.longest // per_tile)
    prefill_of(shape, plan.window, launch, q.device, slopes is not None, q.dtype).launch(
        (num_records * tiles_per_record, kv_heads),
        q,
        k_cache,
        v_cache,
        out,
        many.records,
        plan.block_table,
        out if slopes is None else slopes,
        scale,
        q.stride(0),
        k_cache.stride(0),
        plan.block_table.stride(0),
        num_records,
        tiles_per_record,
    )


def _scratch(rows: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For m and l, and for acc, of so many rows."""
    sums = torch.empty(rows, 2, dtype=torch.float32, device=device)
    return sums, torch.empty(rows, head_dim, dtype=torch.float32, device=device)


def _num_splits(start: int, count: int, window: int) -> int:
    """Splits with keys that some of the row's queries see."""
    first = max(start - window + 1, 0) // SPLIT if window else 0
    return (start + count - 1) // SPLIT - first + 1


def _records(rows: list[_Row], spans: list[int]) -> list[int]:
    """The five columns, one after the other."""
    partials = [0]
    for span in spans[:-1]:
        partials.append(partials[-1] + span)
    return [
        *(row.row for row in rows),
        *(row.token for row in rows),
        *(row.start for row in rows),
        *(row.count for row in rows),
        *partials[: len(rows)],
    ]
