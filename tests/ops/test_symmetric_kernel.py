"""Collectives over symmetric memory, of ranks whose memories lie side by side on one device: the
bits of their definition, whatever came before, and waits that end."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import graph_rig, kernel_rig
from tests.ops.symmetric_rig import SMALL, in_stages, local_ranks, num_norm_stages
from unisono.ops.comm import PeerLost, ordered_sum
from unisono.ops.kernels.norm import add_rms_norm
from unisono.ops.symmetric import Symmetric
from unisono.ops.symmetric_layout import CROSSOVER, Layout

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
EPS = 1e-6
RANKS = [2, 3, 8]
KIB = 1024


def parts_of(ranks: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Parts of very different size, so that another order of the sum shows."""
    scale = 10.0 ** torch.randint(-2, 3, (ranks, *shape))
    return (torch.randn(ranks, *shape) * scale).to(dtype).to(kernel_rig.DEVICE)


def num_stages(layout: Layout, part: Tensor) -> int:
    return 2 if part.numel() * part.element_size() <= layout.one_shot_bytes else 3


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_have_the_bits_of_the_definition(ranks: int, dtype: torch.dtype) -> None:
    """Sizes of one-shots and two-shots in turn, so that both halves of the memory are used again,
    and words of older epochs lie behind newer ones."""
    ends = local_ranks(ranks, Layout(ranks, one_shot_bytes=8 * KIB, two_shot_bytes=64 * KIB))
    for shape in [(3, 200), (1, 8), (40, 136), (2, 1000), (3, 200), (25, 200)]:
        parts = parts_of(ranks, *shape, dtype=dtype)
        stages = num_stages(ends[0].layout, parts[0])
        sums = in_stages(ends, stages, lambda end, parts=parts: end.all_reduce(parts[end.rank]))
        for rank, total in enumerate(sums):
            assert total is not None, f"{list(shape)} is not served"
            assert_same_bits(f"{list(shape)} on rank {rank}", total.cpu(), ordered_sum(parts.cpu()))
    for end in ends:
        end.check()


def check_fused(ranks: int, width: int, tokens: int, dtype: torch.dtype, layout: Layout) -> None:
    """In three epochs: without a bias, with one and a weight in fp32, without."""
    ends = local_ranks(ranks, layout)
    for has_bias, weight_dtype in ((False, dtype), (True, torch.float32), (False, dtype)):
        parts = parts_of(ranks, tokens, width, dtype=dtype)
        residual, rest = parts_of(1, tokens, width, dtype=dtype)[0], parts_of(2, width, dtype=dtype)
        bias, weight = rest[1].contiguous() if has_bias else None, rest[0].to(weight_dtype)
        x = ordered_sum(parts) if bias is None else ordered_sum(parts) + bias
        want = add_rms_norm(x, residual, weight, EPS)

        def call(
            end: Symmetric, parts: Tensor = parts, rest: Any = (bias, residual, weight)
        ) -> tuple[Tensor, Tensor] | None:
            return end.all_reduce_add_rms_norm(parts[end.rank], *rest, EPS)

        stages = num_norm_stages(layout, residual)
        for rank, both in enumerate(in_stages(ends, stages, call)):
            assert both is not None
            name = f"rank {rank} of {ranks}, {tokens} of width {width}, bias {has_bias}"
            assert_same_bits(f"total on {name}", both[1].cpu(), want[1].cpu())
            assert_same_bits(f"norm on {name}", both[0].cpu(), want[0].cpu())


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "width"), [(2, 512), (2, 1000), (3, 264), (8, 576)])
def test_fused_has_the_bits_of_the_separate_ops(ranks: int, width: int, dtype: torch.dtype) -> None:
    check_fused(ranks, width, 2, dtype, Layout(ranks, **SMALL))


def test_fused_beyond_what_a_one_shot_alone_serves() -> None:
    """Three rows of 16 KiB, of words that come before those of the next lane."""
    check_fused(2, 8192, 3, torch.float16, Layout(2, **SMALL))


@pytest.mark.parametrize(
    ("ranks", "width", "tokens", "dtype"),
    [
        # Two lanes, both full; then, of the last one, without a row, a slice, all slices but one.
        (2, 512, 40, torch.float16),
        (1, 264, 23, torch.float16),
        (3, 1000, 20, torch.float16),
        (3, 1000, 20, torch.float32),
        (4, 264, 9, torch.float16),
        # Slices of 9 rows, one more than a program norms at a time.
        (2, 576, 34, torch.float32),
        (5, 576, 41, torch.float16),
        (8, 264, 33, torch.float16),
        *(
            pytest.param(3, 1000, 20, torch.bfloat16, marks=pytest.mark.gpu),
            pytest.param(8, 264, 33, torch.bfloat16, marks=pytest.mark.gpu),
        ),
    ],
)
def test_two_shots_with_norms_have_the_bits_of_the_separate_ops(
    ranks: int, width: int, tokens: int, dtype: torch.dtype
) -> None:
    layout = Layout(ranks, one_shot_bytes=4 * KIB, two_shot_bytes=256 * KIB, two_shot_lanes=2)
    assert num_norm_stages(layout, torch.empty(tokens, width, dtype=dtype)) == 3
    check_fused(ranks, width, tokens, dtype, layout)


def test_two_shots_with_norms_of_wide_rows() -> None:
    """A row at a time, wider than a one-shot with norm takes."""
    layout = Layout(2, one_shot_bytes=4 * KIB, two_shot_bytes=256 * KIB, two_shot_lanes=2)
    check_fused(2, 9000, 5, torch.float16, layout)
    check_fused(2, 16384, 3, torch.float16, layout)


def norm_of(end: Symmetric, parts: Tensor, stages: tuple[int, int]) -> Tensor:
    """What stages of a two-shot with norm give on a rank: norm and total side by side."""
    end.stages = stages
    ones = torch.ones_like(parts[0])
    both = end.two_shot_add_rms_norm(parts[end.rank], None, ones, ones[0], EPS)
    end.stages = None
    assert both is not None
    return torch.cat(both, dim=1).cpu()


def want_of(parts: Tensor) -> Tensor:
    ones = torch.ones_like(parts[0])
    return torch.cat(add_rms_norm(ordered_sum(parts), ones, ones[0], EPS), dim=1).cpu()


def test_a_rank_may_be_an_epoch_ahead() -> None:
    """Its numbers of the next epoch replace none that a slow peer is still to read, in either half;
    and it waits for that peer then, however many epochs there were."""
    layout = Layout(2, one_shot_bytes=4 * KIB, two_shot_bytes=256 * KIB, two_shot_lanes=2)
    ahead, behind = local_ranks(2, layout)
    epochs = [parts_of(2, 9, 512, dtype=torch.float16) for _ in range(5)]
    norm_of(ahead, epochs[0], (0, 0))
    for parts, following in itertools.pairwise(epochs):
        norm_of(behind, parts, (0, 0))
        norm_of(ahead, parts, (1, 1))
        norm_of(behind, parts, (1, 1))
        assert_same_bits("ahead", norm_of(ahead, parts, (2, 2)), want_of(parts))
        norm_of(ahead, following, (0, 0))
        assert_same_bits("behind", norm_of(behind, parts, (2, 2)), want_of(parts))
    ahead.check()
    norm_of(ahead, epochs[-1], (1, 1))
    _wait()
    with pytest.raises(PeerLost, match="rank 1 did not come"):
        ahead.check()


def test_rows_of_the_own_slice_need_no_second_meeting() -> None:
    layout = Layout(2, one_shot_bytes=4 * KIB, two_shot_bytes=256 * KIB, two_shot_lanes=2)
    ends = local_ranks(2, layout)
    parts = parts_of(2, 10, 512, dtype=torch.float16)
    for end in ends:
        norm_of(end, parts, (0, 0))
    got, own = norm_of(ends[1], parts, (1, 2)), [3, 4, 5, 9]
    assert_same_bits("own", got[own], want_of(parts)[own])
    _wait()
    with pytest.raises(PeerLost, match="rank 0 did not come"):
        ends[1].check()


@pytest.mark.parametrize("ranks", [3])
def test_all_kernels_in_turn_on_the_same_memory(ranks: int) -> None:
    """What one has left there is never read by another, in either half."""
    layout = Layout(ranks, one_shot_bytes=8 * KIB, two_shot_bytes=64 * KIB, two_shot_lanes=4)
    ends = local_ranks(ranks, layout)
    weight, bias = parts_of(2, 512, dtype=torch.float16)
    for tokens in (21, 2, 30, 21, 9, 1, 30, 17, 17):
        parts = parts_of(ranks, tokens, 512, dtype=torch.float16)
        residual = parts_of(1, tokens, 512, dtype=torch.float16)[0]
        want = ordered_sum(parts)
        both = in_stages(
            ends,
            num_norm_stages(layout, residual),
            lambda end, of=(parts, residual): end.all_reduce_add_rms_norm(
                of[0][end.rank], bias, of[1], weight, EPS
            ),
        )
        for got in both:
            assert got is not None
            norm = add_rms_norm(want + bias, residual, weight, EPS)
            assert_same_bits(f"norm of {tokens}", got[0].cpu(), norm[0].cpu())
            assert_same_bits(f"total of {tokens}", got[1].cpu(), norm[1].cpu())
        for shape in ((tokens, 512), (5 * tokens, 40)):
            x = parts.flatten(1)[:, : shape[0] * shape[1]].view(ranks, *shape)
            stages = num_stages(layout, x[0])
            for total in in_stages(ends, stages, lambda end, x=x: end.all_reduce(x[end.rank])):
                assert total is not None
                assert_same_bits(f"sum of {list(shape)}", total.cpu(), ordered_sum(x).cpu())
        keys = torch.arange(ranks * tokens, device=kernel_rig.DEVICE).view(ranks, tokens)
        for most in in_stages(ends, 2, lambda end, keys=keys: end.max(keys[end.rank])):
            assert most is not None
            assert torch.equal(most, keys[-1])
    for end in ends:
        end.check()


@pytest.mark.parametrize("ranks", RANKS)
def test_maximum(ranks: int) -> None:
    ends = local_ranks(ranks)
    for count in (1, 300, 5):
        keys = torch.randint(-(2**63), 2**63 - 1, (ranks, count))
        keys[:, 0] = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1, 2**31, -(2**31), 2**32])[:ranks]
        keys = keys.to(kernel_rig.DEVICE)
        for most in in_stages(ends, 2, lambda end, keys=keys: end.max(keys[end.rank])):
            assert most is not None
            assert torch.equal(most, keys.amax(0))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_specials_and_signed_zeros() -> None:
    inf, nan = float("inf"), float("nan")
    parts = torch.tensor([[-0.0, inf, inf, nan], [-0.0, -inf, 1.0, 1.0]]).to(kernel_rig.DEVICE)
    for total in in_stages(local_ranks(2), 2, lambda end: end.all_reduce(parts[end.rank])):
        assert total is not None
        assert_same_bits("zero", total[:1].cpu(), torch.tensor([-0.0]))
        assert total[1:].isnan().tolist() == [True, False, True]
        assert float(total[2]) == inf


def test_what_lies_askew_is_served_alike() -> None:
    """One rank must never decide alone."""
    parts = parts_of(2, 65, 8, dtype=torch.float16)
    askew = [parts[0].flatten()[1:513].view(64, 8), parts[1][:64]]
    assert askew[0].data_ptr() % 16
    want = ordered_sum(torch.stack(askew).cpu())
    for total in in_stages(local_ranks(2), 2, lambda end: end.all_reduce(askew[end.rank])):
        assert total is not None
        assert_same_bits("askew", total.cpu(), want)


def test_what_is_not_served() -> None:
    end = local_ranks(2)[0]
    half = {"dtype": torch.float16, "device": kernel_rig.DEVICE}
    for shape in ((0, 8), (3,), (1, 12), (256 * KIB // 16 + 1, 8)):
        assert end.all_reduce(torch.zeros(shape, **half)) is None, shape
    assert end.all_reduce(torch.zeros(8, dtype=torch.int64, device=kernel_rig.DEVICE)) is None
    assert end.max(torch.zeros(0, dtype=torch.int64, device=kernel_rig.DEVICE)) is None
    assert end.max(torch.zeros(8 * 256 + 1, dtype=torch.int64, device=kernel_rig.DEVICE)) is None
    for tokens, width in ((1, 256), (1, 508), (9, 512), (2, 8200), (0, 512), (5, 8192)):
        x, weight = torch.zeros(tokens, width, **half), torch.zeros(width, **half)
        assert end.all_reduce_add_rms_norm(x, None, x, weight, EPS) is None, (tokens, width)
    # Beyond a one-shot, and a slice of 2 KiB has no room for a row, for two or for three.
    for tokens, width in ((64, 1032), (129, 520), (257, 504), (256 * KIB // 1040 + 1, 520)):
        x, weight = torch.zeros(tokens, width, **half), torch.zeros(width, **half)
        assert end.all_reduce_add_rms_norm(x, None, x, weight, EPS) is None, (tokens, width)


@pytest.mark.parametrize(
    ("shape", "has_norm"),
    [((8, 8), False), ((40, 520), False), ((2, 512), True), ((70, 512), True)],
    ids=["one-shot", "two-shot", "one-shot with norm", "two-shot with norm"],
)
def test_a_wait_ends_and_names_the_rank(shape: tuple[int, int], has_norm: bool) -> None:
    end = local_ranks(3)[1]
    x = torch.ones(shape, dtype=torch.float16, device=kernel_rig.DEVICE)

    def meet() -> object:
        if has_norm:
            return end.all_reduce_add_rms_norm(x, None, x, x[0], EPS)
        return end.all_reduce(x)

    end.check()
    assert meet() is not None
    _wait()
    with pytest.raises(PeerLost, match=r"rank [02] did not come to a collective of rank 1 within"):
        end.check()
    # After that nobody waits, however long the wait may be.
    end.wait_s = 1000.0
    began = time.monotonic()
    meet()
    _wait()
    assert time.monotonic() - began < 20


def _wait() -> None:
    if kernel_rig.IS_GPU:
        torch.cuda.synchronize()


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_rank_count_has_a_layout(ranks: int) -> None:
    layout = Layout.of(ranks)
    assert layout.signals % 16 == layout.data % 16 == layout.region_bytes % 16 == 0
    assert layout.nbytes <= 160 << 20, "more than a thousandth of a card"
    assert layout.one_shot_bytes < layout.two_shot_bytes
    assert layout.slice_bytes(layout.two_shot_bytes) * ranks * 64 >= layout.two_shot_bytes
    listed = min(most for most in CROSSOVER if most >= ranks)
    assert (layout.one_shot_bytes, layout.two_shot_bytes) == CROSSOVER[listed]


def test_more_ranks_are_refused() -> None:
    for ranks in (1, 9):
        with pytest.raises(ValueError, match=f"{ranks} ranks; symmetric memory serves 2 to 8"):
            Layout.of(ranks)


# ---------------------------------------------------------------- at real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_at_real_sizes(ranks: int) -> None:
    layout = Layout.of(ranks)
    ends = local_ranks(ranks, layout)
    for nbytes in (16 << 10, layout.one_shot_bytes, layout.one_shot_bytes + 16, 3 << 20, 8 << 20):
        parts = parts_of(ranks, nbytes // 2, dtype=torch.bfloat16)
        stages = num_stages(layout, parts[0])
        for _ in range(2):
            sums = in_stages(ends, stages, lambda end, parts=parts: end.all_reduce(parts[end.rank]))
            for total in sums:
                assert total is not None
                assert_same_bits(f"{nbytes} bytes", total, ordered_sum(parts))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("width", [512, 576, 1024, 2048, 2560, 4096, 5120, 8192])
def test_fused_at_real_widths(width: int, ranks: int) -> None:
    layout = Layout.of(ranks)
    tokens = min(layout.one_shot_bytes // (2 * width), layout.one_shot_lanes)
    for count in (1, tokens):
        check_fused(ranks, width, count, torch.bfloat16, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *(
            (width, torch.bfloat16)
            for width in (512, 576, 1000, 1024, 2048, 2560, 4096, 5120, 8192)
        ),
        *((1024, torch.float16), (1024, torch.float32), (4096, torch.float32)),
    ],
    ids=str,
)
def test_two_shots_with_norms_at_real_widths(width: int, dtype: torch.dtype, ranks: int) -> None:
    """Just beyond the one-shot, and slices of several rows: a row is summed as the norm alone sums
    it, however many a program takes at a time."""
    layout = Layout.of(ranks)
    row_bytes = width * dtype.itemsize
    room = layout.region_bytes // ranks // row_bytes * layout.two_shot_lanes * ranks
    for count in (2 * layout.one_shot_bytes // row_bytes + 1, min(room, (3 << 20) // row_bytes)):
        check_fused(ranks, width, count, dtype, layout)


@pytest.mark.gpu
def test_a_graph_of_eight_ranks_replays_between_eager_calls() -> None:
    """Epochs live on the device: 1,000 replays with other numbers each time, eager calls between
    them, of one-shots and two-shots, with norm and without, that share memory."""
    ends = local_ranks(8, Layout.of(8))
    small, large = (torch.empty(8, n, 4096, dtype=torch.bfloat16, device="cuda") for n in (2, 40))
    small.zero_()
    large.zero_()

    ones = torch.ones_like(large[0])

    def call() -> Tensor:
        sums = [
            in_stages(ends, stages, lambda end, x=x: end.all_reduce(x[end.rank]))[5]
            for x, stages in ((small, 2), (large, 3), (small, 2))
        ]
        both = in_stages(
            ends,
            3,
            lambda end: end.all_reduce_add_rms_norm(large[end.rank], None, ones, ones[0], EPS),
        )[5]
        assert both is not None
        return torch.cat([total for total in (*sums, *both) if total is not None])

    graph_rig.replayed(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for step in range(1000):
        small.normal_()
        large.normal_()
        graph.replay()
        sums = ordered_sum(small), ordered_sum(large)
        want = torch.cat((*sums, sums[0], *add_rms_norm(sums[1], ones, ones[0], EPS)))
        assert_same_bits(f"replay {step}", result, want)
        if step % 3 == 0:
            small.normal_()
            assert_same_bits(f"eager after {step}", call()[:2], ordered_sum(small))
    for end in ends:
        end.check()
