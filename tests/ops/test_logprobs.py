"""Log-probabilities by their definition: against fp64, ties, borders and special values."""

from __future__ import annotations

import math

import pytest
import torch

from unisono.ops.reference.logprobs import token_logprobs


@pytest.mark.parametrize("width", [1, 2, 7, 199, 1003, 49152])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_against_log_softmax_in_fp64(width: int, scale: float) -> None:
    logits = scale * torch.randn(12, width)
    ids = torch.randint(width, (12,))
    logprob, rank, top_ids, top = token_logprobs(logits, ids, 5)
    want = logits.double().log_softmax(-1)
    own = want.gather(1, ids[:, None])
    # fp32 rounds a log-probability x by at most 2^-24 |x|.
    room = 1e-6 + 2.0**-24 * own[:, 0].abs()
    assert logprob.dtype == top.dtype == torch.float32
    assert bool(((logprob.double() - own[:, 0]).abs() <= room).all())
    assert torch.equal(rank, (logits > logits.gather(1, ids[:, None])).sum(-1) + 1)
    count = min(5, width)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top_ids[:, :count], order)
    room = 1e-6 + 2.0**-24 * want.gather(1, order).abs()
    assert bool(((top[:, :count].double() - want.gather(1, order)).abs() <= room).all())
    assert bool((top_ids[:, count:] == -1).all())
    assert bool((top[:, count:] == -math.inf).all())


def test_ties_go_to_the_lowest_id_and_share_a_rank() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, -0.0, 0.0]])
    _, rank, top_ids, top = token_logprobs(row, torch.tensor([3]), 7)
    assert top_ids.tolist() == [[1, 3, 2, 4, 0, 5, 6]]
    assert rank.tolist() == [1]
    assert top[0, 0] == top[0, 1]
    assert top[0, 5] == top[0, 6]
    for token, want in ((2, 3), (4, 3), (0, 5), (5, 6), (6, 6)):
        assert token_logprobs(row, torch.tensor([token]), 0)[1].tolist() == [want]


def test_negative_logits_are_in_order() -> None:
    row = -torch.arange(1.0, 60.0)[None, :]
    _, rank, top_ids, _ = token_logprobs(row, torch.tensor([58]), 20)
    assert top_ids.tolist() == [list(range(20))]
    assert rank.tolist() == [59]


def test_more_likeliest_ids_are_a_longer_list_of_the_same() -> None:
    logits, ids = torch.randn(5, 300), torch.randint(300, (5,))
    most = token_logprobs(logits, ids, 20)
    for count in (0, 1, 7):
        fewer = token_logprobs(logits, ids, count)
        assert torch.equal(fewer[0], most[0])
        assert torch.equal(fewer[2], most[2][:, :count])
        assert torch.equal(fewer[3], most[3][:, :count])


def test_special_values() -> None:
    inf = math.inf
    row = torch.tensor([[-inf, 1.0, -inf]])
    logprob, rank, top_ids, top = token_logprobs(row, torch.tensor([1]), 3)
    assert (logprob.tolist(), rank.tolist()) == ([0.0], [1])
    assert (top_ids.tolist(), top.tolist()) == ([[1, 0, 2]], [[0.0, -inf, -inf]])
    # An id beyond the vocabulary has no share; all others are likelier.
    logprob, rank, _, _ = token_logprobs(torch.zeros(1, 4), torch.tensor([9]), 0)
    assert (logprob.tolist(), rank.tolist()) == ([-inf], [5])
    two = token_logprobs(torch.tensor([[inf, inf, 0.0]]), torch.tensor([1]), 0)[0]
    assert two.item() == pytest.approx(-math.log(2))
    assert token_logprobs(torch.tensor([[0.0, math.nan]]), torch.tensor([0]), 1)[0].isnan().all()
