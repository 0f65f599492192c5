"""`LLM` on one GPU, through real processes: the CPU's tokens, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import BASE, LLAMA, random_ids, write_checkpoint
from unisono import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]

LENGTHS = (1, 7, 40, 64, 66, 90)
PROMPTS = [random_ids(length, seed=length) for length in LENGTHS]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
ASKED = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2)
FAR = 33_000


def ids_only(model: Any, directory: Path) -> str:
    """Keep the config alone: random weights need no file, and without one there is no text."""
    model.config.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    return ids_only(write_checkpoint("qwen3", tmp_path_factory.mktemp("whole")), directory)


@pytest.fixture(scope="module")
def narrow(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, load_format="random", device="cuda", dtype="bfloat16") as llm:
        yield llm


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(prompts, params)]


def test_float32_tokens_equal_the_cpus(tiny: str) -> None:
    with LLM(tiny, load_format="random", device="cpu", dtype="float32") as llm:
        want = tokens(llm, PROMPTS, GREEDY)
    with LLM(tiny, load_format="random", device="cuda", dtype="float32") as llm:
        assert tokens(llm, PROMPTS, GREEDY) == want


def test_alone_and_in_company_tokens_and_logprob_bits_are_equal(narrow: LLM) -> None:
    together = narrow.generate(PROMPTS, ASKED)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        [alone] = narrow.generate([prompt], ASKED)
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == alone.logprobs
        assert answer.prompt_logprobs == alone.prompt_logprobs
        assert answer.digest == alone.digest
        assert len(answer.token_ids) == 24


def test_a_prompt_over_32768_tokens_is_the_same_chunked_and_whole(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    fields = {**BASE, **LLAMA, "max_position_embeddings": 40_000}
    config = LlamaConfig(**fields, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    prompt = random_ids(FAR, seed=1)
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=5)
    answers = []
    for max_step_tokens in (4_096, 40_000):
        with LLM(
            str(tmp_path),
            load_format="random",
            device="cuda",
            dtype="bfloat16",
            max_requests=2,
            max_step_tokens=max_step_tokens,
        ) as llm:
            answers += llm.generate([prompt], params)
    chunked, whole = answers
    assert len(chunked.token_ids) == 16
    assert chunked.token_ids == whole.token_ids
    assert chunked.logprobs == whole.logprobs
