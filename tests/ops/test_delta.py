"""The ops of a recurrent layer on the CPU: against transformers' own, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops.delta_rig import Layer, Shape, Span
from unisono.ops import dispatch
from unisono.ops.by_reference import with_references
from unisono.ops.delta import CHUNK, plan_delta

CPU = torch.device("cpu")
OPS = dispatch.resolve(CPU, 64)
BOUND = 1e-5
SHAPES = [Shape(2, 6, 8, 12), Shape(1, 1, 16, 16, 2), Shape(3, 3, 5, 7, 3), Shape(2, 4, 64, 72)]

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def layer_of(shape: Shape, prompt: int, length: int, **settings: Any) -> Layer:
    return Layer(OPS, shape, [(prompt, length)], torch.float32, **settings)


def by_transformers(
    rule: Callable[..., tuple[Tensor, Tensor]], layer: Layer, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, V] and last state [H, V, K] of the layer's first request."""
    request, shape = layer.requests[0], layer.shape
    keys = shape.key_heads * shape.key_dim
    u = F.pad(request.x, (0, 0, shape.taps - 1, 0)).T[None]
    mixed = F.silu(F.conv1d(u, layer.weight[:, None], groups=shape.channels))[0].T
    q, k, v = mixed.tensor_split((keys, 2 * keys), dim=1)
    out, state = rule(
        q.reshape(1, -1, shape.key_heads, shape.key_dim),
        k.reshape(1, -1, shape.key_heads, shape.key_dim),
        v.reshape(1, -1, shape.value_heads, shape.value_dim),
        g=(layer.decay * F.softplus(request.a + layer.dt_bias))[None],
        beta=request.b.sigmoid()[None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0].transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 201])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_are_those_of_transformers(shape: Shape, length: int) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    for prompt, rule in (
        (length, qwen.torch_chunk_gated_delta_rule),
        (0, qwen.torch_recurrent_gated_delta_rule),
    ):
        layer = layer_of(shape, prompt, length)
        want, state = by_transformers(rule, layer)
        out = layer.run([Span(0, 0, length)])[0]
        assert_close("outputs", out, want, BOUND)
        assert_close("state", layer.state[1], state, BOUND)


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_the_convolution_is_that_of_transformers(taps: int) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    channels = 37
    x, weight = torch.randn(20, channels), torch.randn(channels, taps)
    conv = torch.full((3, taps - 1, channels), float("nan"))
    theirs = torch.zeros(1, channels, taps - 1)
    for start, count in ((0, 1), (1, 9), (10, 1), (11, 9)):
        row = x[start : start + count]
        got = OPS.short_conv(row, weight, conv, plan([start], [count], [0], [2]))
        want = qwen.causal_conv1d_update(row.T[None], theirs, weight, None, "silu")
        assert_close(f"from {start}", got, want[0].T, 1e-6)
        assert_same_bits("inputs", conv[2], theirs[0].T.contiguous())
    whole = qwen.causal_conv1d_fn(x.T[None], weight, None, "silu")
    got = OPS.short_conv(x, weight, conv, plan([0], [20], [20], [1]))
    assert_close("a prompt", got, whole[0].T, 1e-6)


def plan(starts: list[int], counts: list[int], prompts: list[int], states: list[int]) -> Any:
    return plan_delta(starts, counts, prompts, states, device=CPU)


@pytest.mark.parametrize("strength", [0.001, 1.0, 30.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunked_equals_sequential(shape: Shape, strength: float) -> None:
    """Whether a state hardly fades, or is all but forgotten at every token."""
    length = 260
    layer = layer_of(shape, length, length)
    layer.decay *= strength
    chunked, chunked_state = layer.run([Span(0, 0, length)])[0], layer.state[1].clone()
    layer.requests[0].num_prompt = 0
    sequential = layer.run([Span(0, 0, length)])[0]
    assert_close("outputs", chunked, sequential, BOUND)
    assert_close("state", chunked_state, layer.state[1], BOUND)


def test_chunked_equals_sequential_where_keys_repeat() -> None:
    """Every token writes nearly what the one before wrote, at full strength: the system that a
    chunk solves is as far from diagonal as can be."""
    layer = layer_of(Shape(1, 2, 16, 8), 192, 192)
    request = layer.requests[0]
    request.x = request.x[:1] + 0.1 * request.x
    request.b = request.b.abs() + 3
    layer.decay *= 1e-3
    chunked = layer.run([Span(0, 0, 192)])[0]
    request.num_prompt = 0
    assert_close("outputs", chunked, layer.run([Span(0, 0, 192)])[0], 3 * BOUND)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_is_one_however_its_tokens_were_cut(state_dtype: torch.dtype) -> None:
    layer = layer_of(Shape(2, 4, 8, 12), 300, 310, state_dtype=state_dtype)
    layer.run([Span(0, 0, 310)])
    want = layer.state_of(1)
    for cuts in ([64, 128, 192, 256, 300, 305], [256, 300], [128, 192, 309], [192]):
        layer.spoil(1)
        for start, stop in zip([0, *cuts], [*cuts, 310], strict=True):
            layer.run([Span(0, start, stop - start)])
        for part, got, right in zip(("inputs", "state"), layer.state_of(1), want, strict=True):
            assert_same_bits(f"{part} after {cuts}", got, right)


def test_a_narrow_state_is_rounded_after_every_token() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    shape, length = Shape(2, 4, 8, 12), 40
    layer = layer_of(shape, 0, length, state_dtype=torch.bfloat16)
    out = layer.run([Span(0, 0, length)])[0]
    request = layer.requests[0]
    rounded, wants = None, []
    for stop in range(1, length + 1):

        def last(*qkv: Tensor, stop: int = stop, **rest: Any) -> tuple[Tensor, Tensor]:
            rest |= {name: rest[name][:, stop - 1 : stop] for name in ("g", "beta")}
            return qwen.torch_recurrent_gated_delta_rule(
                *(x[:, stop - 1 : stop] for x in qkv), **rest
            )

        want, state = by_transformers(last, layer, rounded)
        wants.append(want)
        rounded = state.to(torch.bfloat16).float().transpose(1, 2)[None].contiguous()
    # A few numbers lie on a border and round the other way.
    assert_close("outputs", out, torch.cat(wants), 1e-3)
    assert_close("state", layer.state[1], rounded[0].transpose(1, 2), 1e-3)
    wide = layer_of(shape, 0, length)
    wide.requests[0] = request
    wide.weight, wide.decay, wide.dt_bias = layer.weight, layer.decay, layer.dt_bias
    with pytest.raises(AssertionError, match="relative rms"):
        assert_close("unrounded", wide.run([Span(0, 0, length)])[0], out, 1e-3)


def test_references_of_the_bisect_agree() -> None:
    """They take prompts token by token; what they keep and save is where the ops have it."""
    shape, lengths = Shape(2, 4, 8, 12), [(130, 140), (64, 70), (5, 5)]
    spans = [Span(0, 0, 128, ((64, 9), (128, 8))), Span(1, 0, 70, ((64, 7),)), Span(2, 0, 5)]
    layers = [
        Layer(with_references(OPS, names), shape, lengths, torch.float32)
        for names in ([], ["short_conv", "delta_rule"])
    ]
    for name in ("weight", "decay", "dt_bias", "requests"):
        setattr(layers[1], name, getattr(layers[0], name))
    for step in (spans, [Span(0, 128, 12)]):
        for got, want in zip(*(layer.run(step) for layer in layers), strict=True):
            assert_close("outputs", got, want, BOUND)
    for number in (1, 2, 3, 7, 8, 9):
        got, want = (layer.state_of(number) for layer in layers)
        assert_same_bits(f"inputs {number}", got[0], want[0])
        assert_close(f"state {number}", got[1], want[1], BOUND)
    assert bool(layers[1].state[10:].isnan().all()), "a state that nobody has was written"


def test_rows_without_tokens_change_nothing() -> None:
    layer = layer_of(Shape(2, 4, 8, 12), 5, 9)
    layer.run([Span(0, 0, 7)])
    before = layer.state_of(1)
    empty = plan_delta([7, 0], [0, 0], [5, 3], torch.tensor([1, 0]), device=CPU)
    mixed = OPS.short_conv(layer.requests[0].x[:0], layer.weight, layer.conv, empty)
    gates = layer.requests[0].b[:0], layer.requests[0].a[:0], layer.decay, layer.dt_bias
    assert mixed.shape == (0, 80)
    assert OPS.delta_rule(mixed, *gates, layer.state, empty, 2).shape == (0, 4, 12)
    for part, got, want in zip(("inputs", "state"), layer.state_of(1), before, strict=True):
        assert_same_bits(part, got, want)


def test_prompts_are_cut_on_the_grid_and_saved_there() -> None:
    for start, count in ((0, 63), (32, 32), (1, 99), (64, 35)):
        with pytest.raises(AssertionError, match="a prompt is cut"):
            plan([start], [count], [100], [1])
    for length in (32, 192, 64):
        with pytest.raises(AssertionError, match="saves"):
            plan_delta([CHUNK], [CHUNK], [150], [1], [(0, length, 2)], device=CPU)
    saved = plan_delta([CHUNK], [CHUNK], [150], [1], [(0, 2 * CHUNK, 2)], device=CPU)
    assert saved.rows[0].saves == ((CHUNK, 2),)
