"""Numbers that travel while nobody waits: all arrive, and none before or after its time."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import waits_are_errors
from unisono.ops.transfer import Answers, Result, runs, upload, upload_all

CPU, GPU = torch.device("cpu"), torch.device("cuda")
INT32S = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)
INT64S = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)
LONG_NAP = 200_000_000
"""Cycles of a GPU: a tenth of a second."""


@given(
    st.lists(
        st.one_of(
            INT32S.map(lambda numbers: array("i", numbers)),
            INT64S.map(lambda numbers: array("q", numbers)),
            INT64S,
            INT64S.map(lambda numbers: torch.tensor(numbers, dtype=torch.int64)),
        ),
        max_size=6,
    )
)
def test_every_list_arrives_where_kernels_may_load_it(lists: list[list[int]]) -> None:
    want = [list(map(int, each)) for each in lists]
    got = upload_all(CPU, *lists)
    assert [each.tolist() for each in got] == want
    assert all(each.dtype == torch.int64 for each in got)
    starts = {each.storage_offset() * 8 % 16 for each in got if len(each)}
    assert starts <= {0}


def test_what_was_sent_may_change_afterwards() -> None:
    numbers, tensor = array("i", [1, 2, 3]), torch.tensor([4, 5])
    sent = upload_all(CPU, numbers, tensor)
    numbers[0], tensor[0] = 7, 7
    assert [each.tolist() for each in sent] == [[1, 2, 3], [4, 5]]


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), max_size=6))
def test_runs_follow_each_other(each: list[tuple[int, int]]) -> None:
    firsts, counts = (torch.tensor([*column]) for column in zip(*[(0, 0), *each], strict=True))
    want = [number for first, count in each for number in range(first, first + count)]
    assert runs(firsts, counts, len(want)).tolist() == want


def test_a_result_is_what_the_numbers_were() -> None:
    numbers = torch.arange(5)
    result = Result(numbers[:3])
    numbers += 1
    assert result.is_ready()
    assert result.read() == [0, 1, 2]
    assert Result(numbers[:0]).read() == []


@pytest.mark.parametrize(
    ("rows", "tokens", "counts"),
    [
        ([], [], []),
        ([[1, 7], [1, 8]], [7, 8], []),
        ([[1, 7], [0, 5], [1, 8]], [7, 8], [1, 0, 1]),
        ([[1, 7, 5, 5], [3, 1, 2, 3], [0, 5, 5, 5]], [7, 1, 2, 3], [1, 3, 0]),
        ([[1, 7, 5], [1, 8, 5]], [7, 8], [1, 1]),
    ],
)
def test_answers_are_the_tokens_that_rows_have(
    rows: list[list[int]], tokens: list[int], counts: list[int]
) -> None:
    """Counts are told where there may be others than one."""
    numbers = torch.tensor(rows, dtype=torch.int64) if rows else torch.zeros(0, 2)
    answers = Answers(numbers)
    assert answers.is_ready()
    assert (answers.read(), answers.counts) == (tokens, counts)


def test_a_nan_among_answers_is_named_by_its_row() -> None:
    answers = Answers(torch.tensor([[0, 4], [-1, 5], [1, 6], [-1, 7]]))
    with pytest.raises(FloatingPointError, match=r"sampling rows \[1, 3\] hold NaN"):
        answers.read()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 1000, 300_000])
def test_memory_on_its_way_is_nobody_elses(count: int) -> None:
    """Twenty steps' numbers wait for a device that is busy; the host has let go of all of them."""
    for is_pooled in (False, True):  # to take pinned memory for the pool may take a wait
        torch.cuda._sleep(LONG_NAP)
        sent, results = [], []
        with waits_are_errors():
            for step in range(20):
                left, right = upload_all(GPU, [step] * 3, torch.full((count,), step))
                other = upload(torch.full((count,), -step, dtype=torch.int32), GPU)
                sent.append((left, right, other))
                results.append(Result(right + left[0]))
                right += 1  # behind the copy to the host
            is_ready = [result.is_ready() for result in results]
        assert not is_pooled or count > 1000 or not any(is_ready)
        for step, (result, (left, right, other)) in enumerate(zip(results, sent, strict=True)):
            assert result.read() == [2 * step] * count
            assert left.tolist() == [step] * 3
            assert torch.equal(right, torch.full_like(right, step + 1))
            assert torch.equal(other, torch.full_like(other, -step))
            assert result.is_ready()
