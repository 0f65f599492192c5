"""B30, B31: NaN in what belongs to nobody reaches no live row and no collective, and what belongs
to others is not written.

Bodies of graphs are run on the CPU, whose padding reads and writes scratch as on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.device_plans import with_device_plans, with_kernels
from tests.ops import kernel_rig
from tests.rig import LocalEngine, Rank
from tests.scratch import poison_scratch
from tests.tiny import random_ids, write_checkpoint
from unisono.ops.comm import Group
from unisono.ops.kernels import (
    decode,
    draft_plan,
)
from unisono.workers.protocol import StepPlan

T = TypeVar("T")
BODIES: dict[str, Any] = {"graphs": True, "graph_buckets": (8,), "max_requests": 8}
PROMPTS = [random_ids(length, 199, seed=length) for length in (1, 9, 64)]


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and the interpreter is not made for several."""
    lock = threading.Lock()
    for module, names in (
        (decode, ("expand_rows", "advance_rows")),
        (draft_plan, ("expand_drafts", "settle_drafts", "place_drafts")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, _locked(getattr(module, name), lock))


@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize("random_padding", [False, True])
@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [("llama", 0), ("qwen3-moe", 0), ("qwen3.5-moe", 0), ("qwen3-next", 2)],
)
def test_it_reaches_no_live_row(
    name: str, num_drafts: int, random_padding: bool, tmp_path: Path
) -> None:
    """Whatever padding computes: attention on a CPU reads what is hidden, so here it is NaN too."""
    write_checkpoint(name, tmp_path, mtp=num_drafts > 0)
    engine = LocalEngine(
        tmp_path,
        tp=2,
        num_drafts=num_drafts,
        ops_of=with_device_plans,
        random_padding=random_padding,
        **BODIES,
    )
    want = engine.generate(PROMPTS, 6)

    def poison(_step: int) -> None:
        for rank in engine.ranks:
            poison_scratch(rank)

    got = engine.generate(PROMPTS, 6, before_step=poison)
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        assert_same_bits("logits", torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_it_reaches_no_collective(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of a GPU, which read nothing that is hidden, padding has numbers."""
    kernel_rig.make_products_hide_their_shape(monkeypatch)
    write_checkpoint(name, tmp_path)
    engine = LocalEngine(tmp_path, ops_of=with_kernels, graphs=True, graph_buckets=(2,))
    want = engine.generate(PROMPTS[:1], 3)
    met: list[Tensor] = []
    all_reduce = Group.all_reduce

    def noted(self: Group, x: Tensor) -> Tensor:
        met.append(x.clone())
        return all_reduce(self, x)

    monkeypatch.setattr(Group, "all_reduce", noted)
    [rank] = engine.ranks
    got = engine.generate(PROMPTS[:1], 3, before_step=lambda step: poison_scratch(rank))
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    # The embedding's and two of each layer, in two steps of decoding.
    assert sum(len(x) == 2 for x in met) >= 2 * (1 + 2 * engine.config.num_layers)
    assert not any(x.isnan().any() for x in met)


@pytest.mark.parametrize(
    ("name", "num_drafts"), [("llama", 0), ("qwen3.5-moe", 0), ("qwen3-next", 2)]
)
def test_what_belongs_to_others_keeps_its_bytes(name: str, num_drafts: int, tmp_path: Path) -> None:
    """B30: each step changes the slots, blocks and states of its own rows, and no others."""
    write_checkpoint(name, tmp_path, mtp=num_drafts > 0)
    engine = LocalEngine(
        tmp_path, num_drafts=num_drafts, ops_of=with_device_plans, prefix_cache=False, **BODIES
    )
    [rank] = engine.ranks
    run, num_checked = rank.runner.step, 0

    def step(plan: StepPlan) -> Any:
        nonlocal num_checked
        before = [each.clone() for each in numbered(rank)]
        output = run(plan)
        own = owned(rank, plan)
        for number, (one, other) in enumerate(zip(before, numbered(rank), strict=True)):
            kept = [row for row in range(1, len(one)) if row not in own[number]]
            assert_same_bits(f"part {number} of others", one[kept], other[kept])
        num_checked += plan.rows.decode_only
        return output

    rank.runner.step = step  # type: ignore[method-assign]
    engine.generate(PROMPTS, 6, arrivals=[0, 2, 3])
    assert num_checked > 3


def numbered(rank: Rank) -> list[Tensor]:
    """The slot table by slot, KV by block, states by state."""
    table = rank.runner._slots
    slots = [*table.tensors]
    blocks = [part for layer in rank.cache.layers for part in (layer.k, layer.v)]
    states = [] if rank.states is None else [x.transpose(0, 1) for x in rank.states._tensors]
    return [*slots, *blocks, *states]


def owned(rank: Rank, plan: StepPlan) -> list[set[int]]:
    """Of each part of `numbered`: what a step may change."""
    table = rank.runner._slots
    slots = {*plan.rows.slot, *plan.open_slot, *plan.block_slot}
    blocks = {*table.block_table[[*slots]].flatten().tolist()}
    states = {*table.states[[*slots]].tolist(), *plan.save_state}
    num_parts = 0 if rank.states is None else len(rank.states._tensors)
    return [
        *[slots] * len(table.tensors),
        *[blocks] * 2 * len(rank.cache.layers),
        *[states] * num_parts,
    ]


def _locked(kernel: Callable[..., T], lock: threading.Lock) -> Callable[..., T]:
    def locked(*args: Any) -> T:
        with lock:
            return kernel(*args)

    return locked
