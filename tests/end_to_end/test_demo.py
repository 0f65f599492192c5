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
    "안녕하세요! 한국어로 대답해 주세요.",
    "Schreibe einen Satz auf Deutsch.",
    "What does the emoji 🦊 mean?",
    "Compare cats and dogs in two sentences.",
    "How do I reverse a list in Python?",
    "Tell me a joke about computers.",
    "What year did the first person walk on the moon?",
    "Complete the sentence: Once upon a time, in a small village by a river,",
]
TOKENS = 40
FEWER = 24
"""Tokens of an answer on several ranks: past the 64th position for most prompts."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def generate(prompts_file: Path, tp: int, tokens: int) -> list[Any]:
    limits = ("--max-tokens", str(tokens), "--tp", str(tp))
    asked = ("--prompts-file", str(prompts_file), "--dtype", "float32", "--json")
    answers = json_lines(run("generate", "demo", *asked, *limits)[0])
    assert [answer["index"] for answer in answers] == list(range(len(PROMPTS)))
    return answers


@pytest.fixture(scope="module")
def on_two_ranks(prompts_file: Path) -> list[Any]:
    return generate(prompts_file, 2, FEWER)


@pytest.mark.timeout(400)
def test_twenty_answers_equal_transformers_on_one_two_and_three_ranks(
    prompts_file: Path, on_two_ranks: list[Any]
) -> None:
    """Every token is the one that transformers finds likeliest after the same text.

    By induction that is its greedy answer: one forward over prompt and answer has the logits of
    every step.
    """
    model, tokenizer = demo_oracle()
    alone = generate(prompts_file, 1, TOKENS)
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )["input_ids"]
        assert answer["usage"]["prompt_tokens"] == len(ids)
        tokens = answer["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens])).logits[0]
        assert tokens == logits[len(ids) - 1 : -1].argmax(-1).tolist(), prompt
        ended = tokens[-1] == tokenizer.eos_token_id
        assert ended or len(tokens) == TOKENS
        assert answer["finish_reason"] == ("stop" if ended else "length")
        assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    for ranks in (on_two_ranks, generate(prompts_file, 3, FEWER)):
        assert [a["token_ids"] for a in ranks] == [a["token_ids"][:FEWER] for a in alone]


@pytest.mark.timeout(200)
def test_log_probabilities_are_those_of_transformers(prompts_file: Path) -> None:
    """Of every token but the prompt's first: log softmax of its logits, teacher forced, and the
    likeliest five where gaps allow; as many as tokens, and of a greedy answer each the best."""
    model, tokenizer = demo_oracle()
    few = prompts_file.with_name("two.txt")
    few.write_text("\n".join((PROMPTS[0], PROMPTS[12])) + "\n", encoding="utf-8")
    options = ("--logprobs", "5", "--prompt-logprobs", "5", "--max-tokens", "12", "--json", "--raw")
    where = ("--prompts-file", str(few), "--dtype", "float32", "--tp", "2")
    for answer in json_lines(run("generate", "demo", *options, *where)[0]):
        first, *entries = answer["prompt_logprobs"] + answer["logprobs"]
        assert first is None
        ids = tokenizer(answer["prompt"])["input_ids"]
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
    prompts_file: Path, on_two_ranks: list[Any]
) -> None:
    few = prompts_file.with_name("few.txt")
    few.write_text("\n".join(PROMPTS[:4]) + "\n", encoding="utf-8")
    limits = ("--max-tokens", str(FEWER), "--dtype", "float32", "--json")
    command = (*TORCHRUN, "--nproc-per-node", "2", sys.executable, "-m", "unisono")
    out, err = run("generate", "demo", "--prompts-file", str(few), *limits, command=command)
    assert "launched by torchrun, rank 0 of 2" in err
    assert [a["token_ids"] for a in json_lines(out)] == [a["token_ids"] for a in on_two_ranks[:4]]


def test_the_demo_says_paris_on_two_ranks() -> None:
    out, err = run("generate", "demo", "What is the capital of France?", "--tp", "2")
    assert "Paris" in out
    assert "2 ranks" in err.splitlines()[-1]


def test_llm_in_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from unisono import LLM, SamplingParams\n"
        "with LLM('demo', tp=2) as llm:\n"
        "    params = SamplingParams(max_tokens=10)\n"
        "    question = {'role': 'user', 'content': 'What is the capital of France?'}\n"
        "    first = llm.chat([question], params)\n"
        "    print(first.text)\n"
        "    answers = llm.generate(['The sea is', 'One, two, three,'], params)\n"
        "    again = llm.generate('The sea is', params)\n"
        "    print(answers[0].token_ids == again[0].token_ids, len(answers))\n"
    )
    out, _ = run(str(script), command=(sys.executable,))
    lines = out.splitlines()
    assert "Paris" in lines[0]
    assert lines[-1] == "True 2"
