"""A model with recurrent states in real processes: closing, starting again, crashing, replaying."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.copying import write_copying_mtp
from tests.end_to_end.command import json_lines, plant, run
from tests.tiny import random_ids, write_checkpoint
from tests.tiny_tokenizers import byte_level_tokenizer
from unisono import LLM, SamplingParams

OPTIONS = {"max_requests": 2, "state_slots": 4, "max_step_tokens": 64, "speculate": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3.5", directory, mtp=True)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return str(directory)


def test_it_closes_with_active_requests_and_starts_again(model: str) -> None:
    """Drafting, with another request in the queue."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (1, 70, 90, 5, 70)]
    llm = LLM(model, **OPTIONS)
    with llm:
        want = [llm.generate([prompt], params)[0] for prompt in prompts]
        assert [answer.num_cached_tokens for answer in want] == [0, 0, 0, 0, 64]
        assert want[4].token_ids == want[1].token_ids
        streams = [llm.stream(prompt, params) for prompt in prompts[:3]]
        for stream in streams[:2]:
            next(stream)
    with llm:
        got = llm.generate(prompts, params)
    assert [answer.digest for answer in got] == [answer.digest for answer in want]


def test_a_crash_is_replayed_with_its_states(model: str, tmp_path: Path) -> None:
    source = """def planted(original, self, plan):
    if plan.step == 9: raise ValueError('planted in a step')
    return original(self, plan)"""
    env = plant(tmp_path, None, {"unisono.workers.model_runner:ModelRunner.step": source})
    flights = tmp_path / "flights"
    asked = ("--raw", "--ignore-eos", "--max-step-tokens", "64", "hello " * 17, "good day")
    run("generate", model, *asked, "--flight-dir", str(flights), env=env, code=1)
    [file] = flights.iterdir()
    out, _ = run("replay", str(file), "--json", "--step", "8")
    [facts] = json_lines(out)
    assert [row["equal"] for row in facts["rows"]] == [True, True], facts


def test_a_step_with_drafts_is_replayed_without_them(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_copying_mtp("qwen3.5", path, wrong=range(60, 120))
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    source = """def planted(original, self, plan):
    if plan.step == 6: raise ValueError('planted in a step')
    return original(self, plan)"""
    env = plant(tmp_path, None, {"unisono.workers.model_runner:ModelRunner.step": source})
    asked = ("generate", str(path), "hello", "good day", "--raw", "--ignore-eos")
    limits = ("--max-model-len", "100", "--flight-dir", str(tmp_path / "flights"))
    run(*asked, *limits, "--speculate", "3", env=env, code=1)
    [file] = (tmp_path / "flights").iterdir()
    out, _ = run("replay", str(file), "--json", "--step", "5")
    [facts] = json_lines(out)
    assert [row["equal"] for row in facts["rows"]] == [True, True], facts
