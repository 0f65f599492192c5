"""Random weights: pinned bits, any part equal to the slice of the whole, ranks that agree."""

from __future__ import annotations

from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close, assert_same_bits
from tests.rig import LocalEngine
from tests.tiny import random_ids
from unisono.models import random_weights
from unisono.models.config import ModelConfig, RopeConfig
from unisono.models.ledger import fill_weights
from unisono.models.partition import ModelPartition
from unisono.models.random_weights import RandomWeights, fill_random
from unisono.models.shapes import SHAPES
from unisono.models.tensor_info import CheckpointError
from unisono.models.weight_specs import WeightSpec

RANKS = 5e-6
"""Relative rms between rank counts, as for checkpoints: only row-parallel sums are split."""
NAMES = ("x.o_proj.weight", "x.q_proj.weight", "x.q_proj.bias", "x.input_layernorm.weight")
HYBRID_NAMES = ("x.A_log", "x.dt_bias", "x.conv1d.weight", "x.mlp.gate.weight")
VECTORS = ("bias", "norm.weight", "A_log")


def tiny(**changes: object) -> ModelConfig:
    fields = {
        "family": "qwen3",
        "vocab_size": 199,
        "hidden_size": 72,
        "intermediate_size": 136,
        "num_layers": 3,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope": RopeConfig(rotary_dim=16),
        "qk_norm": True,
    }
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]


def filled(spec: WeightSpec, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = torch.full(spec.local_shape, torch.nan, dtype=dtype)
    fill_random(spec, target)
    return target


def number(name: str, index: int) -> int:
    """The definition once more, in plain integers."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))
    x = (index % 2**32) ^ first
    x = ((x ^ (x >> 16)) * 0x21F0AAAD + second) % 2**32
    x = ((x ^ (x >> 15)) * 0xD35A2D97) % 2**32
    x ^= x >> 15
    high = (x >> 16) - (2**16 if x >> 31 else 0)
    return high + (x & 0xFFFF) - 32767


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_definition(name: str) -> None:
    norm, bias = name.endswith("norm.weight"), name.endswith("bias")
    spec = WeightSpec(name, (50,) if norm or bias else (5, 10))
    numbers = torch.tensor([number(name, index) for index in range(50)], dtype=torch.float64)
    want = numbers * 2.0**-18 + norm
    if not norm and not bias:
        want = numbers / 26754.9 / 10**0.5 * (2 if "q_proj" in name else 1)
    assert_close(name, filled(spec).flatten(), want.float(), 1e-7)


def test_values_of_delta_nets_are_those_of_the_definition() -> None:
    """A_log and dt_bias without any rounding: they are held in fp32 and steer what is forgotten."""

    def numbers(name: str, count: int) -> torch.Tensor:
        return torch.tensor([number(name, index) for index in range(count)], dtype=torch.float64)

    decay = filled(WeightSpec("x.A_log", (50,))).double()
    assert torch.equal(decay, (numbers("x.A_log", 50) + 65536) * 11 / 2**19)
    step = filled(WeightSpec("x.dt_bias", (50,))).double()
    assert torch.equal(step, numbers("x.dt_bias", 50) / 2**15 - 4.5)
    want = (numbers("x.conv1d.weight", 24) / 26754.9 / 4**0.5).view(6, 1, 4).float()
    assert_close("conv", filled(WeightSpec("x.conv1d.weight", (6, 1, 4))), want, 1e-7)
    want = (numbers("x.mlp.gate.weight", 30) / 26754.9 * 2 / 10**0.5).view(3, 10).float()
    assert_close("router", filled(WeightSpec("x.mlp.gate.weight", (3, 10))), want, 1e-7)


@pytest.mark.parametrize(
    "name", [f"x.{norm}.weight" for norm in ("norm", "q_norm", "k_norm", "pre_fc_norm_hidden")]
)
def test_a_zero_centred_norm_multiplies_by_the_same(name: str) -> None:
    plain = filled(WeightSpec(name, (500,)))
    centred = filled(WeightSpec(name, (500,), keeps_fp32=True, zero_centred=True))
    assert torch.equal(1 + centred, plain)
    assert abs(float(centred.mean()) - name.endswith(("q_norm.weight", "k_norm.weight"))) < 0.02


def test_decay_of_states() -> None:
    """Per token and head exp(-exp(A_log) softplus(a + dt_bias)), a of deviation 1."""
    generator = torch.Generator().manual_seed(0)
    rate = filled(WeightSpec("x.A_log", (4096,))).exp()
    assert 1.0 <= float(rate.min()) < 1.2
    assert 13.0 < float(rate.max()) <= 16.0
    step = filled(WeightSpec("x.dt_bias", (4096,))) + torch.randn(4096, generator=generator)
    kept = (-rate * torch.nn.functional.softplus(step)).exp()
    tokens = 1 / (1 - kept.double())
    assert 5 < float(tokens.median()) < 100
    assert float((tokens > 200).float().mean()) > 0.02
    assert float((tokens < 2).float().mean()) < 0.05


def test_bits_are_pinned() -> None:
    """Answers of a shape are compared across machines and versions: these never change."""
    assert filled(WeightSpec("model.norm.weight", (4,))).tolist() == [
        1.0 + number("model.norm.weight", index) * 2.0**-18 for index in range(4)
    ]
    everything = filled(WeightSpec("model.layers.0.mlp.down_proj.weight", (64, 96)))
    digest = blake2b(everything.numpy().tobytes(), digest_size=8).hexdigest()
    assert digest == "ba06dcc8c61b0474"


@given(st.data())
def test_several_ranges_are_as_many_slices(data: st.DataObject) -> None:
    name, shape = "x.in_proj_qkv.weight", (40, 7)
    bounds = sorted(data.draw(st.sets(st.integers(0, 40), min_size=4, max_size=6)))
    ranges = list(zip(bounds[::2], bounds[1::2], strict=False))
    spec = WeightSpec(name, shape, 0, *ranges[0], tuple(ranges[1:]))
    whole = filled(WeightSpec(name, shape))
    want = torch.cat([whole[start:stop] for start, stop in ranges])
    assert_same_bits(name, filled(spec), want)


@given(st.data())
def test_any_part_is_a_slice_of_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES + HYBRID_NAMES))
    shape = (
        (data.draw(st.integers(1, 300)),)
        if name.endswith(VECTORS)
        else (data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60)))
    )
    if "conv1d" in name:
        shape = (shape[0], 1, 4)
    dim = data.draw(st.integers(0, 0 if "conv1d" in name else len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, shape[dim]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    chunk = data.draw(st.integers(1, 500))
    want = filled(WeightSpec(name, shape)).to(dtype).narrow(dim, start, stop - start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_weights, "_CHUNK", {"cpu": chunk})
        part = filled(WeightSpec(name, shape, dim, start, stop), dtype)
    assert_same_bits(name, part, want.contiguous())


@pytest.mark.parametrize("border", [2**31, 2**32])
def test_large_offsets_wrap_as_defined(border: int) -> None:
    first = border // 1000 - 1
    spec = WeightSpec("big.o_proj.weight", (5_000_000, 1000), 0, first, first + 3)
    scale = 1000**-0.5 / 26754.9
    for index in (first * 1000, border - 1, border, border + 1, (first + 3) * 1000 - 1):
        got = float(filled(spec).flatten()[index - first * 1000])
        assert got == pytest.approx(number("big.o_proj.weight", index) * scale, rel=1e-6)


def test_statistics() -> None:
    matrix = filled(WeightSpec("a.up_proj.weight", (512, 400)))
    other = filled(WeightSpec("b.up_proj.weight", (512, 400)))
    assert float(matrix.std()) == pytest.approx(0.05, rel=0.01)
    assert float(matrix.mean()) == pytest.approx(0.0, abs=5e-4)
    for pair in ((matrix, other), (matrix[:-1], matrix[1:]), (matrix[:, :-1], matrix[:, 1:])):
        together = torch.corrcoef(torch.stack([pair[0].flatten(), pair[1].flatten()]))
        assert abs(float(together[0, 1])) < 0.01
    norm = filled(WeightSpec("a.norm.weight", (4096,)))
    assert 0.75 <= float(norm.min()) < 0.8 < 1.2 < float(norm.max()) <= 1.25
    sharp = filled(WeightSpec("a.q_norm.weight", (4096,)))
    assert float(sharp.mean()) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "qkv_bias": True}], ids=str)
def test_ranks_hold_slices_of_one_model_and_agree(changes: dict[str, object]) -> None:
    config = tiny(o_bias=True, mlp_bias=True, **changes)
    ids = random_ids(60)
    alone = LocalEngine(config).prompt_logits(ids)
    whole = {spec.name: filled(spec) for spec in ModelPartition.of(config, 1).weights(0)}
    for tp in (2, 3, 8):
        for rank in range(tp):
            for spec in ModelPartition.of(config, tp).weights(rank):
                part = whole[spec.name]
                if spec.dim is not None:
                    part = part.narrow(spec.dim, spec.start, spec.stop - spec.start)
                assert_same_bits(spec.name, filled(spec), part.contiguous())
        assert_close(f"tp={tp}", LocalEngine(config, tp=tp).prompt_logits(ids), alone, RANKS)


def test_the_ledger_counts_bytes_in_the_models_dtype() -> None:
    spec, heard = WeightSpec("a.up_proj.weight", (6, 4), 0, 2, 5), []
    target = torch.empty(3, 4, dtype=torch.bfloat16)
    source = RandomWeights(torch.bfloat16)
    fill_weights([spec], {spec.name: target}, source, lambda *now: heard.append(now))
    assert heard == [(0, 24), (24, 24)]
    with pytest.raises(CheckpointError, match="1 parameters never filled: b"):
        fill_weights([spec], {spec.name: target, "b": target}, source, lambda *_: None)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_answers_of_small_models_vary(family: str, changes: dict[str, object]) -> None:
    config = tiny(family=family, qk_norm=family == "qwen3", **changes)
    prompts = [random_ids(5, seed=n) for n in range(3)]
    for answer in LocalEngine(config).generate(prompts, max_tokens=32):
        assert len({*answer.token_ids}) >= 10, answer.token_ids
        assert _least_margin(torch.stack(answer.logits)) > 0


def test_greedy_answers_of_a_deep_model_vary() -> None:
    """Thirty layers and a tied head: neither one repeated token nor the prompt's last one."""
    engine = LocalEngine(SHAPES["smollm2-135m"])
    prompts = [random_ids(6, 49152, seed=n) for n in range(2)]
    for prompt, answer in zip(prompts, engine.generate(prompts, max_tokens=12), strict=True):
        assert answer.token_ids[0] != prompt[-1]
        assert len({*answer.token_ids}) >= 9, answer.token_ids
        assert _least_margin(torch.stack(answer.logits)) > 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES + HYBRID_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_makes_the_same_bits(name: str, dtype: torch.dtype) -> None:
    shape = (3001,) if name.endswith(VECTORS) else (700, 3001)
    spec = WeightSpec(name, shape, len(shape) - 1, 100, 2900)
    if "conv1d" in name:
        spec = WeightSpec(name, (3001, 1, 4), 0, 100, 2900)
    target = torch.empty(spec.local_shape, dtype=dtype, device="cuda")
    fill_random(spec, target)
    assert_same_bits(name, target.cpu(), filled(spec, dtype))


def _least_margin(logits: torch.Tensor) -> float:
    """Smallest distance of the two greatest logits of a row."""
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return float((first - second).min())
