"""Where the time of a step goes: arithmetic on invented traces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import ROOT
from unisono.ops.device_time import (
    MOST_KINDS,
    ORDERED_SUM,
    Activity,
    KernelTime,
    covered_ns,
    device_time,
)

GEMM, NCCL, COPY = (
    "linear_kernel",
    "ncclDevKernel_AllGather_RING_LL",
    "Memcpy DtoH (Device -> Pinned)",
)
STEP = (
    (GEMM, 0, 40, 7),
    (NCCL, 50, 30, 9),
    (GEMM, 70, 20, 7),
    ("_sum_kernel", 90, 5, 7),
    (COPY, 100, 4, 7),
)
"""Runs from 0 to 104, and 99 of them: idle from 40 to 50 and from 95 to 100. Only collectives run
from 50 to 70 and from 90 to 95."""


def trace(starts):
    return [
        Activity(name, start + at, duration, stream, step)
        for step, start in enumerate(starts)
        for name, at, duration, stream in STEP
    ]


def test_a_step_is_taken_apart():
    found = device_time(reversed(trace([0, 1000, 1110, 1220])))
    assert found is not None
    assert (found.num_steps, found.num_kernels, found.num_copies) == (3, 4, 1)
    assert (found.num_collectives, found.collective_ns) == (2, 25)
    assert (found.busy_ns, found.idle_ns, found.gap_ns) == (89, 15, 6)


def test_times_add_up_to_the_period_of_steps():
    found = device_time(trace([0, 1000, 1110, 1220]))
    assert found is not None
    assert found.busy_ns + found.idle_ns + found.gap_ns == 1110 - 1000


def test_steps_that_overlap_have_no_gap():
    found = device_time(trace([0, 1000, 1090, 1180]))
    assert found is not None
    assert found.gap_ns == 0


def test_busy_time_is_told_by_kernel():
    """The product that begins while others gather runs alone for 10 ns of its 20."""
    found = device_time(trace([0, 1000, 1110, 1220]))
    assert found is not None
    assert found.kernels == (
        KernelTime(name=GEMM, num_launches=2, busy_ns=50),
        KernelTime(name=NCCL, num_launches=1, busy_ns=30),
        KernelTime(name="_sum_kernel", num_launches=1, busy_ns=5),
        KernelTime(name="Memcpy DtoH", num_launches=1, busy_ns=4),
    )


def test_kernels_of_few_steps_are_left_out():
    rare = Activity("rare_kernel", 1050, 500, 7, 1)
    found = device_time([*trace([0, 1000, 2000, 3000]), rare])
    assert found is not None
    assert "rare_kernel" not in {kernel.name for kernel in found.kernels}
    assert found.kernels[0].busy_ns == 50


def test_of_too_many_kinds_the_longest_are_told():
    kinds = [
        Activity(f"kernel_{number:03}", 10**6 * step + 1000 * number, 1 + number, 7, step)
        for step in range(3)
        for number in range(MOST_KINDS + 9)
    ]
    found = device_time(kinds)
    assert found is not None
    names = [kernel.name for kernel in found.kernels]
    assert names == [f"kernel_{number:03}" for number in reversed(range(9, MOST_KINDS + 9))]


@pytest.mark.parametrize("starts", [[], [0]])
def test_too_short_a_trace_says_nothing(starts):
    assert device_time(trace(starts)) is None


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        (NCCL, True),
        ("_sum_kernel", True),
        ("two_shot_all_reduce_kernel", True),
        ("_row_sum_kernel", False),
        ("void at::native::reduce_kernel<512, 1, SumOps>", False),
        (GEMM, False),
    ],
)
def test_collectives_are_known_by_name(name, collective):
    assert Activity(name, 0, 1, 7, 0).is_collective is collective


def test_one_kernel_has_the_name_of_the_ordered_sum():
    """Another one would be taken for half an all-reduce."""
    sources = (ROOT / "ops" / "kernels").glob("*.py")
    assert [path.name for path in sources if f"def {ORDERED_SUM}(" in path.read_text()] == [
        "reduce.py"
    ]


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(spans)
def test_covered_time_is_that_of_the_set_of_nanoseconds(spans):
    activities = [Activity("k", start, duration, 7, 0) for start, duration in spans]
    moments = {ns for start, duration in spans for ns in range(start, start + duration)}
    assert covered_ns(activities) == len(moments)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([GEMM, NCCL, COPY]), st.integers(0, 9), st.integers(1, 9), st.just(7)
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 50),
)
def test_equal_steps_fill_their_period(step, gap):
    """Busy, idle and gap are disjoint and leave nothing out, whatever a step is made of."""
    first = min(at for _, at, _, _ in step)
    length = max(at + duration for _, at, duration, _ in step) - first
    activities = [
        Activity(name, number * (length + gap) + at, duration, stream, number)
        for number in range(4)
        for name, at, duration, stream in step
    ]
    found = device_time(activities)
    assert found is not None
    assert found.busy_ns + found.idle_ns == length
    assert found.gap_ns == gap
    assert 0 <= found.collective_ns <= found.busy_ns
    assert found.num_kernels + found.num_copies == len(step)
    assert sum(kernel.num_launches for kernel in found.kernels) == len(step)
    assert sum(kernel.busy_ns for kernel in found.kernels) == found.busy_ns
