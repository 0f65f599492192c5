"""Plans that a device lays out, on a CPU: its ops take them by what their records say.

So what a graph would hold runs in tests without a GPU, with the arithmetic of the CPU, and its
answers have the bits of steps that the host lays out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from unisono.ops import delta
from unisono.ops.delta import CHUNK, PendingTokens
from unisono.ops.kernels import attention, delta_plan, delta_rule, short_conv
from unisono.ops.kernels.attention import SPLIT, AttentionPlan, FewQueries, plan_attention
from unisono.ops.kernels.delta_plan import DeltaPlan
from unisono.ops.table import Ops


def with_device_plans(_rank: int, ops: Ops) -> Ops:
    """`ops` of a CPU, which take such plans too."""

    def paged_attention(q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float) -> Tensor:
        if not isinstance(plan, AttentionPlan):
            return ops.paged_attention(q, k, v, plan, scale)
        records = [part.records for part in (plan.few, plan.many) if part is not None]
        records = torch.cat(records, dim=1)
        rows, firsts, starts, counts, _ = records[:, records[3] > 0].tolist()
        if plan.few is not None:
            _check(plan.few, plan.window)
        assert plan.many is None or plan.many.records[3].max() <= plan.many.longest
        tables = plan.block_table[torch.tensor(rows)]
        own = ops.plan_attention(plan.shape, starts, counts, tables, plan.window)
        used = _used(firsts, counts)
        assert len(used) == len(set(used)), "two rows for a token"
        return _spread(ops.paged_attention(q[used], k, v, own, scale), used, len(q), 0.0)

    def short_conv(
        x: Tensor, weight: Tensor, conv: Tensor, plan: Any, pending: PendingTokens | None = None
    ) -> Tensor:
        if not isinstance(plan, DeltaPlan):
            return ops.short_conv(x, weight, conv, plan, pending)
        own = _delta_plan(plan)
        firsts, _, counts = plan.records[:3].tolist()
        used = _used(firsts, counts)
        out = ops.short_conv(x[used], weight, conv, own, pending)
        return _spread(out, used, len(x), float("nan"))  # which nobody reads

    def delta_rule(mixed: Tensor, b: Tensor, a: Tensor, *rest: Any) -> Tensor:
        decay, dt_bias, state, plan, *others = rest
        if not isinstance(plan, DeltaPlan):
            return ops.delta_rule(mixed, b, a, *rest)
        own = _delta_plan(plan)
        firsts, _, counts = plan.records[:3].tolist()
        used = _used(firsts, counts)
        out = ops.delta_rule(mixed[used], b[used], a[used], decay, dt_bias, state, own, *others)
        return _spread(out, used, len(mixed), 0.0)

    return replace(
        ops, paged_attention=paged_attention, short_conv=short_conv, delta_rule=delta_rule
    )


def with_device_plans_of_prompts(rank: int, ops: Ops) -> Ops:
    """The same, and what the host lays out is laid out for a device."""
    return replace(
        with_device_plans(rank, ops),
        plan_attention=plan_attention,
        plan_delta=partial(delta_plan.plan_delta, device=torch.device("cpu")),
    )


def with_kernels(_rank: int, ops: Ops) -> Ops:
    """`ops` with the kernels that take such plans, where there is an interpreter for them."""
    return replace(
        ops,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        plan_delta=partial(delta_plan.plan_delta, device=torch.device("cpu")),
        short_conv=short_conv.short_conv,
        delta_rule=delta_rule.delta_rule,
    )


def _check(few: FewQueries, window: int) -> None:
    """That there is room for what the records say."""
    taken = 0
    for _, _, start, count, place in few.records.T.tolist():
        assert count <= few.longest, "more queries than there is room for"
        if count > 0:
            first = max(start - window + 1, 0) // SPLIT if window else 0
            splits = (start + count - 1) // SPLIT - first + 1
            assert splits <= few.num_splits, "more splits than there is room"
            assert taken <= place <= few.num_partials - splits, "partials that overlap"
            taken = place + splits


def _delta_plan(plan: DeltaPlan) -> delta.DeltaPlan:
    _, starts, counts, chunked, pending, holds = plan.records.tolist()
    assert plan.may_hold or not any(holds)
    # A row from 0 on starts from nothing.
    late = [min(count, start) for count, start in zip(pending, starts, strict=True)]
    ends = [start + count for start, count in zip(starts, chunked, strict=True)]
    prompts = [end if count else 0 for end, count in zip(ends, chunked, strict=True)]
    numbers, saves = plan.states, _saves(plan, starts, counts, chunked)
    return delta.plan_delta(
        starts, counts, prompts, numbers, saves, late, holds, device=numbers.device
    )


def _saves(
    plan: DeltaPlan, starts: list[int], counts: list[int], chunked: list[int]
) -> list[tuple[int, int, int]]:
    """What a plan saves, whose tiles are checked: each token of a row must lie in one."""
    tiles: list[tuple[int, int, int]] = [tuple(tile) for tile in plan.tiles.T.tolist()]
    wanted = {(row, at) for row, count in enumerate(counts) for at in range(0, count, CHUNK)}
    found = [(row, at) for row, at, _ in tiles if counts[row]]
    assert sorted(found) == sorted(wanted), "tiles of tokens"
    in_prompts = {(row, at) for row, at in wanted if at < chunked[row]}
    first = [(row, at) for row, at, _ in tiles[: plan.num_chunks] if counts[row]]
    assert set(first) == in_prompts, "chunks are first"
    of_row = {row: first for row, first in plan.chunk_rows.T.tolist() if counts[row]}
    assert sorted(of_row) == [row for row, count in enumerate(chunked) if count]
    for row, begin in of_row.items():
        own = [tiles[begin + number][:2] for number in range(-(-chunked[row] // CHUNK))]
        assert own == [(row, CHUNK * number) for number in range(len(own))], "chunks in order"
    tails = [row for row in plan.tail_rows.tolist() if counts[row]]
    assert tails == [row for row, count in enumerate(counts) if count > chunked[row]]
    idle = [row for row, _, save in tiles if not counts[row] and save < 0]
    assert len(found) + len(idle) == len(tiles), "padding that saves"
    return [(row, starts[row] + at + CHUNK, save) for row, at, save in tiles if save >= 0]


def _used(firsts: Sequence[int], counts: Sequence[int]) -> list[int]:
    each = zip(firsts, counts, strict=True)
    return list(chain.from_iterable(range(first, first + count) for first, count in each))


def _spread(rows: Tensor, used: Sequence[int], count: int, gap: float) -> Tensor:
    """`rows` where they are `used` among `count`, and `gap` elsewhere."""
    out = rows.new_full((count, *rows.shape[1:]), gap)
    out[used] = rows
    return out
