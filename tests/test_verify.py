"""`unisono verify` holds on sound models, and finds and names every planted fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import write_checkpoint
from tests.verify_rig import Fault, opener
from unisono.launcher.verify.bisect import bisect
from unisono.launcher.verify.compare import Verdict
from unisono.launcher.verify.course import Course
from unisono.launcher.verify.plan import Setting, matrix
from unisono.launcher.verify.prompts import id_prompts, prompt_lengths
from unisono.launcher.verify.report import table_text
from unisono.launcher.verify.task import Task
from unisono.models.config_reader import read_model_config
from unisono.ops.table import Ops
from unisono.runtime.protocol import Reload

EVERY = {
    "batch": (1, 4),
    "chunk": (0, 64),
    "prefix_cache": (False, True),
    "pre_empt": (False, True),
    "graphs": (False,),
    "speculate": ("off",),
    "sleep": (False,),
    "reload": (False,),
}
PLAIN = Setting(tp=1, dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def write(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_checkpoint(name.removesuffix("+mtp"), path, mtp=name.endswith("+mtp"))
        return path

    return write


def task(path: Path, settings: list[Setting], num_prompts: int = 4, max_tokens: int = 6) -> Task:
    model = read_model_config(path)
    longest = 120 - max_tokens
    return Task(
        settings=settings,
        prompts=id_prompts(prompt_lengths(num_prompts, 64, longest), model.vocab_size),
        max_tokens=max_tokens,
        model=model,
        again=Reload(path=str(path), load_format="auto"),
    )


class Silence:
    """Nobody is told how far it is."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def judged(task: Task, open_engine: Any) -> list[Verdict]:
    course = Course(task, open_engine, Silence())
    course.run_settings()
    return course.verdicts


@pytest.mark.parametrize(("model", "dtype"), [("llama", "bfloat16"), ("qwen3-next+mtp", "float32")])
def test_a_sound_model_passes(checkpoint: Callable[[str], Path], model: str, dtype: str) -> None:
    """Of attention alone the demo model is verified in float32 (tests/end_to_end)."""
    path = checkpoint(model)
    axes = {**EVERY, "speculate": ("off", "3")} if "mtp" in model else EVERY
    whole = task(path, matrix((1, 2), (dtype,), axes, seeded=True, full=False), num_prompts=3)
    verdicts = judged(whole, opener(path))
    assert all(verdict.ok for verdict in verdicts), table_text(verdicts)
    assert {verdict.against for verdict in verdicts} == {"-", "plain", "1 rank"}
    assert all(verdict.num_tokens >= 18 for verdict in verdicts if verdict.bound is None)
    cut = next(verdict for verdict in verdicts if verdict.bound is not None)
    assert cut.closeness is not None
    assert 0 < cut.closeness.relative_rms < (cut.bound or 0)


def company(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Attention that depends on the number of tokens in the step."""

    def attention(q: Tensor, *args: Any) -> Tensor:
        out = ops.paged_attention(q, *args)
        return out if len(q) == 1 or len(q) in LENGTHS else out * (1 + 1e-6)

    return {"paged_attention": attention}


LENGTHS = (62, 63, 64, 70)


def split_k(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Products whose sums are cut in two where there are many rows."""

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        whole = ops.pack_linear(weight, bias)
        half = weight.shape[1] // 2
        low, high = weight[:, :half].clone(), weight[:, half:].clone()

        def product(x: Tensor) -> Tensor:
            if len(x) <= 70:
                return whole(x)
            return x[:, :half] @ low.T + x[:, half:] @ high.T + (0 if bias is None else bias)

        return product

    return {"pack_linear": pack}


def off_by_one(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Rotation by the position before, in a chunk that does not start at 0."""

    def rope(heads: Tensor, num: int, norms: Any, eps: float, cos: Tensor, sin: Tensor, *rest: Any):  # type: ignore[no-untyped-def]
        starts_later = len(heads) > 1 and not bool((cos[0] == 1).all())
        if starts_later:
            cos, sin = cos.roll(1, 0), sin.roll(1, 0)
        return ops.rope_and_write_kv(heads, num, norms, eps, cos, sin, *rest)

    return {"rope_and_write_kv": rope}


def noise(rank: int, ops: Ops) -> Mapping[str, Any]:
    """A rank whose activation is never twice the same."""
    if rank != 1:
        return {}
    calls = count(1)

    def activation(x: Tensor) -> Tensor:
        y = ops.silu_and_mul(x)
        generator = torch.Generator().manual_seed(1000 * next(calls) + len(x))
        return y + 1e-4 * torch.randn(y.shape, generator=generator)

    return {"silu_and_mul": activation}


def mixed_blocks(rank: int, ops: Ops) -> Mapping[str, Any]:
    """A block that a request found in the cache holds the keys of other places."""
    found: list[int] = []

    def plan(shape: Any, starts: Any, counts: Any, table: Tensor, window: int = 0) -> Any:
        is_hit = starts[0] > 0 and counts[0] > 1
        found[:] = [int(table[0, 0])] if is_hit else []
        return ops.plan_attention(shape, starts, counts, table, window)

    def rope(*args: Any) -> Tensor:
        q = ops.rope_and_write_kv(*args)
        k_cache = args[6]
        for block in found:
            k_cache[block] = k_cache[block].roll(1, 1)
        return q

    return {"plan_attention": plan, "rope_and_write_kv": rope}


def bias_first(rank: int, ops: Ops) -> Mapping[str, Any]:
    """The bias is added on every rank, before the sum."""

    def reduce(partial: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        return ops.reduce_rows(partial if bias is None else partial + bias, None, group)

    return {"reduce_rows": reduce}


def louder(rank: int, ops: Ops) -> Mapping[str, Any]:
    """The activation of a rank is off by a twentieth."""
    return {"silu_and_mul": lambda x: ops.silu_and_mul(x) * 1.05} if rank else {}


def louder_attention(rank: int, ops: Ops) -> Mapping[str, Any]:
    return {"paged_attention": lambda q, *args: ops.paged_attention(q, *args) * 1.2} if rank else {}


def louder_delta(rank: int, ops: Ops) -> Mapping[str, Any]:
    def rule(*args: Any, **kwargs: Any) -> Tensor:
        out = ops.delta_rule(*args, **kwargs)
        out[..., 0] *= 1.2  # a norm follows: the whole of it makes no difference
        return out

    return {"delta_rule": rule} if rank else {}


def turned(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Keys alone are rotated by the position before, on a rank."""

    def rope(heads: Tensor, num: int, norms: Any, eps: float, cos: Tensor, sin: Tensor, *rest: Any):  # type: ignore[no-untyped-def]
        ops.rope_and_write_kv(heads, num, norms, eps, cos.roll(1, 0), sin.roll(1, 0), *rest)
        saved = [cache.clone() for cache in rest[:2]]
        q = ops.rope_and_write_kv(heads, num, norms, eps, cos, sin, *rest)
        for there, other in zip(rest, saved, strict=False):
            there.copy_(other)
        return q

    return {"rope_and_write_kv": rope} if rank else {}


def skewed_head(rank: int, ops: Ops) -> Mapping[str, Any]:
    """The logits of a rank are too great."""

    def pack(weight: Tensor) -> Callable[[Tensor], Tensor]:
        product = ops.pack_head(weight)
        return lambda x: product(x) * 1.5

    return {"pack_head": pack} if rank else {}


def second_best(rank: int, ops: Ops) -> Mapping[str, Any]:
    """In company the likeliest token is passed over."""

    def keys(logits: Tensor, *args: Any) -> Tensor:
        if len(logits) > 1:
            logits = logits.scatter(1, logits.argmax(1, keepdim=True), -1e9)
        return ops.argmax_keys(logits, *args)

    return {"argmax_keys": keys}


def low_ids(rank: int, ops: Ops) -> Mapping[str, Any]:
    """A rank does not offer the upper half of its ids."""

    def keys(logits: Tensor, first: int, num_ids: int) -> Tensor:
        return ops.argmax_keys(logits[:, : logits.shape[1] // 2].contiguous(), first, num_ids)

    return {"argmax_keys": keys} if rank else {}


def other_noise(rank: int, ops: Ops) -> Mapping[str, Any]:
    """In company the noise is dealt to other ids."""

    def keys(logits: Tensor, *args: Any) -> Tensor:
        if len(logits) > 1:
            logits = logits.flip(-1)
        return ops.noisy_argmax_keys(logits, *args)

    return {"noisy_argmax_keys": keys}


def takes_first(rank: int, ops: Ops) -> Mapping[str, Any]:
    """In company everybody gets the token of the first."""

    def settle(keys: Tensor, *args: Any) -> Any:
        return ops.settle_drafts(keys[:1].expand(len(keys)), *args)

    return {"settle_drafts": settle}


def no_sum(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Partial sums of wide inputs are taken for the whole."""

    def reduce(partial: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        return partial if bias is None else partial + bias

    return {"reduce_rows": reduce}


def forgets(rank: int, ops: Ops) -> Mapping[str, Any]:
    """A chunk that does not start at 0 starts from an empty state."""

    def plan(starts: Any, counts: Any, num_prompts: Any, *args: Any, **rest: Any) -> Any:
        if counts[0] > 1:
            num_prompts = [n - start for n, start in zip(num_prompts, starts, strict=True)]
            starts = [0] * len(starts)
        return ops.plan_delta(starts, counts, num_prompts, *args, **rest)

    return {"plan_delta": plan}


def checked(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Attention that is off where drafts are checked."""

    def attention(q: Tensor, *args: Any) -> Tensor:
        out = ops.paged_attention(q, *args)
        return out * (1 + 1e-6) if 2 <= len(q) <= 4 else out

    return {"paged_attention": attention}


def hides_its_best(rank: int, ops: Ops) -> Mapping[str, Any]:
    """Rank 1 never offers the best of its ids, drawn or not."""

    def without_best(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keys(logits: Tensor, *args: Any) -> Tensor:
            best = logits.argmax(-1, keepdim=True)
            return choose(logits.scatter(1, best, float("-inf")), *args)

        return keys

    names = ("argmax_keys", "noisy_argmax_keys")
    return {name: without_best(getattr(ops, name)) for name in names} if rank == 1 else {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_choice_that_only_two_ranks_get_wrong_is_no_near_tie(
    checkpoint: Callable[[str], Path], dtype: str
) -> None:
    """Their logits are as near to one rank's as they should be."""
    path = checkpoint("llama")
    pair = [replace(PLAIN, tp=tp, dtype=dtype) for tp in (1, 2)]
    drawn = [replace(each, seeded=True) for each in pair]
    whole = task(path, [pair[0], drawn[0], pair[1], drawn[1]], num_prompts=8)
    verdicts = {each.setting: each for each in judged(whole, opener(path, hides_its_best))}
    assert all(verdicts[each].ok for each in (pair[0], drawn[0]))
    for setting in (pair[1], drawn[1]):
        found = verdicts[setting]
        assert not found.ok
        assert "would be a near tie" in found.note, found.note
        assert found.closeness is not None
        assert found.closeness.relative_rms <= (found.bound or 0)


@pytest.mark.parametrize(("model", "tp"), [("llama", 2), ("qwen3-next+mtp", 1)])
def test_an_interrupted_answer_is_the_same(
    checkpoint: Callable[[str], Path], model: str, tp: int
) -> None:
    """Alone with it, and with all that may go on meanwhile."""
    plain = replace(PLAIN, tp=tp, batch=4)
    settings = [
        replace(PLAIN, tp=tp),
        replace(plain, sleep=True),
        replace(plain, reload=True),
        replace(plain, sleep=True, reload=True, chunk=64, prefix_cache=True),
    ]
    if "mtp" in model:
        settings.append(replace(plain, sleep=True, reload=True, speculate="3"))
    path = checkpoint(model)
    verdicts = judged(task(path, settings, max_tokens=8), opener(path))
    assert all(verdict.ok for verdict in verdicts), table_text(verdicts)


@pytest.mark.parametrize("model", ["llama", "qwen3-next"])
@pytest.mark.parametrize("axis", ["reload", "sleep"])
def test_other_weights_than_before_are_found(
    checkpoint: Callable[[str], Path], tmp_path: Path, model: str, axis: str
) -> None:
    """Somebody has put another checkpoint where the weights were: each logit after that differs."""
    path = checkpoint(model)
    write_checkpoint(model, tmp_path, 1)
    setting = replace(PLAIN, batch=4, **{axis: True})
    whole = task(path, [PLAIN, setting], max_tokens=8)

    @contextmanager
    def open_engine(*args: Any) -> Iterator[Any]:
        with opener(path, reloaded=tmp_path)(*args) as engine:
            if axis == "sleep":  # which takes the weights again, too
                engine._engine.wake = lambda wake=engine._engine.wake: (
                    wake(),
                    engine._engine.reload(tmp_path),
                )
            yield engine

    plain, bad = judged(whole, open_engine)
    assert plain.ok
    assert not bad.ok, table_text([plain, bad])
    assert all(each.first is not None and each.first.token > 0 for each in bad.requests)
    finding = bisect(whole, bad, open_engine)
    assert re.match(
        r"first difference: embed \w+, position 0, rank 0: other bits; with its reference the "
        r"difference stays: look at what the op is given$",
        finding.text,
    ), finding.text


def test_an_interruption_that_comes_too_late_counts_as_not_reached(
    checkpoint: Callable[[str], Path],
) -> None:
    settings = [PLAIN, replace(PLAIN, batch=4, sleep=True), replace(PLAIN, batch=4, reload=True)]
    verdicts = judged(
        task(checkpoint("llama"), settings, max_tokens=1), opener(checkpoint("llama"))
    )
    assert [verdict.note for verdict in verdicts] == [
        "",
        "not reached: nobody was answered when the engine slept",
        "not reached: nobody was answered when weights were loaded",
    ]


BATCH = replace(PLAIN, batch=4)
DRAFTS = replace(PLAIN, speculate="3")
CHUNK = replace(PLAIN, chunk=64)
CACHE = replace(PLAIN, prefix_cache=True)
PAIR = replace(PLAIN, tp=2)
FAULTS = [
    pytest.param("llama", company, BATCH, r"layers\.0\.attention paged_attention", True),
    pytest.param("llama", split_k, BATCH, r"layers\.0\.attention\.qkv linear", True),
    pytest.param("llama", off_by_one, CHUNK, r"layers\.0\.attention rope_and_write_kv", True),
    pytest.param("llama", mixed_blocks, CACHE, r"layers\.0\.attention kv_cache", None),
    pytest.param(
        "llama", noise, replace(PAIR, batch=4), r"layers\.0\.mlp silu_and_mul.* rank 1", True
    ),
    pytest.param(
        "llama-bias-llama3", bias_first, PAIR, r"layers\.0\.attention\.out reduce_rows", True
    ),
    pytest.param("llama", no_sum, PAIR, r"embed reduce_rows", True),
    pytest.param(
        "qwen3-next+mtp", checked, DRAFTS, r"layers\.\d+\.attention paged_attention", True
    ),
    pytest.param("llama", louder, PAIR, r"layers\.0\.mlp silu_and_mul.* rank 1 of 2", True),
    pytest.param(
        "llama", louder_attention, PAIR, r"layers\.0\.attention paged_attention.* rank 1 of 2", True
    ),
    pytest.param(
        "llama", turned, PAIR, r"layers\.0\.attention rope_and_write_kv.* rank 1 of 2", True
    ),
    pytest.param(
        "qwen3-next", louder_delta, PAIR, r"layers\.0\.delta_net delta_rule.* rank 1 of 2", True
    ),
    pytest.param(  # no row is off by as much as one may be, but the answer is
        "llama",
        louder_attention,
        replace(PAIR, dtype="bfloat16"),
        r"layers\.\d\.attention paged_attention.* rank 1 of 2",
        True,
    ),
    pytest.param("llama", skewed_head, PAIR, r"head linear.* rank 1 of 2", True),
    pytest.param("llama", low_ids, PAIR, r"sampler argmax_keys.* rank 1 of 2", True),
    pytest.param("llama", second_best, BATCH, r"sampler argmax_keys, position \d+, rank 0", True),
    pytest.param(
        "llama", other_noise, replace(BATCH, seeded=True), r"sampler noisy_argmax_keys", True
    ),
    pytest.param("llama", takes_first, BATCH, r"sampler settle_drafts", True),
    pytest.param(
        "qwen3-next", forgets, CHUNK, r"layers\.0\.delta_net short_conv, position 64", False
    ),
]


@pytest.mark.parametrize(("model", "fault", "setting", "name", "is_gone"), FAULTS)
def test_a_planted_fault_is_found_and_named(
    checkpoint: Callable[[str], Path],
    model: str,
    fault: Fault,
    setting: Setting,
    name: str,
    is_gone: bool | None,
) -> None:
    path = checkpoint(model)
    base = replace(PLAIN, dtype=setting.dtype)
    settings = list(dict.fromkeys([base, setting.plain, setting]))
    if setting.tp > 1 and setting != setting.plain:
        settings.remove(base)
    whole = task(path, settings)
    open_engine = opener(path, fault)
    verdicts = judged(whole, open_engine)
    bad = next(verdict for verdict in verdicts if verdict.setting == setting)
    assert not bad.ok, table_text(verdicts)
    assert bad.first is not None or bad.bound is not None
    finding = bisect(whole, bad, open_engine)
    assert re.match(f"first difference: {name}", finding.text), finding.text
    assert finding.is_gone is is_gone, finding.text
