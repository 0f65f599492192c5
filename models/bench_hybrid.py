"""Cases of `unisono bench ops` that hybrid models, their drafts and mixtures of experts add.

Shape letters: T tokens, H value heads, K and V channels of a key and a value, C channels of the
convolution, N experts, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.models.bench_inputs import Case, Inputs, Sizes
from unisono.models.config import DeltaConfig, ExpertsConfig, ModelConfig
from unisono.ops.delta import CHUNK
from unisono.ops.dispatch import Ops
from unisono.ops.reference.draft_plan import Table
from unisono.ops.reference.sampling import key_of_id
from unisono.ops.timing import Call


def delta_cases(config: ModelConfig, delta: DeltaConfig, sizes: Sizes, item: int) -> Iterator[Case]:
    """The ops of the recurrent layers, and the gates of both mixers."""
    for tokens in sizes.tokens:
        yield _gated_norm(config, delta, tokens, item)
        yield _sigmoid(config.num_heads * config.head_dim, tokens, item)
    steps = [(f"decode {rows}", rows, 1, 0) for rows in sorted({r for _, r in sizes.decode})]
    steps += [(f"verify {count} x {rows}", rows, count, 0) for count, _, rows in sizes.verify]
    steps += [(f"prefill {count}", 1, count, count) for count in sizes.prefill]
    for label, rows, count, prompt in steps:
        yield _conv(delta, label, rows, count, prompt, item)
        yield _rule(delta, label, rows, count, prompt, item)
    yield _plan(max(rows for _, rows in sizes.decode))


def experts_cases(
    config: ModelConfig, experts: ExpertsConfig, sizes: Sizes, item: int
) -> Iterator[Case]:
    """Routing, and a layer of experts, each token with its own."""
    num, chosen = min(experts.num_experts, sizes.most_experts), experts.num_experts_per_tok
    for tokens in sizes.tokens:
        yield _routing(experts, tokens, item)
        yield _experts(config.hidden_size, experts.width, num, chosen, tokens, item)


def settle_case(vocabulary: int, rows: int) -> Case:
    """Five drafts a row, all right, and a full set of stop ids, none of which comes."""

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        def numbers(*shape: int, value: int = 1) -> Tensor:
            return torch.full((1 + rows, *shape), value, device=at.device)

        tokens, begin = at.ids(1 + rows, 8, below=vocabulary), numbers()
        table = Table(
            token_ids=tokens,
            lengths=numbers(),
            block_table=numbers(1),
            num_pending=numbers(),
            states=numbers(),
            limits=numbers(value=1 << 40),
            stop_ids=numbers(8, value=vocabulary),
        )
        slots = torch.arange(1, 1 + rows, device=at.device)
        keys, drafts = key_of_id(tokens[1:, 1:7].flatten()), torch.full_like(slots, 5)

        def call() -> object:
            table.lengths.copy_(begin)  # a launch more, or slots would run over
            return ops.settle_drafts(keys, slots, drafts, table, 6)

        return [call]

    size = 8 * (4 * 6 + 7 + 8 + 9)  # of a place, of the answers, of stop ids, of a slot
    return Case(op="settle_drafts", label=f"{rows} x 5", num_bytes=size * rows, ours=ours)


def _gated_norm(config: ModelConfig, delta: DeltaConfig, tokens: int, item: int) -> Case:
    heads, width, eps = delta.num_value_heads, delta.value_head_dim, config.rms_norm_eps

    def inputs(at: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        x, gate = at.noise(2, tokens, heads, width)
        return x, gate, at.noise(width, dtype=torch.float32)

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.gated_rms_norm, *inputs(at), eps)]

    def torchs(at: Inputs) -> list[Call]:
        x, gate, weight = inputs(at)
        narrow = weight.to(x.dtype)
        return [lambda: F.rms_norm(x, (width,), narrow, eps) * F.silu(gate)]

    size = 3 * tokens * heads * width * item
    label = f"{tokens} x {heads} x {width}"
    return Case(op="gated_rms_norm", label=label, num_bytes=size, ours=ours, torch=torchs)


def _sigmoid(width: int, tokens: int, item: int) -> Case:
    def ours(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.sigmoid_and_mul, *at.noise(2, tokens, width))]

    def torchs(at: Inputs) -> list[Call]:
        x, gate = at.noise(2, tokens, width)
        return [lambda: x * torch.sigmoid(gate)]

    size, label = 3 * tokens * width * item, f"{tokens} x {width}"
    return Case(op="sigmoid_and_mul", label=label, num_bytes=size, ours=ours, torch=torchs)


def _plans(at: Inputs, ops: Ops, copies: int, rows: int, count: int, prompt: int) -> list[Any]:
    """Of rows that begin after a prompt of CHUNK tokens, or at 0 with one; each copy's its own
    states, from 1 on."""
    starts, prompts = ([0], [prompt]) if prompt else ([CHUNK], [CHUNK])
    return [
        ops.plan_delta(
            starts * rows,
            [count] * rows,
            prompts * rows,
            range(1 + copy * rows, 1 + (copy + 1) * rows),
            device=at.device,
        )
        for copy in range(copies)
    ]


def _conv(delta: DeltaConfig, label: str, rows: int, count: int, prompt: int, item: int) -> Case:
    tokens, channels, taps = rows * count, delta.conv_channels, delta.conv_width

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        x, weight = at.noise(tokens, channels), at.noise(channels, taps)
        shape = (rows + 1, taps - 1, channels)
        conv = torch.zeros(shape, dtype=at.dtype, device=at.device)
        (plan,) = _plans(at, ops, 1, rows, count, prompt)
        return [partial(ops.short_conv, x, weight, conv, plan)]

    def torchs(at: Inputs) -> list[Call]:
        x, weight = at.noise(tokens, channels).T[None], at.noise(channels, taps)[:, None]
        past = taps - 1
        return [lambda: F.silu(F.conv1d(x, weight, padding=past, groups=channels)[0, :, :tokens].T)]

    return Case(
        op="short_conv",
        label=f"{label} of {channels}",
        num_bytes=2 * (tokens + rows * (taps - 1)) * channels * item,
        ours=ours,
        torch=torchs if prompt else None,
    )


def _rule(delta: DeltaConfig, label: str, rows: int, count: int, prompt: int, item: int) -> Case:
    heads, value, key = delta.num_value_heads, delta.value_head_dim, delta.key_head_dim
    tokens, state = rows * count, heads * value * key

    def ours(at: Inputs, ops: Ops) -> Sequence[Call]:
        copies = at.num_copies(rows * state * 4)
        shape = (1 + copies * rows, heads, value, key)
        states = torch.zeros(shape, dtype=torch.float32, device=at.device)
        b, a = at.noise(2, tokens, heads)
        decay, dt_bias = -at.noise(heads, dtype=torch.float32).abs(), at.noise(heads).float()
        inputs = (at.noise(tokens, delta.conv_channels), b, a, decay, dt_bias, states)
        return [
            partial(ops.delta_rule, *inputs, plan, delta.num_key_heads)
            for plan in _plans(at, ops, copies, rows, count, prompt)
        ]

    # Of a chunk: two products among its tokens by keys, two by values, three with the state.
    by_token = 2 * 2 * CHUNK * (key + value) + 3 * 2 * key * value
    return Case(
        op="delta_rule",
        label=f"{label} of {heads} x {value} x {key}",
        num_bytes=2 * rows * state * 4
        + tokens * (delta.conv_channels + heads * (value + 2)) * item,
        num_flops=tokens * heads * by_token if prompt else 0,
        ours=ours,
    )


def _plan(rows: int) -> Case:
    def ours(at: Inputs, ops: Ops) -> list[Call]:
        return [lambda: _plans(at, ops, 1, rows, 1, 0)]

    label = f"decode {rows}, on the host"
    return Case(op="plan_delta", label=label, num_bytes=0, ours=ours, on_host=True)


def _routing(experts: ExpertsConfig, tokens: int, item: int) -> Case:
    num, chosen = experts.num_experts, experts.num_experts_per_tok

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.route_experts, at.noise(tokens, num), chosen, experts.renormalise)]

    def torchs(at: Inputs) -> list[Call]:
        logits = at.noise(tokens, num)
        return [lambda: torch.softmax(logits, -1, dtype=torch.float32).topk(chosen)]

    return Case(
        op="route_experts",
        label=f"{tokens} x {chosen} of {num}",
        num_bytes=tokens * (num * item + chosen * 12),
        ours=ours,
        torch=torchs,
    )


def _experts(hidden: int, width: int, num: int, chosen: int, tokens: int, item: int) -> Case:
    one = 3 * width * hidden * item
    likely = num * (1 - (1 - chosen / num) ** tokens)

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        packed = ops.pack_experts(at.noise(num, 2 * width, hidden), at.noise(num, hidden, width))
        x, generator = at.noise(tokens, hidden), torch.Generator().manual_seed(3)
        weights = torch.full((tokens, chosen), 1 / chosen, device=at.device)
        routes = [
            torch.rand(tokens, num, generator=generator).topk(chosen).indices.sort().values
            for _ in range(at.num_copies(round(likely * one)))
        ]
        return [partial(packed, x, weights, ids.to(at.device), x) for ids in routes]

    return Case(
        op="experts",
        label=f"{tokens} x {chosen} of {num}, {width}x{hidden}",
        num_bytes=round(likely * one) + tokens * (3 * hidden * item + 12 * chosen),
        num_flops=2 * tokens * chosen * 3 * width * hidden,
        ours=ours,
    )
