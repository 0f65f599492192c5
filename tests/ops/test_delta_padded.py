"""Plans at fixed addresses, padded: no bit is another, whatever lay there before."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.ops import kernel_rig
from tests.ops.delta_rig import Layer, Shape, Span
from unisono.ops.delta import PendingTokens
from unisono.ops.gpu import gpu_ops
from unisono.ops.kernels.delta_plan import DeltaPlan, PaddedPlans, Sizes, count_rows
from unisono.ops.table import Ops

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
LENGTHS = [(130, 135), (64, 70), (3, 9), (1, 6)]
STEPS = [
    ([Span(0, 0, 64, ((64, 9),)), Span(2, 0, 3), Span(3, 0, 1)], Sizes(7, 4, 0)),
    ([Span(2, 3, 1), Span(0, 64, 66, ((128, 8),)), Span(1, 0, 64, ((64, 7),))], Sizes(6, 4, 2)),
    ([Span(1, 64, 2), Span(2, 4, 2), Span(3, 1, 3)], Sizes(0, 0, 4)),
    ([Span(0, 130, 5)], Sizes(0, 0, 1)),
]
"""Each with more room than it takes, but the last one."""
MOST = Sizes(8, 4, 4)
TOKENS = 140
"""Of a step, padding included, which is NaN."""


def padded(ops: Ops, plans: PaddedPlans) -> Ops:
    """`ops` on plans that lie in `plans`, of as many tokens as the longest step."""

    def plan_delta(*args: Any, **options: Any) -> DeltaPlan:
        plan = ops.plan_delta(*args, **options)
        sizes = sizes_of[tuple(plan.records[1].tolist())]
        plans.fill(sizes, plan)
        return plans.view(sizes)

    def short_conv(
        x: Tensor, weight: Tensor, conv: Tensor, plan: DeltaPlan, pending: PendingTokens | None
    ) -> Tensor:
        return ops.short_conv(_with_nan(x), weight, conv, plan, pending)

    def delta_rule(mixed: Tensor, b: Tensor, a: Tensor, *rest: Any) -> Tensor:
        out = ops.delta_rule(mixed, _with_nan(b), _with_nan(a), *rest)
        assert not bool(out[len(b) :].any()), "padding that is not zero"
        return out[: len(b)]

    sizes_of = {tuple(span.start for span in spans): sizes for spans, sizes in STEPS}
    return replace(ops, plan_delta=plan_delta, short_conv=short_conv, delta_rule=delta_rule)


def _with_nan(x: Tensor) -> Tensor:
    out = x.new_full((TOKENS, x.shape[1]), float("nan"))
    out[: len(x)] = x
    return out


@pytest.mark.parametrize(
    ("shape", "dtype"),
    list(zip([Shape(2, 4, 16, 24), Shape(1, 3, 12, 8, 2)], cycle(kernel_rig.DTYPES), strict=False)),
    ids=str,
)
def test_padding_changes_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    """Two rounds over the same addresses, so that each plan finds another one there."""
    device = kernel_rig.DEVICE
    ops, plans = gpu_ops(device), PaddedPlans(MOST, device)
    own = Layer(ops, shape, LENGTHS, dtype, device=device)
    other = Layer(padded(ops, plans), shape, LENGTHS, dtype, device=device)
    for name in ("weight", "decay", "dt_bias", "requests"):
        setattr(other, name, getattr(own, name))
    for step, _ in [*STEPS, *STEPS]:
        for span, got, want in zip(step, other.run(step), own.run(step), strict=True):
            assert_same_bits(f"{span}", got, want)
    for name in ("conv", "state"):
        got, want = (getattr(layer, name)[1:].nan_to_num(7) for layer in (other, own))
        assert_same_bits(name, got, want)


def test_which_rows_can_be_padded() -> None:
    device = torch.device("cpu")
    plan_delta = gpu_ops(kernel_rig.DEVICE).plan_delta

    def counted(*rows: tuple[int, int, int]) -> tuple[int, int] | None:
        starts, counts, prompts = zip(*rows, strict=True)
        states = torch.arange(len(rows)).to(kernel_rig.DEVICE)
        return count_rows(plan_delta(starts, counts, prompts, states))

    assert counted((0, 64, 130), (7, 1, 5), (64, 66, 130), (3, 64, 3)) == (2, 2)
    assert counted((0, 135, 130)) is None, "a prompt and what was answered to it"
    assert counted((130, 65, 130)) is None, "two tiles of answers"
    assert PaddedPlans(MOST, device).view(Sizes(0, 0, 0)).records.shape == (6, 1)


@pytest.mark.gpu
def test_a_graph_is_replayed_on_other_plans() -> None:
    device = kernel_rig.DEVICE
    ops, plans, sizes = gpu_ops(device), PaddedPlans(MOST, device), Sizes(8, 4, 2)
    layer = Layer(ops, Shape(16, 32, 128, 128), LENGTHS, torch.bfloat16, device=device)
    numbers = [
        torch.zeros(TOKENS, width, device=device, dtype=torch.bfloat16) for width in (32, 32)
    ]
    x = torch.zeros(TOKENS, layer.shape.channels, device=device, dtype=torch.bfloat16)

    began = layer.conv.clone(), layer.state.clone()

    def body() -> Tensor:
        for tensor, old in zip((layer.conv, layer.state), began, strict=True):
            tensor.copy_(old)
        plan, pending = plans.view(sizes), layer.pending
        mixed = ops.short_conv(x, layer.weight, layer.conv, plan, pending)
        gates = (*numbers, layer.decay, layer.dt_bias)
        return ops.delta_rule(mixed, *gates, layer.state, plan, 16, pending)

    def laid_out(step: int) -> int:
        spans = STEPS[step][0]
        of = [layer.requests[span.request] for span in spans]
        plan = ops.plan_delta(
            [span.start for span in spans],
            [span.count for span in spans],
            [request.num_prompt for request in of],
            [span.request + 1 for span in spans],
            [(row, *save) for row, span in enumerate(spans) for save in span.saves],
        )
        plans.fill(sizes, plan)
        for name, kept in (("x", x), ("b", numbers[0]), ("a", numbers[1])):
            parts = [layer._of(span, name) for span in spans]
            kept[: len(torch.cat(parts))] = torch.cat(parts)
        return sum(span.count for span in spans)

    laid_out(0)
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = body()
    for step in (0, 1):
        count = laid_out(step)
        want = body()[:count].clone()
        after = layer.conv.clone(), layer.state.clone()
        graph.replay()
        assert_same_bits(f"step {step}", replayed[:count], want)
        for kept, tensor, new in zip(began, (layer.conv, layer.state), after, strict=True):
            assert_same_bits("states", tensor[1:].nan_to_num(7), new[1:].nan_to_num(7))
            kept.copy_(new)
