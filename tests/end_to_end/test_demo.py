"""The demo model, as a user runs it, against transformers reading the same file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.demo_oracle import demo_oracle
from tests.end_to_end.command import json_lines, run

PROMPTS = [
    "What is the capital of France?",
    "안녕하세요! 한국어로 대답해 주세요.",
    "What does the emoji 🦊 mean?",
    "Write a haiku about the sea.",
    "Explain recursion to a child.",
    "List three uses of copper.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes with four ingredients.",
    "What is 17 + 25?",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "Name the planets in order.",
    "Schreibe einen Satz auf Deutsch.",
    "Compare cats and dogs in two sentences.",
    "How do I reverse a list in Python?",
    "Tell me a joke about computers.",
    "What year did the first person walk on the moon?",
    "Complete the sentence: Once upon a time, in a small village by a river,",
]
FEW = 8
"""Of PROMPTS, which several ranks answer."""
TOKENS = 24
"""Of an answer: past the 64th position for most prompts."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def prompts_file(directory: Path, count: int) -> str:
    path = directory / f"{count}.txt"
    path.write_text("\n".join(PROMPTS[:count]) + "\n", encoding="utf-8")
    return str(path)


def generate(directory: Path, count: int, tp: int, tokens: int, *options: str) -> list[Any]:
    limits = ("--max-tokens", str(tokens), "--tp", str(tp))
    asked = ("--prompts-file", prompts_file(directory, count), "--dtype", "float32", "--json")
    answers = json_lines(run("generate", "demo", *asked, *limits, *options)[0])
    assert [answer["index"] for answer in answers] == list(range(count))
    return answers


def chat_ids(prompt: str) -> list[int]:
    _, tokenizer = demo_oracle()
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def token_ids(answers: list[Any]) -> list[list[int]]:
    return [answer["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def on_two_ranks(directory: Path) -> list[Any]:
    probabilities = ("--logprobs", "5", "--prompt-logprobs", "5")
    return generate(directory, FEW, 2, TOKENS, *probabilities)


@pytest.mark.timeout(400)
def test_twenty_answers_equal_transformers_on_one_two_and_three_ranks(
    directory: Path, on_two_ranks: list[Any]
) -> None:
    """Of which several ranks give the first; asked for with log-probabilities or without."""
    alone = generate(directory, len(PROMPTS), 1, TOKENS)
    check_greedy(alone, TOKENS)
    for ranks in (on_two_ranks, generate(directory, FEW, 3, TOKENS)):
        assert token_ids(ranks) == token_ids(alone[:FEW])


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_all_twenty_on_any_rank_count_and_longer(directory: Path) -> None:
    alone, *others = (generate(directory, len(PROMPTS), tp, 40) for tp in (1, 2, 3))
    check_greedy(alone, 40)
    for ranks in others:
        assert token_ids(ranks) == token_ids(alone)


def check_greedy(answers: list[Any], most: int) -> None:
    """Every token is the one that transformers finds likeliest after the same text.

    By induction that is its greedy answer: one forward over prompt and answer has the logits of
    every step.
    """
    model, tokenizer = demo_oracle()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, tokens = chat_ids(prompt), answer["token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens])).logits[0]
        assert tokens == logits[len(ids) - 1 : -1].argmax(-1).tolist(), prompt
        ended = tokens[-1] == tokenizer.eos_token_id
        assert ended or len(tokens) == most
        assert answer["finish_reason"] == ("stop" if ended else "length")
        assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.timeout(200)
def test_log_probabilities_are_those_of_transformers(on_two_ranks: list[Any]) -> None:
    """Of every token but the prompt's first: log softmax of its logits, teacher forced, and the
    likeliest five where gaps allow; as many as tokens, and of a greedy answer each the best."""
    model, _ = demo_oracle()
    for prompt, answer in zip(PROMPTS[:3], on_two_ranks, strict=False):
        first, *entries = answer["prompt_logprobs"] + answer["logprobs"]
        assert first is None
        ids = chat_ids(prompt)
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == len(ids)
        assert len(answer["logprobs"]) == answer["usage"]["completion_tokens"]
        ids += answer["token_ids"]
        assert [entry["id"] for entry in entries] == ids[1:]
        spelt = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"])
        assert spelt.decode("utf-8", "replace").startswith(answer["text"])
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        for entry, token, row in zip(entries, ids[1:], want, strict=True):
            assert abs(entry["logprob"] - row[token]) < 1e-4
            best = row.topk(6)
            assert len(entry["top"]) == 5
            for place, top in enumerate(entry["top"]):
                assert abs(top["logprob"] - best.values[place]) < 1e-4
            if bool(((best.values[:-1] - best.values[1:]) > 1e-4).all()):
                assert [top["id"] for top in entry["top"]] == best.indices[:5].tolist()
        assert {entry["rank"] for entry in answer["logprobs"]} == {1}


@pytest.mark.timeout(200)
def test_torchrun_gives_the_answer_of_our_launcher(
    directory: Path, on_two_ranks: list[Any]
) -> None:
    limits = ("--max-tokens", "8", "--dtype", "float32", "--json")
    command = (*TORCHRUN, "--nproc-per-node", "2", sys.executable, "-m", "unisono")
    file = prompts_file(directory, 2)
    out, err = run("generate", "demo", "--prompts-file", file, *limits, command=command)
    assert "launched by torchrun, rank 0 of 2" in err
    assert token_ids(json_lines(out)) == [ids[:8] for ids in token_ids(on_two_ranks[:2])]


def test_the_demo_says_paris_on_two_ranks() -> None:
    out, err = run("generate", "demo", "What is the capital of France?", "--tp", "2")
    assert "Paris" in out
    assert "2 ranks" in err.splitlines()[-1]


def test_llm_in_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from unisono import LLM, SamplingParams\n"
        "with LLM('tiny-mtp', tp=2) as llm:\n"
        "    params = SamplingParams(max_tokens=10)\n"
        "    answers = llm.generate(['def read(', 'class Reader:'], params)\n"
        "    again = llm.generate('def read(', params)\n"
        "    print(answers[0].token_ids == again[0].token_ids, len(answers))\n"
    )
    out, _ = run(str(script), command=(sys.executable,))
    assert out == "True 2\n"
