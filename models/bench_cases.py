"""What `unisono bench ops` times: every op, at the sizes that a model and its steps give it.

A case says what the call has to move and to compute, makes its inputs, and has torch's own way
beside it where torch has one. To add one: a function that yields cases, in `cases_of`.

Shape letters: T tokens, R rows of logits, V vocabulary, H hidden, Q query heads, K KV heads, D
head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unisono.models.bench_hybrid import delta_cases, experts_cases, settle_case
from unisono.models.bench_inputs import NUM_PARTS, Case, Inputs, Sizes
from unisono.models.config import ModelConfig
from unisono.models.partition import ModelPartition
from unisono.ops import comm
from unisono.ops.attention import PAGE, AttentionShape
from unisono.ops.dispatch import Ops
from unisono.ops.timing import Call


def cases_of(config: ModelConfig, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Every case of a model."""
    item = dtype.itemsize
    for ranks in (1, 2):
        for name, outputs, inputs in _weights(ModelPartition.of(config, ranks)):
            where = name if ranks == 1 else f"{name}/{ranks}"
            for rows in sizes.head_rows if name == "head" else sizes.linear_rows:
                yield _linear(where, outputs, inputs, rows, item)
    for tokens in sizes.tokens:
        yield from _norms(config, tokens, item)
        yield _rope(config, tokens, item)
        if config.intermediate_size:
            yield _activation(config, tokens, item)
        yield _embedding(config, tokens, item)
    for keys, requests in sizes.decode:
        yield _attention(config, f"decode {keys} x {requests}", 1, keys, requests, item)
    for queries, keys, requests in sizes.verify:
        label = f"verify {queries} of {keys} x {requests}"
        yield _attention(config, label, queries, keys, requests, item)
    for keys in sizes.prefill:
        yield _attention(config, f"prefill {keys}", keys, keys, 1, item)
    yield _plan(config, *sizes.decode[0])
    if config.delta is not None:
        yield from delta_cases(config, config.delta, sizes, item)
    if config.experts is not None:
        yield from experts_cases(config, config.experts, sizes, item)
    for rows in sizes.logit_rows:
        yield from _choosing(config.vocab_size, rows)
        yield from _changing(config.vocab_size, rows)


def _weights(partition: ModelPartition) -> Iterator[tuple[str, int, int]]:
    """The products of rank 0 as (name, outputs, inputs)."""
    config, dim = partition.config, partition.config.head_dim
    queries, keys = partition.heads.size(0) * dim, partition.kv_heads.size(0) * dim
    yield "qkv", queries + 2 * keys, config.hidden_size
    yield "o", config.hidden_size, queries
    if delta := config.delta:
        values = partition.value_heads.size(0)
        width = values * delta.value_head_dim
        mixed = 2 * partition.key_heads.size(0) * delta.key_head_dim + width
        yield "delta_in", mixed + width + 2 * values, config.hidden_size
        yield "delta_out", config.hidden_size, width
    if config.intermediate_size:
        yield "gate_up", 2 * partition.mlp.size(0), config.hidden_size
        yield "down", config.hidden_size, partition.mlp.size(0)
    yield "head", partition.vocab.size(0), config.hidden_size


def _linear(name: str, outputs: int, inputs: int, rows: int, item: int) -> Case:
    is_head = name.startswith("head")

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        x = at.noise(rows, inputs)
        weights = at.copies(outputs, inputs)
        if is_head:
            return [partial(ops.pack_head(weight), x) for weight in weights]
        return [partial(ops.pack_linear(weight, None), x) for weight in weights]

    def torchs(at: Inputs) -> list[Call]:
        x = at.noise(rows, inputs)
        return [partial(F.linear, x, weight) for weight in at.copies(outputs, inputs)]

    result = rows * outputs * (4 if is_head else item)
    return Case(
        op="head" if is_head else "linear",
        label=f"{name} {outputs}x{inputs}, {rows}",
        num_bytes=inputs * (outputs + rows) * item + result,
        num_flops=2 * rows * inputs * outputs,
        ours=ours,
        torch=torchs,
    )


def _norms(config: ModelConfig, tokens: int, item: int) -> Iterator[Case]:
    width, eps = config.hidden_size, config.rms_norm_eps
    size, label = tokens * width * item, f"{tokens} x {width}"

    def inputs(at: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        parts = at.noise(NUM_PARTS, tokens, width)
        return parts, parts[0], at.noise(width, dtype=_norm_dtype(config))

    def norm(at: Inputs, ops: Ops) -> list[Call]:
        _, x, weight = inputs(at)
        return [lambda: ops.rms_norm(x, weight, eps)]

    def torch_norm(at: Inputs) -> list[Call]:
        _, x, weight = inputs(at)
        narrow = weight.to(x.dtype)
        return [lambda: F.rms_norm(x, (width,), narrow, eps)]

    def add_norm(at: Inputs, ops: Ops) -> list[Call]:
        parts, x, weight = inputs(at)
        return [lambda: ops.add_rms_norm(x, parts[1], weight, eps)]

    def torch_add_norm(at: Inputs) -> list[Call]:
        parts, x, weight = inputs(at)
        narrow = weight.to(x.dtype)
        return [lambda: F.rms_norm(x + parts[1], (width,), narrow, eps)]

    def add(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(_fused(at.device, ops).ordered_sum, inputs(at)[0])]

    def torch_add(at: Inputs) -> list[Call]:
        return [partial(inputs(at)[0].sum, 0)]

    def all_of_it(at: Inputs, ops: Ops) -> list[Call]:
        parts, x, weight = inputs(at)
        fused = _fused(at.device, ops).ordered_sum_add_rms_norm
        return [partial(fused, parts, None, x, weight, eps)]

    def torch_all(at: Inputs) -> list[Call]:
        parts, x, weight = inputs(at)
        narrow = weight.to(x.dtype)
        return [lambda: F.rms_norm(parts.sum(0) + x, (width,), narrow, eps)]

    for op, moved, ours, torchs in (
        ("rms_norm", 2, norm, torch_norm),
        ("add_rms_norm", 4, add_norm, torch_add_norm),
        ("ordered_sum", NUM_PARTS + 1, add, torch_add),
        ("ordered_sum_add_rms_norm", NUM_PARTS + 3, all_of_it, torch_all),
    ):
        yield Case(op=op, label=label, num_bytes=moved * size, ours=ours, torch=torchs)


def _norm_dtype(config: ModelConfig) -> torch.dtype | None:
    """Of a norm's weights; None: the model's."""
    return torch.float32 if config.zero_centred_norms else None


def _rope(config: ModelConfig, tokens: int, item: int) -> Case:
    queries, keys, dim = config.num_heads, config.num_kv_heads, config.head_dim
    rotary = config.rope.rotary_dim

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        heads = at.noise(tokens, queries + 2 * keys, dim)
        kind = _norm_dtype(config)
        norms = at.noise(queries + keys, dim, dtype=kind) if config.qk_norm else None
        angle = torch.rand(tokens, 1, rotary // 2, device=at.device)
        shape = (-(-tokens // PAGE), keys, PAGE, dim)
        k, v = (torch.empty(shape, dtype=at.dtype, device=at.device) for _ in range(2))
        slots = torch.arange(tokens, device=at.device)
        rest = (config.rms_norm_eps, angle.cos(), angle.sin(), k, v, slots)
        return [partial(ops.rope_and_write_kv, heads, queries, norms, *rest)]

    moved = 2 * tokens * (queries + 2 * keys) * dim * item + tokens * rotary * 4
    label = f"{tokens} x ({queries}, {keys}, {dim})"
    return Case(op="rope_and_write_kv", label=label, num_bytes=moved, ours=ours)


def _activation(config: ModelConfig, tokens: int, item: int) -> Case:
    width = config.intermediate_size

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.silu_and_mul, at.noise(tokens, 2 * width))]

    def torchs(at: Inputs) -> list[Call]:
        gate, up = at.noise(tokens, 2 * width).chunk(2, 1)
        return [lambda: F.silu(gate) * up]

    return Case(
        op="silu_and_mul",
        label=f"{tokens} x {width}",
        num_bytes=3 * tokens * width * item,
        ours=ours,
        torch=torchs,
    )


def _embedding(config: ModelConfig, tokens: int, item: int) -> Case:
    vocabulary, width = config.vocab_size, config.hidden_size

    def inputs(at: Inputs) -> tuple[Sequence[Tensor], Tensor]:
        copies = min(64, at.num_copies(tokens * width * item))
        return list(at.ids(copies, tokens, below=vocabulary)), at.noise(vocabulary, width)

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        rows, table = inputs(at)
        return [partial(ops.embed_shard, ids, table, 0) for ids in rows]

    def torchs(at: Inputs) -> list[Call]:
        rows, table = inputs(at)
        return [partial(F.embedding, ids, table) for ids in rows]

    return Case(
        op="embed_shard",
        label=f"{tokens} of {vocabulary} x {width}",
        num_bytes=2 * tokens * width * item + 8 * tokens,
        ours=ours,
        torch=torchs,
    )


def _attention(
    config: ModelConfig, label: str, queries: int, keys: int, requests: int, item: int
) -> Case:
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    pages, tokens = -(-keys // PAGE), requests * queries
    cache_bytes = 2 * requests * keys * kv_heads * dim * item

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        copies, blocks = at.num_copies(cache_bytes), requests * pages
        k, v = at.noise(2, copies * blocks, kv_heads, PAGE, dim)
        q = at.noise(tokens, heads, dim)
        order = torch.randperm(copies * blocks, generator=torch.Generator().manual_seed(2))
        starts, counts = [keys - queries] * requests, [queries] * requests
        plans = [
            ops.plan_attention(shape, starts, counts, table, 0)
            for table in order.to(at.device).view(copies, requests, pages)
        ]
        return [partial(ops.paged_attention, q, k, v, plan, dim**-0.5) for plan in plans]

    def torchs(at: Inputs) -> list[Call]:
        copies = at.num_copies(cache_bytes)
        caches = at.noise(copies, 2, requests, kv_heads, keys, dim)
        q = at.noise(requests, heads, queries, dim)
        is_causal = queries == keys
        return [partial(_torch_attention, q, k, v, is_causal) for k, v in caches]

    visible = queries * keys - queries * (queries - 1) // 2
    return Case(
        op="paged_attention",
        label=label,
        num_bytes=cache_bytes + 2 * tokens * heads * dim * item,
        num_flops=4 * requests * heads * dim * visible,
        ours=ours,
        torch=torchs,
    )


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Over contiguous keys; without a mask where some but not all keys are queries too."""
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _plan(config: ModelConfig, keys: int, requests: int) -> Case:
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
    pages = -(-keys // PAGE)

    def ours(at: Inputs, ops: Ops) -> list[Call]:
        table = torch.arange(requests * pages, device=at.device).view(requests, pages)
        step = ([keys - 1] * requests, [1] * requests)
        return [partial(ops.plan_attention, shape, *step, table, 0)]

    label = f"decode {keys} x {requests}, on the host"
    return Case(op="plan_attention", label=label, num_bytes=0, ours=ours, on_host=True)


def _choosing(vocabulary: int, rows: int) -> Iterator[Case]:
    """Ops that read logits and give little."""
    size, label = rows * vocabulary * 4, f"{rows} x {vocabulary}"

    def logits(at: Inputs) -> Tensor:
        return at.noise(rows, vocabulary, dtype=torch.float32)

    def argmax(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.argmax_keys, logits(at), 0, vocabulary)]

    def torch_argmax(at: Inputs) -> list[Call]:
        return [partial(torch.argmax, logits(at), -1)]

    def noisy(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.noisy_argmax_keys, logits(at), *_draws(at, rows), 0, vocabulary)]

    def unpack(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.unpack_keys, ops.argmax_keys(logits(at), 0, vocabulary))]

    def logprobs(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.token_logprobs, logits(at), at.ids(rows, below=vocabulary), 5)]

    def torch_logprobs(at: Inputs) -> list[Call]:
        return [lambda: F.log_softmax(logits(at), -1).topk(5)]

    def judge(at: Inputs, ops: Ops) -> list[Call]:
        temperature, seeds, positions = _draws(at, rows)
        those = (logits(at), logits(at).roll(1, 1), at.ids(rows, below=vocabulary), temperature)
        return [lambda: ops.judge_drafts(*those, ops.chance(seeds, positions))]

    yield Case(op="judge_drafts", label=label, num_bytes=3 * size, ours=judge)
    yield settle_case(vocabulary, rows)
    yield Case(op="argmax_keys", label=label, num_bytes=size, ours=argmax, torch=torch_argmax)
    yield Case(op="noisy_argmax_keys", label=label, num_bytes=size, ours=noisy)
    yield Case(op="unpack_keys", label=f"{rows}", num_bytes=20 * rows, ours=unpack)
    yield Case(
        op="token_logprobs", label=label, num_bytes=size, ours=logprobs, torch=torch_logprobs
    )


def _changing(vocabulary: int, rows: int) -> Iterator[Case]:
    """Ops that read logits and write others."""

    def logits(at: Inputs) -> Tensor:
        return at.noise(rows, vocabulary, dtype=torch.float32)

    def noise(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.add_noise, logits(at), *_draws(at, rows), 0)]

    def filters(at: Inputs, ops: Ops) -> list[Call]:
        top_k = torch.full((rows,), 50, device=at.device)
        rest = (at.full(rows, 0.8), top_k, at.full(rows, 0.9), at.full(rows, 0.01))
        return [partial(ops.filter_logits, logits(at), *rest)]

    def torch_filters(at: Inputs) -> list[Call]:
        return [partial(_torch_filters, logits(at), 0.8, 50, 0.9, 0.01)]

    def history(at: Inputs) -> Tensor:
        return at.ids(rows, 1024, below=vocabulary)

    def penalties(at: Inputs, ops: Ops) -> list[Call]:
        counts = (torch.full((rows,), n, device=at.device) for n in (512, 1024))
        values = (at.full(rows, value) for value in (1.2, 0.5, 0.5))
        return [partial(ops.penalize, logits(at), history(at), *counts, *values, 0)]

    def torch_penalties(at: Inputs) -> list[Call]:
        return [partial(_torch_penalties, logits(at), history(at), 512, 1.2, 0.5, 0.5)]

    def places(at: Inputs) -> tuple[Tensor, Tensor]:
        return torch.arange(rows, device=at.device), at.ids(rows, below=vocabulary)

    def bias(at: Inputs, ops: Ops) -> list[Call]:
        return [partial(ops.add_bias, logits(at), *places(at), at.full(rows, 1.5), 0)]

    def torch_bias(at: Inputs) -> list[Call]:
        x, (row, ids) = logits(at), places(at)
        added = torch.full((rows, 1), 1.5, device=at.device)
        return [lambda: x.scatter_add(1, ids[row, None], added)]

    size = 2 * rows * vocabulary * 4
    for op, num_bytes, ours, torchs in (
        ("add_noise", size, noise, None),
        ("filter_logits", size, filters, torch_filters),
        ("penalize", size + 8 * 1024 * rows, penalties, torch_penalties),
        ("add_bias", size + 24 * rows, bias, torch_bias),
    ):
        label = f"{rows} x {vocabulary}"
        yield Case(op=op, label=label, num_bytes=num_bytes, ours=ours, torch=torchs)


def _torch_filters(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """With a sort, in fp32."""
    ordered, ids = logits.sort(dim=-1, descending=True)
    ordered[:, top_k:] = -torch.inf
    share = (ordered / temperature).softmax(-1)
    keep = (share.cumsum(-1) - share < top_p) & (share >= min_p * share[:, :1])
    return torch.empty_like(logits).scatter_(1, ids, ordered.where(keep, -torch.inf))


def _torch_penalties(
    logits: Tensor,
    history: Tensor,
    num_prompt: int,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """With dense counters, in fp32."""
    seen, counts = torch.zeros_like(logits), torch.zeros_like(logits)
    seen.scatter_(1, history, 1.0)
    answered = history[:, num_prompt:]
    counts.scatter_add_(1, answered, torch.ones_like(answered, dtype=counts.dtype))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def _draws(at: Inputs, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return at.full(rows, 0.8), at.ids(rows, below=1 << 62), at.ids(rows, below=4096)


@dataclass(frozen=True, slots=True)
class _Fused:
    """Fused forms that a GPU has and the table of ops has not."""

    ordered_sum: Callable[[Tensor], Tensor]
    ordered_sum_add_rms_norm: Callable[..., tuple[Tensor, Tensor]]


def _fused(device: torch.device, ops: Ops) -> _Fused:
    if device.type == "cuda":
        from unisono.ops.kernels import norm, reduce

        return _Fused(reduce.ordered_sum, norm.ordered_sum_add_rms_norm)

    def sum_and_norm(parts: Tensor, bias: None, residual: Tensor, *rest: Any) -> Any:
        return ops.add_rms_norm(comm.ordered_sum(parts), residual, *rest)

    return _Fused(comm.ordered_sum, sum_and_norm)
