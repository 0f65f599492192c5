"""Tokens held back from a recurrent state on the CPU, and taken into it once they are accepted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.closeness import assert_same_bits
from tests.ops.delta_rig import Layer, Shape, Span
from tests.ops.pending_rig import Drafting, Walk, scripted
from unisono.ops import delta, dispatch
from unisono.ops.by_reference import with_references
from unisono.ops.delta import CHUNK, DeltaPlan, plan_delta

CPU = torch.device("cpu")
OPS = dispatch.resolve(CPU, 64)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [Shape(2, 4, 4, 6), Shape(1, 1, 8, 8, 2), Shape(2, 6, 5, 7, 3)]
PROMPTS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 2]

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def plan(start: int, count: int, prompt: int, pending: int, holds: bool) -> DeltaPlan:
    return plan_delta([start], [count], [prompt], [1], (), [pending], [holds], device=CPU)


# Without shrinking, which would outlast the alarm: the rows that failed are in the message.
@settings(max_examples=25, phases=[Phase.generate])
@given(st.data())
def test_any_rows_leave_what_single_tokens_leave(data: st.DataObject) -> None:
    """Prompts cut on the grid, drafts of any number accepted to any number, tokens computed again
    after a pre-emption: rows of all kinds in one step, in any order."""
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    most = data.draw(st.integers(1, 8), "most drafts")
    prompts = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4), "prompts")
    shape, *dtypes = (data.draw(st.sampled_from(of)) for of in (SHAPES, DTYPES, DTYPES))
    layer = Layer(OPS, shape, [(prompt, prompt + 14) for prompt in prompts], *dtypes)
    drafting = Drafting(layer, [Walk.of(layer, i) for i in range(len(prompts))])
    layer.keep_pending(most)
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        rows = []
        order = data.draw(st.permutations(range(len(prompts))))
        for i in order[: data.draw(st.integers(1, len(prompts)))]:
            if not drafting.left(i) or data.draw(st.integers(0, 9)) == 9:
                drafting.restart(i)
            if drafting.in_prompt(i) or data.draw(st.booleans()):
                counts = layer.requests[i].cuts(drafting.position[i], 4)
                rows.append(drafting.plain(i, data.draw(st.sampled_from(counts))))
            else:
                drafts = data.draw(st.integers(0, most))
                rows.append(drafting.drafted(i, drafts, data.draw(st.integers(0, drafts))))
        drafting.step(rows)


@pytest.mark.parametrize("names", [["short_conv"], ["delta_rule"]], ids=str)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_references_of_the_bisect_hold_back_too(names: list[str], state_dtype: torch.dtype) -> None:
    layers = []
    for ops in (OPS, with_references(OPS, names)):
        torch.manual_seed(3)
        layer = Layer(ops, SHAPES[0], [(1, 40), (5, 45), (9, 49)], torch.float32, state_dtype)
        layer.keep_pending(3)
        layers.append(layer)
    # Prompts by the ops, whose form is another; from there on there is one form.
    spans = [Span(0, 0, 1), Span(1, 0, 5), Span(2, 0, 9)]
    outputs = layers[0].run(spans)
    for number in (1, 2, 3):
        layers[1].put_state(number, layers[0].state_of(number))
    starts, pending = [1, 5, 9], [0, 0, 0]
    for at in range(12):
        spans = []
        for i, pattern in enumerate(("alternating", "mixed", "changing")):
            drafts, accepted = scripted(pattern, at, 3)
            num_true = 1 + accepted if drafts else None
            spans.append(Span(i, starts[i], 1 + drafts, (), pending[i], num_true))
            starts[i] += num_true or 1
            pending[i] = num_true or 0
        outputs, wants = (layer.run(spans) for layer in reversed(layers))
        for span, got, want in zip(spans, outputs, wants, strict=True):
            assert_same_bits(f"{span}", got[: span.num_true], want[: span.num_true])
        for i in range(3):
            for got, want in zip(*(layer.state_of(i + 1) for layer in layers), strict=True):
                assert_same_bits(f"state of {spans[i]}", got, want)


def test_what_may_not_be_pending_or_held_back() -> None:
    for start, count, prompt, pending in (
        (0, 1, 0, 1),
        (0, 5, 5, 1),
        (CHUNK, CHUNK, 200, 2),
        (7, 1, 7, 1),
        (9, 1, 7, 3),
        (9, 1, 7, -1),
    ):
        with pytest.raises(ValueError, match=f"{pending} tokens pending at {start}"):
            plan(start, count, prompt, pending, False)
    for start, count, prompt in ((0, 2, 0), (0, 5, 5), (CHUNK, 40, 100)):
        with pytest.raises(ValueError, match=f"from {start} on held back"):
            plan(start, count, prompt, 0, True)
    assert plan(9, 3, 7, 2, True).replays[0][0] == 2


def test_a_plan_takes_tensors() -> None:
    listed = plan_delta([9, 1], [2, 3], [5, 1], [1, 2], (), [2, 0], [False, True], device=CPU)
    pending, holds = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([False, True])
    assert (
        listed.rows
        == plan_delta(
            [9, 1], [2, 3], [5, 1], torch.tensor([1, 2]), (), pending, holds, device=CPU
        ).rows
    )
    assert [(row.num_pending, row.holds_back) for row in listed.rows] == [(2, False), (0, True)]


def test_rows_without_tokens_leave_what_is_pending() -> None:
    layer = Layer(OPS, SHAPES[0], [(3, 20)], torch.float32)
    layer.keep_pending(2)
    layer.run([Span(0, 0, 3)])
    layer.run([Span(0, 3, 3, num_true=2)])
    before, kept = layer.state_of(1), layer.pending
    assert kept is not None
    inputs, updates = kept.inputs.clone(), kept.updates.clone()
    layer.run([Span(0, 5, 0, (), 2, 0)])
    for name, got, want in zip(("inputs", "state"), layer.state_of(1), before, strict=True):
        assert_same_bits(name, got, want)
    assert_same_bits("pending inputs", kept.inputs, inputs)
    assert_same_bits("pending updates", kept.updates, updates)


def test_states_that_do_not_fit_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(OPS, SHAPES[0], [(2, 30)] * 5, torch.float32)
    drafting = Drafting(layer, [Walk.of(layer, i) for i in range(5)])
    layer.keep_pending(2)
    monkeypatch.setattr(delta, "_SCRATCH_NUMBERS", 2 * layer.state[0].numel())
    drafting.step([drafting.plain(i, 2) for i in range(5)])
    for accepted in (1, 2, 0):
        drafting.step([drafting.drafted(i, 2, accepted) for i in range(5)])


def test_nothing_is_held_back_where_nothing_keeps_it() -> None:
    layer = Layer(OPS, SHAPES[0], [(3, 20)], torch.float32)
    layer.run([Span(0, 0, 3)])
    x, gates = layer.requests[0].x[3:5], (layer.requests[0].b[3:5], layer.requests[0].a[3:5])
    for held in (plan(3, 2, 3, 0, True), plan(5, 2, 3, 2, False)):
        with pytest.raises(AssertionError, match="nothing keeps"):
            OPS.short_conv(x, layer.weight, layer.conv, held)
        with pytest.raises(AssertionError, match="nothing keeps"):
            OPS.delta_rule(x, *gates, layer.decay, layer.dt_bias, layer.state, held, 2)
