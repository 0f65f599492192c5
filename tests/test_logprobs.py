"""Log-probabilities of whole engines: the oracle's numbers, and the same bits in every setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rig import Answer, LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.runtime.protocol import SamplingParams
from unisono.workers.logprobs import PIECE_ROWS
from unisono.workers.protocol import logprob_width

TOP = 5
ASKED = SamplingParams(logprobs=TOP, prompt_logprobs=TOP)


@pytest.fixture(scope="module", params=["llama-untied-1003", "qwen3"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_checkpoint(request.param, directory)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint("qwen2-sliding", directory)
    return directory


def records(items: Sequence[int], num_top: int = TOP) -> Tensor:
    return torch.tensor(items, dtype=torch.int32).view(-1, logprob_width(num_top))


def of_tokens(answer: Answer, num_top: int = TOP) -> Tensor:
    assert len(answer.logprobs) == len(answer.token_ids), "each token has its own (B72)"
    return records([item for row in answer.logprobs for item in row or ()], num_top)


def reals(column: Tensor) -> Tensor:
    return column.contiguous().view(torch.float32).double()


def assert_is_oracle(rows: Tensor, logits: Tensor, token_ids: Sequence[int]) -> None:
    """Log-probabilities within 1e-4 of log_softmax(logits); ids equal where gaps allow."""
    want = logits.double().log_softmax(-1)
    own = want[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    assert float((reals(rows[:, 0]) - own).abs().max()) < 1e-4
    top = want.topk(TOP + 1, dim=-1)
    assert float((reals(rows[:, 3::2]) - top.values[:, :TOP]).abs().max()) < 1e-4
    is_clear = ((top.values[:, :-1] - top.values[:, 1:]) > 1e-4).all(-1)
    assert float(is_clear.double().mean()) > 0.8
    assert torch.equal(rows[is_clear][:, 2::2].long(), top.indices[is_clear][:, :TOP])
    near = (want - own[:, None]).abs() < 1e-4
    ranks = (want > own[:, None]).sum(-1) + 1
    assert torch.equal(rows[near.sum(-1) == 1][:, 1].long(), ranks[near.sum(-1) == 1])


@pytest.mark.parametrize("tp", [1, 2])
def test_they_are_those_of_transformers(model: tuple[Path, Any], tp: int) -> None:
    path, oracle = model
    prompt = random_ids(90, oracle.config.vocab_size, seed=tp)
    engine = LocalEngine(path, tp=tp)
    [answer] = engine.generate([prompt], max_tokens=16, params=[ASKED])
    with torch.no_grad():
        whole = oracle(torch.tensor([prompt + answer.token_ids])).logits[0]
    assert_is_oracle(records(answer.prompt_logprobs), whole[: len(prompt) - 1], prompt[1:])
    rows = of_tokens(answer)
    assert_is_oracle(rows, whole[len(prompt) - 1 : -1], answer.token_ids)
    # Greedy: each token is the likeliest.
    assert rows[:, 1].tolist() == [1] * 16
    assert rows[:, 2].tolist() == answer.token_ids
    assert torch.equal(rows[:, 0], rows[:, 3])


def test_filters_and_penalties_leave_the_models_own(model: tuple[Path, Any]) -> None:
    """Drawn far from the likeliest, or pushed there, a token has the model's log-probability."""
    path, oracle = model
    vocabulary = oracle.config.vocab_size
    prompts = [random_ids(20, vocabulary, seed=seed) for seed in range(4)]
    params = [
        SamplingParams(temperature=5.0, seed=1, logprobs=TOP),
        SamplingParams(temperature=2.0, seed=2, top_k=40, top_p=0.9, min_p=0.001, logprobs=TOP),
        SamplingParams(repetition_penalty=1.8, frequency_penalty=1.0, logprobs=TOP),
        SamplingParams(logit_bias=((7, 100.0),), min_tokens=2, logprobs=TOP),
    ]
    engine = LocalEngine(path, tp=2)
    answers = engine.generate(prompts, max_tokens=12, params=params)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.prompt_logprobs == []
        with torch.no_grad():
            whole = oracle(torch.tensor([prompt + answer.token_ids])).logits[0]
        assert_is_oracle(of_tokens(answer), whole[len(prompt) - 1 : -1], answer.token_ids)
    assert max(of_tokens(answers[0])[:, 1].tolist()) > 1
    assert answers[3].token_ids == [7] * 12


def same(name: str, answer: Answer, alone: Answer) -> None:
    assert answer.token_ids == alone.token_ids, name
    assert answer.logprobs == alone.logprobs, name
    assert answer.prompt_logprobs == alone.prompt_logprobs, name


def test_bits_alone_in_company_chunked_and_after_pre_emption(path: Path) -> None:
    """Prompts longer than a piece, on KV that others left, cut at 64, computed twice: same bits.

    What was delivered before a pre-emption is not delivered again, and nothing is missing.
    """
    stem = random_ids(160, seed=1)
    prompts = [stem[:120], stem, stem[:70] + random_ids(50, seed=2), stem[:130], stem[:1]]
    params = [
        ASKED,
        SamplingParams(prompt_logprobs=0, logprobs=20, temperature=1.0, seed=3),
        SamplingParams(logprobs=0, top_k=20, temperature=1.5, seed=4),
        SamplingParams(prompt_logprobs=3),
        ASKED,
    ]
    assert max(map(len, prompts)) > 2 * PIECE_ROWS
    plain = LocalEngine(path, tp=2, max_model_len=200, prefix_cache=False)
    solo = [
        plain.generate([prompt], max_tokens=30, params=[recipe])[0]
        for prompt, recipe in zip(prompts, params, strict=True)
    ]
    for prompt, recipe, answer in zip(prompts, params, solo, strict=True):
        wanted = 0 if recipe.prompt_logprobs is None else len(prompt) - 1
        width = logprob_width(recipe.prompt_logprobs or 0)
        assert len(answer.prompt_logprobs) == wanted * width
        assert (answer.logprobs[0] is None) == (recipe.logprobs is None)
    settings: dict[str, dict[str, Any]] = {
        "in company": {},
        "chunked": {"max_step_tokens": 64},
        "pre-empted": {"num_blocks": 5, "max_step_tokens": 100},
    }
    for name, setting in settings.items():
        engine = LocalEngine(path, tp=2, max_model_len=200, **setting)
        answers = engine.generate(prompts, max_tokens=30, params=params, arrivals=[0, 0, 3, 5, 9])
        assert (engine.num_preemptions > 0) == (name == "pre-empted")
        for answer, alone in zip(answers, solo, strict=True):
            same(name, answer, alone)
        # Whoever wants its prompt's computes all of it; the others still find what it left.
        assert engine.num_cached_tokens[0] == engine.num_cached_tokens[3] == 0
        if name == "in company":
            assert engine.num_cached_tokens[2] == 64


def test_a_step_gives_nothing_that_nobody_asked_for(path: Path) -> None:
    engine = LocalEngine(path)
    [answer] = engine.generate([random_ids(10)], max_tokens=3)
    assert (answer.logprobs, answer.prompt_logprobs) == ([None] * 3, [])


def test_a_step_holds_few_rows_of_logits(path: Path) -> None:
    """A long prompt's logits exist 64 rows at a time only."""
    engine = LocalEngine(path, max_model_len=200)
    [rank] = engine.ranks
    logits_of, heights = rank.model.logits, []

    def noted(hidden: Tensor) -> Tensor:
        heights.append(len(hidden))
        return logits_of(hidden)

    rank.model.logits = noted
    engine.generate([random_ids(190)], max_tokens=2, params=[ASKED])
    assert max(heights) == PIECE_ROWS
    assert sum(heights) == 189 + 2, "the prompt's, and a row for each token"
