"""Every op has a case, every case runs, and torch's way beside it computes the same."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from unisono.models.bench_cases import cases_of
from unisono.models.bench_inputs import GPU_SIZES, Inputs, Sizes
from unisono.models.config import DeltaConfig, ExpertsConfig, ModelConfig
from unisono.models.shapes import SHAPES
from unisono.ops import dispatch, timing
from unisono.ops.timing import flops_per_s, read_bytes_per_s, seconds_per_call
from unisono.workers.timings import TIMED_OPS

CPU = torch.device("cpu")
TINY = Sizes(
    linear_rows=(1, 3),
    head_rows=(2,),
    tokens=(1, 5),
    logit_rows=(2,),
    decode=((130, 2),),
    verify=((5, 70, 2),),
    prefill=(70,),
    cold_bytes=1 << 16,
)
CONFIG = replace(SHAPES["smollm2-135m"], vocab_size=1003, hidden_size=72, intermediate_size=136)
TIMED_UNDER_OTHER_NAMES = {
    "pack_linear": "linear",
    "pack_head": "head",
    "reduce_rows": "ordered_sum",
    "pack_experts": "experts",
    "chance": "judge_drafts",
}
HYBRID = replace(
    SHAPES["qwen3.5-35b-a3b"],
    vocab_size=1003,
    hidden_size=72,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    delta=DeltaConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12, conv_width=4
    ),
    experts=ExpertsConfig(num_experts=8, num_experts_per_tok=3, width=20),
)
CONFIGS = (CONFIG, HYBRID)


def test_every_op_of_the_table_has_a_case() -> None:
    """A new field of Ops wants a case in models/bench_cases.py."""
    ops = [field.name for field in fields(dispatch.Ops) if field.name != "fuses_sums"]
    names = {TIMED_UNDER_OTHER_NAMES.get(name, name) for name in ops}
    timed = {case.op for config in CONFIGS for case in cases_of(config, TINY, torch.float32)}
    assert names <= timed
    assert timed == set(TIMED_OPS)


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_every_case_runs_and_torch_computes_the_same(config: ModelConfig) -> None:
    inputs = Inputs([config], TINY, CPU, torch.float32)
    ops = dispatch.resolve(CPU, config.head_dim)
    compared = 0
    others = ("paged_attention", "argmax_keys", "token_logprobs", "route_experts")
    for case in cases_of(config, TINY, torch.float32):
        calls = case.ours(inputs, ops)
        if case.op in ("linear", "head", "paged_attention", "rms_norm"):
            assert inputs.are_cold(calls, case.num_bytes) == (case.op != "rms_norm"), case.label
        got = calls[0]()
        if case.torch is None or case.op in others:
            continue
        want = next(call() for call in case.torch(inputs))
        got = got[0] if isinstance(got, tuple) else got
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=case.label)
        compared += 1
    assert compared > 20


def test_floors_are_those_of_the_sizes() -> None:
    """Written out once by hand: what the figures are judged by."""
    cases = {
        (case.op, case.label): case
        for case in cases_of(SHAPES["qwen3-8b"], GPU_SIZES, torch.bfloat16)
    }
    linear = cases["linear", "gate_up 24576x4096, 32"]
    assert linear.num_bytes == 2 * (24576 * 4096 + 32 * 4096 + 32 * 24576)
    assert linear.num_flops == 2 * 32 * 4096 * 24576
    assert ("linear", "gate_up/2 12288x4096, 63") in cases
    decode = cases["paged_attention", "decode 8192 x 32"]
    assert decode.num_bytes == 2 * 2 * 32 * 8192 * 8 * 128 + 2 * 2 * 32 * 32 * 128
    prefill = cases["paged_attention", "prefill 4096"]
    assert prefill.num_flops == 4 * 32 * 128 * (4096 * 4097 // 2)
    assert cases["argmax_keys", "64 x 151936"].num_bytes == 64 * 151936 * 4


def test_floors_of_a_hybrid_model() -> None:
    cases = {
        (case.op, case.label): case
        for case in cases_of(SHAPES["qwen3-next-80b-a3b"], GPU_SIZES, torch.bfloat16)
    }
    rule = cases["delta_rule", "decode 32 of 32 x 128 x 128"]
    assert rule.num_bytes == 32 * (2 * 32 * 128 * 128 * 4 + 2 * (8192 + 32 * 128 + 2 * 32))
    experts = cases["experts", "1 x 10 of 512, 512x2048"]
    assert experts.num_bytes == 10 * 3 * 512 * 2048 * 2 + 3 * 2048 * 2 + 12 * 10
    assert experts.num_flops == 2 * 10 * 3 * 512 * 2048
    assert ("linear", "delta_in 12352x2048, 1") in cases


def test_cold_inputs_exceed_the_cache() -> None:
    inputs = Inputs([CONFIG], TINY, CPU, torch.float32)
    copies = inputs.copies(16, 72)
    assert len(copies) * copies[0].nbytes >= TINY.cold_bytes
    assert len({copy.data_ptr() for copy in copies}) == len(copies)


def test_times_are_of_one_call() -> None:
    made = []
    assert 0 < seconds_per_call([lambda: made.append(1)], CPU) < 1e-2
    assert len(made) > 5
    assert read_bytes_per_s(torch.ones(1 << 18)) > 1e7


def test_a_machine_can_what_it_did_at_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ops outrun their floors, whose weights are packed and lie in a cache."""
    times = iter([[3.0, 2.0], [5.0, 4.0], [9.0, 8.0], [6.0, 7.0]])
    monkeypatch.setattr(timing, "_host_times", lambda calls, seconds: next(times))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr(timing, "packed_product", lambda weight: abs)
    assert flops_per_s((4, 8), torch.float32, CPU) == 2 * 8**3 / 6.0
