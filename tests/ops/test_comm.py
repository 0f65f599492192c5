"""Collectives: the order of the sums, and the rolling hash."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_same_bits
from tests.rig import run_ranks
from unisono.ops.comm import Group, solo_group


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_sums_by_ascending_rank_in_fp32(ranks: int, dtype: torch.dtype) -> None:
    parts = [(torch.randn(5, 33) * 10**rank).to(dtype) for rank in range(ranks)]
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    for got in run_ranks(ranks, lambda group: group.all_reduce(parts[group.rank])):
        assert_same_bits("sum", got, want.to(dtype))


def test_all_reduce_leaves_its_input_alone() -> None:
    def body(group: Group) -> bool:
        x = torch.ones(3)
        group.all_reduce(x)
        return bool((x == 1).all())

    assert run_ranks(2, body) == [True, True]


def test_max() -> None:
    def body(group: Group) -> list[int]:
        return group.max(torch.tensor([group.rank, -group.rank])).tolist()

    assert run_ranks(3, body) == [[2, 0]] * 3


@pytest.mark.parametrize("widths", [[5], [3, 1], [1, 4, 2], [2, 2, 2, 1]], ids=str)
def test_gather_puts_columns_side_by_side(widths: list[int]) -> None:
    whole = torch.randn(6, sum(widths))

    def body(group: Group) -> torch.Tensor:
        return group.gather(whole.split(widths, dim=1)[group.rank], widths)

    for got in run_ranks(len(widths), body):
        assert_same_bits("columns", got, whole)


def test_digest_tells_kind_size_and_order_apart() -> None:
    """B15: a rank whose step sends other sizes than its peers' is named after it."""

    def digest(*calls: tuple[str, int]) -> int:
        group = solo_group()
        for kind, size in calls:
            getattr(group, kind)(torch.zeros(size, dtype=torch.int64))
        return group.digest

    same = digest(("all_reduce", 8), ("max", 4))
    assert digest(("all_reduce", 8), ("max", 4)) == same
    others = {
        digest(("max", 4), ("all_reduce", 8)),
        digest(("all_reduce", 8), ("max", 5)),
        digest(("all_reduce", 8), ("all_reduce", 4)),
        digest(("all_reduce", 8)),
    }
    assert len(others) == 4
    assert same not in others
