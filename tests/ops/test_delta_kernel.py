"""The ops of a recurrent layer on the GPU: by the CPU's, and one answer however rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise, product

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from tests.ops.delta_rig import Layer, Shape, Span
from unisono.ops import dispatch
from unisono.ops.by_reference import with_references
from unisono.ops.delta import CHUNK
from unisono.ops.gpu import gpu_ops
from unisono.ops.kernels import delta_plan, delta_rule, short_conv

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
CPU_OPS = dispatch.resolve(torch.device("cpu"), 64)
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
STATE_BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [Shape(2, 4, 16, 24), Shape(1, 3, 12, 8, 2), Shape(1, 1, 64, 32)]
WITH_DTYPES = (
    list(product(SHAPES, kernel_rig.DTYPES))
    if kernel_rig.IS_GPU
    else list(zip(SHAPES, cycle(kernel_rig.DTYPES), strict=False))
)
"""The interpreter is slow: there each shape has one of the dtypes."""
REAL_SHAPES = [Shape(16, 32, 128, 128), Shape(4, 12, 128, 128), Shape(2, 2, 64, 256)]


@pytest.fixture(autouse=True)
def products_that_do_not_show_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_rig.make_products_hide_their_shape(monkeypatch)


def layers_of(
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Layer, Layer]:
    """The same requests and weights on the kernels and, in fp32 and untouched yet, on the CPU."""
    ours = Layer(gpu_ops(kernel_rig.DEVICE), shape, lengths, dtype, state_dtype, kernel_rig.DEVICE)
    theirs = Layer(CPU_OPS, shape, lengths, torch.float32)
    theirs.weight = ours.weight.float().cpu()
    theirs.decay, theirs.dt_bias = ours.decay.cpu(), ours.dt_bias.cpu()
    for mine, other in zip(theirs.requests, ours.requests, strict=True):
        mine.x, mine.b, mine.a = (x.float().cpu() for x in (other.x, other.b, other.a))
    return ours, theirs


def check(
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    steps: Sequence[Sequence[Span]],
    dtype: torch.dtype,
) -> None:
    ours, theirs = layers_of(shape, lengths, dtype)
    for step in steps:
        for span, got, want in zip(step, ours.run(step), theirs.run(step), strict=True):
            assert_close(f"{span} of {shape}", got, want, BOUND[dtype])
    for number in range(len(ours.state)):
        (inputs, state), (their_inputs, their_state) = (x.state_of(number) for x in (ours, theirs))
        # NaN where nobody wrote must still be there: assert_close compares it.
        assert_close(f"state {number} of {shape}", state, their_state, STATE_BOUND[dtype])
        assert_same_bits(
            f"inputs {number} of {shape}",
            inputs.float().cpu().nan_to_num(7),
            their_inputs.nan_to_num(7),
        )


@pytest.mark.parametrize(("shape", "dtype"), WITH_DTYPES, ids=str)
def test_prompts_and_answers_by_the_ops_of_the_cpu(shape: Shape, dtype: torch.dtype) -> None:
    lengths = [(130, 135), (64, 66), (3, 6), (1, 1)]
    steps = [
        [Span(0, 0, 64, ((64, 9),)), Span(2, 0, 3), Span(3, 0, 1)],
        [Span(2, 3, 1), Span(0, 64, 66, ((128, 8),)), Span(1, 0, 66, ((64, 7),))],
        [Span(0, 130, 5), Span(2, 4, 2)],
    ]
    check(shape, lengths, steps, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_real_shapes(shape: Shape) -> None:
    lengths = [(1000, 1010), (64, 66), (300, 309), (1, 1)]
    steps = [
        [Span(0, 0, 640, ((64, 9), (640, 8))), Span(2, 0, 300), Span(3, 0, 1)],
        [Span(2, 300, 1), Span(0, 640, 360, ((960, 7),)), Span(1, 0, 66)],
        [Span(0, 1000, 9), Span(2, 301, 8)],
    ]
    for dtype in (torch.bfloat16, torch.float32):
        check(shape, lengths, steps, dtype)


def check_forms(shape: Shape, length: int, strength: float, bound: float) -> None:
    """The chunked form and the sequential one of a prompt, with decays `strength` times as strong.

    The chunked form takes decays as exp(G_i - G_j) of sums G over a chunk. A sum in fp32 is off by
    its size times 2^-24, however small the difference is, and `bound` grows by as much.
    """
    layer, _ = layers_of(shape, [(length, length)], torch.float32)
    layer.decay *= strength
    request = layer.requests[0]
    gates = layer.decay * torch.nn.functional.softplus(request.a + layer.dt_bias)
    largest = max(float(part.sum(0).abs().max()) for part in gates.split(CHUNK))
    bound += largest * 2**-24
    chunked, state = layer.run([Span(0, 0, length)])[0], layer.state[1].clone()
    request.num_prompt = 0
    assert_close("outputs", chunked, layer.run([Span(0, 0, length)])[0], bound)
    assert_close("state", state, layer.state[1], bound)


@pytest.mark.parametrize("strength", [0.001, 30.0])
def test_chunked_equals_sequential(strength: float) -> None:
    check_forms(Shape(1, 2, 16, 24), 140 if kernel_rig.IS_GPU else 70, strength, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
@pytest.mark.parametrize("strength", [0.001, 1.0, 30.0])
def test_chunked_equals_sequential_on_the_tensor_core(shape: Shape, strength: float) -> None:
    check_forms(shape, 500, strength, 2e-5)


@pytest.mark.parametrize("prompt", [0, 66])
def test_a_narrow_state_is_rounded_alike_however_it_is_cut(prompt: int) -> None:
    narrow = torch.bfloat16 if kernel_rig.IS_GPU else torch.float16
    cuts = [0, 64, 66, 67, 72] if prompt else [0, 1, 5, 20, 24]
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(prompt, cuts[-1])], torch.float32, narrow)
    whole, state = layer.run([Span(0, 0, cuts[-1])])[0], layer.state_of(1)
    spans = [Span(0, a, b - a) for a, b in pairwise(cuts)]
    assert_same_bits("outputs", torch.cat([layer.run([span])[0] for span in spans]), whole)
    for part, got, want in zip(("inputs", "state"), layer.state_of(1), state, strict=True):
        assert_same_bits(part, got, want)


def decode_plan(
    layer: Layer, positions: Sequence[int], count: int, pending: int = 0, holds_back: bool = False
) -> delta_plan.DeltaPlan:
    """Rows of `count` tokens each, request i from positions[i] on, as a decode step makes them."""
    rows = range(len(positions))
    table = [[i * count for i in rows], list(positions)]
    table += [[x for _ in rows] for x in (count, 0, pending, int(holds_back))]
    records = torch.tensor(table, dtype=torch.int32, device=layer.device)
    states = torch.tensor([i + 1 for i in rows], device=layer.device)
    return delta_plan.plan_records(records, states, count)


def run_plan(
    layer: Layer, plan: delta_plan.DeltaPlan, positions: Sequence[int], count: int
) -> Tensor:
    x, b, a = (
        torch.cat(
            [
                getattr(layer.requests[i], name)[start : start + count]
                for i, start in enumerate(positions)
            ]
        )
        for name in ("x", "b", "a")
    )
    mixed = short_conv.short_conv(x, layer.weight, layer.conv, plan, layer.pending)
    gates, heads = (b, a, layer.decay, layer.dt_bias), layer.shape.key_heads
    return delta_rule.delta_rule(mixed, *gates, layer.state, plan, heads, layer.pending)


def kept(layer: Layer) -> list[Tensor]:
    """All that the layer keeps by state."""
    assert layer.pending is not None
    pending = layer.pending
    return [
        *(layer.conv, layer.state),
        *(pending.inputs, pending.keys, pending.updates, pending.decays),
    ]


def assert_same_kept(layer: Layer, want: Sequence[Tensor], states: slice = slice(1, None)) -> None:
    names = ("inputs", "state", "pending inputs", "keys", "updates", "decays")
    for name, got, right in zip(names, kept(layer), want, strict=True):
        assert_same_bits(name, got[states].nan_to_num(7), right[states].nan_to_num(7))


@pytest.mark.parametrize("count", [1, 4])
def test_rows_that_the_device_lays_out(count: int) -> None:
    """The last row has no tokens and points at scratch, as what pads a graph does."""
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(5, 20), (64, 80), (3, 9)], torch.float16)
    positions = [5, 64, 3]
    layer.run([Span(i, 0, start) for i, start in enumerate(positions)])
    before = [layer.state_of(i + 1) for i in range(3)]
    want = torch.cat(layer.run([Span(i, start, count) for i, start in enumerate(positions)]))
    ends = [layer.state_of(i + 1) for i in range(3)]
    for i, state in enumerate(before):
        layer.put_state(i + 1, state)
    plan = decode_plan(layer, positions, count)
    assert_same_bits("outputs", run_plan(layer, plan, positions, count), want)
    for i, end in enumerate(ends):
        for got, right in zip(layer.state_of(i + 1), end, strict=True):
            assert_same_bits(f"state {i + 1}", got, right)
        layer.put_state(i + 1, before[i])
    plan.records[2, 2] = 0
    plan.states[2] = 0
    got = run_plan(layer, plan, positions, count)[: 2 * count]
    assert_same_bits("outputs beside none", got, want[: 2 * count])
    for got, right in zip(layer.state_of(3), before[2], strict=True):
        assert_same_bits("the state of nobody", got, right)
    assert bool(layer.state[0].isnan().all())


def test_inputs_may_be_parts_of_wider_rows() -> None:
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(70, 72)], torch.float16)
    want, state = layer.run([Span(0, 0, 72)])[0], layer.state_of(1)
    request = layer.requests[0]
    wide = torch.cat((request.x, request.b, request.a), dim=1)
    channels = layer.shape.channels
    x, b, a = wide[:, :channels], wide[:, channels : channels + 2], wide[:, channels + 2 :]
    plan = layer.ops.plan_delta([0], [72], [70], [1], device=layer.device)
    mixed = layer.ops.short_conv(x, layer.weight, layer.conv, plan)
    got = layer.ops.delta_rule(mixed, b, a, layer.decay, layer.dt_bias, layer.state, plan, 1)
    assert_same_bits("outputs", got, want)
    for got, right in zip(layer.state_of(1), state, strict=True):
        assert_same_bits("state", got, right)


def test_a_nan_stays_in_its_request() -> None:
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(70, 72), (70, 72)], torch.float32)
    spans = [Span(0, 0, 72), Span(1, 0, 72)]
    clean = layer.run(spans)[1]
    layer.requests[0].x[3] = float("nan")
    spoiled = layer.run(spans)
    assert bool(spoiled[0][70:].isnan().all())
    assert_same_bits("the other", spoiled[1], clean)


def test_no_rows() -> None:
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(3, 3)], torch.float32)
    plan = layer.ops.plan_delta([], [], [], [], device=layer.device)
    x, gate = layer.requests[0].x[:0], layer.requests[0].b[:0]
    mixed = layer.ops.short_conv(x, layer.weight, layer.conv, plan)
    gates = (gate, gate, layer.decay, layer.dt_bias)
    assert layer.ops.delta_rule(mixed, *gates, layer.state, plan, 1).shape == (0, 2, 24)


@pytest.mark.gpu
def test_states_of_more_elements_than_31_bits_and_many_tokens() -> None:
    shape, tokens = Shape(16, 32, 128, 128), 70_001
    layer, _ = layers_of(shape, [(tokens - 3, tokens)], torch.bfloat16)
    want, last = layer.run([Span(0, 0, tokens)])[0], layer.state_of(1)
    num_states = 2**31 // (32 * 128 * 128) + 3
    layer.conv = layer.conv.new_zeros(num_states, 3, shape.channels)
    layer.state = layer.state.new_zeros(num_states, 32, 128, 128)
    request, number = layer.requests[0], num_states - 1
    plan = layer.ops.plan_delta([0], [tokens], [tokens - 3], [number], device=layer.device)
    mixed = layer.ops.short_conv(request.x, layer.weight, layer.conv, plan)
    gates = (request.b, request.a, layer.decay, layer.dt_bias)
    got = layer.ops.delta_rule(mixed, *gates, layer.state, plan, 16)
    assert_same_bits("outputs", got[-64:], want[-64:])
    assert_same_bits("inputs", layer.conv[number], last[0])
    assert_same_bits("state", layer.state[number], last[1])
    assert not bool(layer.state[:number].any()), "a state that no row has was written"


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5])
def test_a_graph_replays_rows_that_the_device_lays_out(count: int) -> None:
    layer, _ = layers_of(Shape(16, 32, 128, 128), [(5, 20), (64, 80)], torch.bfloat16)
    positions = [5, 64]
    layer.run([Span(i, 0, start) for i, start in enumerate(positions)])
    before = [layer.state_of(i + 1) for i in range(2)]
    plan = decode_plan(layer, positions, count)
    want = run_plan(layer, plan, positions, count).clone()
    conv, state = layer.conv.clone(), layer.state.clone()

    def restored() -> Tensor:
        for i, (inputs, recurrent) in enumerate(before):
            layer.conv[i + 1].copy_(inputs)
            layer.state[i + 1].copy_(recurrent)
        return run_plan(layer, plan, positions, count)

    assert_same_bits("graph", graph_rig.replayed(restored), want)
    assert_same_bits("inputs", layer.conv[1:3], conv[1:3])
    assert_same_bits("states", layer.state[1:3], state[1:3])


STEPS_WITH_DRAFTS = [
    [Span(0, 0, 5), Span(1, 0, 66), Span(2, 0, 1)],
    [Span(1, 66, 3, num_true=2), Span(2, 1, 2, num_true=1), Span(0, 5, 1)],
    [Span(0, 6, 3, num_true=3), Span(2, 2, 3, (), 1, 3), Span(1, 68, 1, (), 2)],
    [Span(2, 5, 3, (), 3, 1), Span(0, 9, 4, (), 3)],
]
"""Three requests with up to two drafts a row, some of them wrong."""
LENGTHS_WITH_DRAFTS = [(5, 20), (66, 80), (1, 20)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [each for each in WITH_DTYPES if each[0] is not SHAPES[2]], ids=str
)
def test_tokens_held_back_by_the_ops_of_the_cpu(shape: Shape, dtype: torch.dtype) -> None:
    ours, theirs = layers_of(shape, LENGTHS_WITH_DRAFTS, dtype)
    ours.keep_pending(2)
    theirs.keep_pending(2)
    for step in STEPS_WITH_DRAFTS:
        for span, got, want in zip(step, ours.run(step), theirs.run(step), strict=True):
            true = slice(span.num_true)
            assert_close(f"{span} of {shape}", got[true], want[true], BOUND[dtype])
    for got, want in zip(kept(ours), kept(theirs), strict=True):
        # NaN of wrong drafts, and where nobody wrote, must be in the same places.
        assert_close(f"kept of {shape}", got, want, STATE_BOUND[dtype])


@pytest.mark.parametrize("names", [["short_conv"], ["delta_rule"]], ids=str)
def test_a_reference_takes_over_from_a_kernel_what_is_pending(names: list[str]) -> None:
    layers = [layers_of(SHAPES[1], LENGTHS_WITH_DRAFTS, torch.float32)[0] for _ in range(2)]
    mine, other = layers
    other.weight, other.decay, other.dt_bias = mine.weight, mine.decay, mine.dt_bias
    other.requests = mine.requests
    for layer in layers:
        layer.keep_pending(2)
    for at, step in enumerate(STEPS_WITH_DRAFTS):
        if at == 2:
            other.ops = with_references(other.ops, names)
        for span, got, want in zip(step, other.run(step), mine.run(step), strict=True):
            true = slice(span.num_true)
            assert_close(f"{span} by {names}", got[true], want[true], BOUND[torch.float32])
    for got, want in zip(kept(other), kept(mine), strict=True):
        assert_close("kept", got, want, STATE_BOUND[torch.float32])


def test_rows_that_the_device_lays_out_hold_back() -> None:
    """Beside one without tokens, which leaves what is pending, and one at 0, which forgets it."""
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(5, 20), (64, 80), (3, 20)], torch.float16)
    layer.keep_pending(3)
    layer.run([Span(i, 0, count) for i, count in enumerate((5, 64, 3))])
    layer.run([Span(i, start, 3, num_true=2) for i, start in enumerate((5, 64, 3))])
    before = [x.clone() for x in kept(layer)]
    starts = [7, 66, 5]
    want = torch.cat(layer.run([Span(i, at, 4, (), 2, 4) for i, at in enumerate(starts)]))
    after = [x.clone() for x in kept(layer)]
    for now, then in zip(kept(layer), before, strict=True):
        now.copy_(then)
    plan = decode_plan(layer, starts, 4, 2, holds_back=True)
    assert_same_bits("outputs", run_plan(layer, plan, starts, 4), want)
    assert_same_kept(layer, after)
    for now, then in zip(kept(layer), before, strict=True):
        now.copy_(then)
    plan.records[2, 1] = 0
    got = run_plan(layer, plan, starts, 4)
    assert_same_bits("the first", got[:4], want[:4])
    assert_same_bits("the last", got[8:], want[8:])
    assert_same_kept(layer, before, slice(2, 3))
    plan = decode_plan(layer, [0], 4, 2)
    got = run_plan(layer, plan, [0], 4).clone()
    layer.spoil(1)
    assert_same_bits("anew", got, run_plan(layer, plan, [0], 4))


def test_a_plan_without_room_for_what_it_holds_back() -> None:
    layer, _ = layers_of(Shape(1, 2, 16, 24), [(3, 20)], torch.float16)
    layer.run([Span(0, 0, 3)])
    for held in (Span(0, 3, 3, num_true=1), Span(0, 5, 1, (), 2)):
        with pytest.raises(AssertionError, match=r"nothing keeps [23] tokens of a state"):
            layer.run([held])
    layer.keep_pending(1)
    with pytest.raises(AssertionError, match="there is room for 2"):
        layer.run([Span(0, 3, 3, num_true=1)])
    # The device's own rows cannot be checked: what has no room is not touched.
    layer.pending = None
    before = layer.state_of(1)
    run_plan(layer, decode_plan(layer, [3], 2, 1, holds_back=True), [3], 2)
    after = layer.state_of(1)
    layer.put_state(1, before)
    layer.run([Span(0, 3, 2)])
    for part, got, want in zip(("inputs", "state"), after, layer.state_of(1), strict=True):
        assert_same_bits(part, got, want)


def test_a_plan_of_the_device_is_that_of_the_host() -> None:
    positions, states = [5, 1, 700], [3, 1, 2]
    there = kernel_rig.DEVICE
    made = delta_plan.plan_decode(
        torch.tensor(positions, device=there), torch.tensor(states, device=there)
    )
    want = delta_plan.plan_delta(positions, [1] * 3, [5, 1, 700], states, device=there)
    for name in ("records", "states", "tiles", "chunk_rows", "tail_rows"):
        got, right = getattr(made, name), getattr(want, name)
        assert got.dtype == right.dtype, name
        assert got.tolist() == right.tolist(), name
    assert (made.num_chunks, made.longest) == (want.num_chunks, want.longest)
    assert made.records.is_contiguous()
    assert made.tiles.is_contiguous()


def test_a_plan_takes_tensors_that_it_does_not_read() -> None:
    there, rows = kernel_rig.DEVICE, ([9, 3], [2, 3], [5, 1], [1, 2])
    listed = delta_plan.plan_delta(*rows, (), [2, 0], [False, True], device=there)
    pending, holds = torch.tensor([2, 0], device=there), torch.tensor([False, True], device=there)
    made = delta_plan.plan_delta(*rows, (), pending, holds, device=there)
    assert made.records.tolist() == listed.records.tolist()
    assert made.records[4:].tolist() == [[2, 0], [0, 1]]
    assert [(row.num_pending, row.holds_back) for row in listed.rows] == [(2, False), (0, True)]
    assert (listed.most_pending, listed.may_hold) == (3, True)
    assert (made.may_hold, made.rows) == (True, ())
    assert not delta_plan.plan_delta(*rows, (), [2, 0], [False] * 2, device=there).may_hold
    for pending, holds in (([3, 0], []), ([0, 3], []), ([0, -1], [])):
        with pytest.raises(ValueError, match="tokens pending at"):
            delta_plan.plan_delta([7, 3], [2, 3], [5, 1], [1, 2], (), pending, holds, device=there)
    with pytest.raises(ValueError, match=f"from {CHUNK} on held back"):
        delta_plan.plan_delta([CHUNK], [6], [70], [1], (), [], [True], device=there)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_replays_rows_that_hold_back(state_dtype: torch.dtype) -> None:
    """As eager ones, whatever is pending and held when it is replayed."""
    shape, lengths = Shape(16, 32, 128, 128), [(5, 40), (64, 90)]
    layer, _ = layers_of(shape, lengths, torch.bfloat16, state_dtype)
    layer.keep_pending(3)
    layer.run([Span(0, 0, 5), Span(1, 0, 64)])
    layer.run([Span(0, 5, 4, num_true=4), Span(1, 64, 4, num_true=4)])
    before, starts = [x.clone() for x in kept(layer)], [9, 68]
    plan = decode_plan(layer, starts, 4)

    def restored() -> Tensor:
        for now, then in zip(kept(layer), before, strict=True):
            now.copy_(then)
        return run_plan(layer, plan, starts, 4)

    restored()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = restored()
    for pending, holds in ((0, 1), (4, 0), (1, 1), (3, 0), (2, 1)):
        plan.records[4], plan.records[5] = pending, holds
        graph.replay()
        got, ends = result.clone(), [x.clone() for x in kept(layer)]
        assert_same_bits(f"{pending}, {holds}", got, restored())
        assert_same_kept(layer, ends)
