"""The engine on a GPU: against the CPU as its oracle, and against itself in other company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.closeness import assert_close, assert_same_bits
from tests.rig import LocalEngine
from tests.tiny import CONFIGS, random_ids, write_checkpoint
from unisono.runtime.protocol import SamplingParams

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
FP32 = 1e-5
"""Relative rms of fp32 logits against the CPU: the same sums in another order."""
BF16 = 0.06
"""Of bf16 logits against the CPU in fp32: 2^-8 a rounding, some tens of roundings deep, which is
what bf16 costs on the CPU as well (tests/models/test_oracle.py)."""
RANKS = 5e-6
IN_COMPANY = ("llama-bias-llama3", "qwen2-sliding", "qwen3", "qwen3-bias-untied-1003")
"""Biases, a window, norms of heads, odd head sizes: the settings of these differ in all kernels."""


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


def ids_for(path: Path, length: int, seed: int = 0) -> list[int]:
    vocabulary = LocalEngine(path, max_model_len=16).config.vocab_size
    return random_ids(length, vocabulary, seed=seed)


def test_logits_equal_the_cpus(model: Path) -> None:
    ids = ids_for(model, 100)
    oracle = LocalEngine(model, max_model_len=100).prompt_logits(ids)
    alone = LocalEngine(model, max_model_len=100, device=GPU).prompt_logits(ids)
    assert_close("fp32 logits", alone, oracle, FP32)
    for tp in (2, 3):
        ranks = LocalEngine(model, tp=tp, max_model_len=100, device=GPU).prompt_logits(ids)
        assert_close(f"logits on {tp} ranks", ranks, alone, RANKS)
    narrow = LocalEngine(model, max_model_len=100, dtype="bfloat16", device=GPU)
    assert_close("bf16 logits", narrow.prompt_logits(ids), oracle, BF16)


def test_greedy_tokens_in_fp32_equal_the_cpus(model: Path) -> None:
    prompts = [ids_for(model, length, seed=length) for length in (1, 7, 40, 66)]
    want = LocalEngine(model).generate(prompts, max_tokens=24)
    got = LocalEngine(model, device=GPU).generate(prompts, max_tokens=24)
    assert [a.token_ids for a in got] == [a.token_ids for a in want]


@pytest.mark.parametrize("model", IN_COMPANY, indirect=True)
@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("bfloat16", 2), ("float32", 1)])
def test_company_chunks_hits_and_preemption_change_no_bit(model: Path, dtype: str, tp: int) -> None:
    lengths = (1, 5, 17, 63, 64, 65, 80, 90)
    prompts = [ids_for(model, length, seed=length) for length in lengths]
    prompts += [prompts[-1][:70], prompts[-1]]
    alone = LocalEngine(model, tp=tp, dtype=dtype, device=GPU, prefix_cache=False)
    want = [alone.generate([prompt], max_tokens=12)[0] for prompt in prompts]
    crowded = LocalEngine(model, tp=tp, dtype=dtype, device=GPU, max_step_tokens=64)
    tight = LocalEngine(model, tp=tp, dtype=dtype, device=GPU, num_blocks=5, max_requests=6)
    for engine in (crowded, tight):
        arrivals = [index // 2 for index in range(len(prompts))]
        got = engine.generate(prompts, max_tokens=12, arrivals=arrivals)
        for index, (one, other) in enumerate(zip(want, got, strict=True)):
            assert other.token_ids == one.token_ids, f"prompt {index}"
            assert_same_bits(
                f"logits of prompt {index}", torch.stack(other.logits), torch.stack(one.logits)
            )
    assert tight.num_preemptions > 0


@pytest.mark.parametrize("model", ["llama-bias-llama3", "qwen3"], indirect=True)
@pytest.mark.parametrize("attn", ["reference", "torch-flash"])
def test_every_attention_gives_the_logits_of_triton(model: Path, attn: str) -> None:
    ids = ids_for(model, 100)
    triton, other = (
        LocalEngine(model, dtype="bfloat16", device=GPU, attn=name) for name in ("triton", attn)
    )
    want = triton.prompt_logits(ids)
    assert_close(attn, other.prompt_logits(ids), want, BF16)
    # Decoded and in chunks too: that it ends is what can be said of tokens.
    answers = other.generate([ids[:70], ids[:5]], max_tokens=8)
    assert [len(answer.token_ids) for answer in answers] == [8, 8]


@pytest.mark.parametrize("model", ["qwen2-sliding", "qwen3"], indirect=True)
def test_attention_by_the_formula_has_one_answer(model: Path) -> None:
    prompts = [ids_for(model, length, seed=length) for length in (1, 64, 65, 90)]
    alone = LocalEngine(model, dtype="bfloat16", device=GPU, attn="reference", prefix_cache=False)
    want = [alone.generate([prompt], max_tokens=8)[0] for prompt in prompts]
    crowded = LocalEngine(
        model, dtype="bfloat16", device=GPU, attn="reference", max_step_tokens=64, num_blocks=5
    )
    got = crowded.generate(prompts, max_tokens=8, arrivals=[0, 1, 1, 3])
    for one, other in zip(want, got, strict=True):
        assert other.token_ids == one.token_ids
        assert_same_bits("logits", torch.stack(other.logits), torch.stack(one.logits))


def test_seeded_answers_are_the_same_alone_and_in_company(model: Path) -> None:
    params = [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=2),
        SamplingParams(temperature=0.7, min_p=0.1, repetition_penalty=1.3, seed=3),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, logit_bias=((5, 2.0),)),
    ]
    prompts = [ids_for(model, length, seed=length) for length in (3, 20, 64, 77)]
    engine = LocalEngine(model, dtype="bfloat16", device=GPU, prefix_cache=False)
    together = engine.generate(prompts, max_tokens=16, params=params)
    for prompt, param, answer in zip(prompts, params, together, strict=True):
        alone = engine.generate([prompt], max_tokens=16, params=[param])[0]
        assert alone.token_ids == answer.token_ids
