"""Our models against transformers on tiny random checkpoints, and ranks against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.closeness import assert_close
from tests.rig import LocalEngine
from tests.tiny import CONFIGS, HYBRIDS, random_ids, write_checkpoint, write_wrapper

ORACLE = 1e-5
"""Relative rms of fp32 logits against transformers: the same sums in another order."""
RANKS = 5e-6
"""Relative rms between rank counts: only the split of row-parallel sums differs."""
LENGTH = {"llama-dynamic": 96}
"""The dynamic variant is fixed at start for the longest request: compare at that length."""


@pytest.fixture(scope="module", params=sorted(CONFIGS | HYBRIDS))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, write_checkpoint(request.param, directory)


def test_logits_equal_transformers_and_ranks_equal_each_other(
    model: tuple[str, Path, Any],
) -> None:
    name, path, oracle = model
    length = LENGTH.get(name, 100)  # past every original length of the scaled variants
    ids = random_ids(length, oracle.config.vocab_size)
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0]
    alone = LocalEngine(path, max_model_len=length).prompt_logits(ids)
    assert_close("logits", alone, want, ORACLE)
    for tp in (2, 3, 4):
        ranks = LocalEngine(path, tp=tp, max_model_len=length).prompt_logits(ids)
        assert_close(f"logits on {tp} ranks", ranks, alone, RANKS)


def test_greedy_answers_equal_transformers(model: tuple[str, Path, Any]) -> None:
    name, path, oracle = model
    length, prompts = 128, [random_ids(n, oracle.config.vocab_size, seed=n) for n in (1, 7, 40, 66)]
    # transformers changes its frequencies as a request grows past a border; ours are fixed at
    # start. So stay on one side of it.
    if name == "llama-longrope":
        prompts = [random_ids(40)]
    if name == "llama-dynamic":
        length, prompts = 16, [random_ids(4), random_ids(1)]
    engine = LocalEngine(path, tp=2, max_model_len=length)
    for prompt, answer in zip(prompts, engine.generate(prompts, max_tokens=12), strict=True):
        with torch.no_grad():
            whole = oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=12,
                min_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        assert answer.token_ids == whole[len(prompt) :]


def test_bf16_stays_near_fp32(model: tuple[str, Path, Any]) -> None:
    """bf16 keeps 8 bits: an error of 2^-8 a rounding, some tens of roundings deep.

    Where two experts are nearly as good, a rounding may choose the other one: such tokens, and
    what comes after them, say something else. So of mixtures the middle one of the errors counts.
    """
    name, path, oracle = model
    ids = random_ids(60, oracle.config.vocab_size)
    wide = LocalEngine(path, max_model_len=96).prompt_logits(ids)
    narrow = LocalEngine(path, max_model_len=96, dtype="bfloat16").prompt_logits(ids)
    if HYBRIDS.get(name, ("", {}))[1].get("num_experts"):
        errors = (narrow - wide).norm(dim=1) / wide.norm(dim=1)
        assert errors.median() < 0.06
    else:
        assert_close("bf16 logits", narrow, wide, 0.06)
    assert not torch.equal(narrow, wide)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_the_state_after_every_step_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """After a prompt that ends inside a chunk, and after each token behind it."""
    oracle = write_checkpoint(name, tmp_path)
    prompt = random_ids(70, oracle.config.vocab_size)
    cache, states = None, []
    with torch.no_grad():
        given = torch.tensor([prompt])
        for _ in range(8):
            out = oracle(given, cache=cache, use_cache=True)
            cache = out.cache
            layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
            states.append(
                [
                    (layer.conv_states[0].clone(), layer.recurrent_states[0].clone())
                    for layer in layers
                ]
            )
            given = out.logits[:, -1:].argmax(-1)
    engine = LocalEngine(tmp_path, max_model_len=128, max_in_flight=1, prefix_cache=False)
    pool = engine.ranks[0].states
    assert pool is not None
    seen: list[list[tuple[Any, Any]]] = []

    def note(step: int) -> None:
        if step:
            seen.append([(layer.conv[1].clone(), layer.state[1].clone()) for layer in pool.layers])

    engine.generate([prompt], max_tokens=9, before_step=note)
    for ours, theirs in zip(seen, states, strict=True):
        for (conv, state), (their_conv, their_state) in zip(ours, theirs, strict=True):
            width = conv.shape[0]
            assert_close("inputs of the convolution", conv, their_conv[0, :, -width:].T, ORACLE)
            assert_close("state", state, their_state[0].transpose(1, 2), ORACLE)


def test_a_model_that_can_see_is_the_same_in_text(tmp_path: Path) -> None:
    oracle = write_wrapper("qwen3.5-moe", tmp_path)
    ids = random_ids(70, oracle.config.text_config.vocab_size)
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0]
    assert_close("logits", LocalEngine(tmp_path, tp=2).prompt_logits(ids), want, ORACLE)
