"""Arg-max keys on the GPU: the reference's, bit by bit, for every cut and special value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import sampling
from unisono.ops.reference import sampling as reference

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]


def check(logits: Tensor, first_id: int, num_ids: int) -> None:
    """On a copy between columns of NaN, which is what lies behind a padded vocabulary."""
    rows, shard = logits.shape
    walled = kernel_rig.poisoned(rows, shard + 5, dtype=torch.float32)[:, 2 : 2 + shard]
    walled.copy_(logits)
    got = sampling.argmax_keys(walled, first_id, num_ids).cpu()
    want = reference.argmax_keys(logits, first_id, num_ids)
    assert_same_bits(f"{rows} x {shard}, ids {first_id}..{num_ids}", got, want)


@pytest.mark.parametrize("shard", [1, 7, 1003, 2048, 2049, 5000])
@pytest.mark.parametrize("first_id", [0, 1, 1000, 2**31 - 6000])
def test_keys_of_random_rows(shard: int, first_id: int) -> None:
    logits = torch.randn(5, shard) * 1e4
    for num_ids in (first_id + shard + 9, first_id + shard // 2 + 1, first_id + 1, first_id):
        check(logits, first_id, num_ids)
    check(logits.bfloat16().float(), first_id, first_id + shard)
    check(torch.randint(-2, 3, (5, shard)).float(), first_id, first_id + shard)


@pytest.mark.parametrize("shard", [8191, 8192, 8193, 20_000])
def test_many_rows_are_cut_into_longer_pieces(shard: int) -> None:
    """The lowest of equal ids wins, in one lane, one step or one piece and among them."""
    check(torch.randint(-2, 3, (sampling._MANY_ROWS, shard)).float(), 7, 7 + shard - 5)


def test_keys_of_special_values() -> None:
    inf, nan, tiny = float("inf"), float("nan"), 1e-45
    specials = torch.tensor([0.0, -0.0, inf, -inf, nan, tiny, -tiny, 3.4e38, -3.4e38, 1.0])
    check(specials[:, None], 3, 9)
    check(torch.full((2, 4100), -inf), 3, 4000)
    pairs = torch.cartesian_prod(specials, specials)
    logits = torch.full((2, len(pairs), 2100), -3.4e38)
    logits[0][:, [11, 2099]] = pairs
    logits[1][:, [2047, 2048]] = pairs
    check(logits.flatten(0, 1), 5, 10**6)
    noise = torch.randint(-(2**31), 2**31 - 1, (4, 5000)).to(torch.int32).view(torch.float32)
    check(noise, 0, 5000)
    check(torch.where(noise.isnan(), -1.0, noise), 0, 5000)


def test_nan_is_found_by_unpack_keys_where_it_may_be_chosen() -> None:
    logits = torch.randn(3, 4000)
    logits[1, 3000] = float("nan")
    for num_ids, want in [(4000, [False, True, False]), (3000, [False] * 3)]:
        keys = sampling.argmax_keys(logits.to(kernel_rig.DEVICE), 0, num_ids)
        ids, is_nan = reference.unpack_keys(keys)
        assert is_nan.tolist() == want
        assert bool((ids < num_ids).all())


def test_shards_agree_with_the_whole_and_no_rows_are_no_keys() -> None:
    logits = torch.randint(-3, 4, (20, 5003)).float().to(kernel_rig.DEVICE)
    whole = sampling.argmax_keys(logits, 0, 5000)
    for cut in (1, 2502, 5002):
        parts = [
            sampling.argmax_keys(part, first, 5000)
            for part, first in ((logits[:, :cut], 0), (logits[:, cut:], cut))
        ]
        assert_same_bits(f"cut at {cut}", torch.maximum(*parts), whole)
    assert sampling.argmax_keys(logits[:0], 0, 5000).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocabulary", "ranks"), [(151_936, 1), (151_936, 2), (262_208, 1)])
def test_real_vocabularies(vocabulary: int, ranks: int) -> None:
    shard = vocabulary // ranks
    for rows in (1, 64):
        check(torch.randn(rows, shard), vocabulary - shard, 151_669)
        check(torch.randn(rows, shard).bfloat16().float(), 0, vocabulary)


@pytest.mark.gpu
def test_more_logits_than_31_bits_and_rows_than_a_grid_axis() -> None:
    for rows, shard in [(15_000, 151_936), (70_001, 31_003)]:
        logits = torch.zeros(rows, shard, device="cuda")
        best = torch.arange(rows, device="cuda") % shard
        logits[torch.arange(rows, device="cuda"), best] = 1.0
        ids, is_nan = reference.unpack_keys(sampling.argmax_keys(logits, 0, shard))
        wrong = int((ids != best).sum())
        assert wrong == 0, f"{wrong} of {rows} rows wrong, first {ids[ids != best][:4].tolist()}"
        assert not bool(is_nan.any())
        del logits


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    logits = torch.randn(3, 151_936, device="cuda")
    got = graph_rig.replayed(lambda: sampling.argmax_keys(logits, 0, 151_669))
    assert_same_bits("graph", got, sampling.argmax_keys(logits, 0, 151_669))
