"""Embedding over a shard on the GPU: rows of the table, zeros for other shards, no stray read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels.embedding import embed_shard

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]


def walled(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A table between rows of NaN."""
    table = kernel_rig.poisoned(rows + 2, width, dtype=dtype)
    table[1:-1] = torch.randn(rows, width).to(dtype).to(kernel_rig.DEVICE)
    return table[1:-1]


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 137, 1025])
@pytest.mark.parametrize("first_id", [0, 1, 500])
def test_rows_of_the_shard_and_zeros_for_the_rest(
    first_id: int, width: int, dtype: torch.dtype
) -> None:
    table = walled(503, width, dtype)
    last = first_id + 502
    inside = torch.tensor([first_id, last, first_id + 7, first_id + 7], device=table.device)
    outside = torch.tensor([first_id - 1, last + 1, 2**40, 10**6, -(2**40)], device=table.device)
    got = embed_shard(torch.cat((inside, outside)), table, first_id)
    assert_same_bits("rows", got[:4], table[inside - first_id])
    assert not bool(got[4:].any()), f"ids of other shards gave {got[4:].flatten()[:8].tolist()}"


def test_no_tokens() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=kernel_rig.DEVICE)
    assert embed_shard(none, walled(5, 8, torch.float32), 0).shape == (0, 8)


@pytest.mark.gpu
def test_a_table_of_more_elements_than_31_bits_and_many_tokens() -> None:
    width = 4096
    table = torch.zeros(2**31 // width + 1000, width, dtype=torch.bfloat16, device="cuda")
    table[-1] = torch.randn(width, device="cuda").to(torch.bfloat16)
    ids = torch.zeros(2**31 // width + 70_000, dtype=torch.int64, device="cuda")
    ids[-2:] = len(table) - 1 + 17
    got = embed_shard(ids, table, 17)
    assert_same_bits("last tokens", got[-2:], table[-1].expand(2, -1))
    assert not bool(got[:-2].any()), "id 0 is of another shard"


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    table = walled(1003, 1024, torch.bfloat16)
    ids = torch.tensor([5, 1002, 0, 2000], device="cuda")
    got = graph_rig.replayed(lambda: embed_shard(ids, table, 3))
    assert_same_bits("graph", got, embed_shard(ids, table, 3))
