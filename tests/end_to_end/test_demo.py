"""The demo model, as a user runs it, against transformers reading the same file."""

from __future__ import annotations

import json
import math
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
SOME, FEW = 8, 3
"""Of PROMPTS, which one rank and two answer; all on three ranks, too, where there is time."""
TOKENS = 24
"""Of an answer: past the 64th position for most prompts."""
WINDOW, STRIDE = 96, 48
TEXT = (
    "The harbour was quiet before the sun came up. A few gulls walked along the wall and waited "
    "for the boats, which had left in the night and would be back by seven with herring, with "
    "crab if the pots had been kind, and with stories that nobody quite believed.\n\n"
    "Ana counted the lamps on the water. There were eleven, then ten. She asked her brother "
    "whether a lamp could go out by itself; he said that lamps do what the wind tells them. "
    "In 1987 the wind had told forty of them to go out, and the village still spoke about it: "
    "the price of oil, the new engine, the letter from the ministry. Zwölf Boxkämpfer, she wrote "
    "in her notebook, because the teacher liked the sentence.\n"
)
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
    out, err = run("generate", "demo", *asked, *limits, *options)
    assert ("1 rank," if tp == 1 else f"{tp} ranks,") in err.splitlines()[-1]
    answers = json_lines(out)
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
def test_answers_equal_transformers_on_one_and_two_ranks(
    directory: Path, on_two_ranks: list[Any]
) -> None:
    """Of which two ranks give the first; asked for with log-probabilities or without."""
    alone = generate(directory, SOME, 1, TOKENS)
    check_greedy(alone, TOKENS)
    assert token_ids(on_two_ranks) == token_ids(alone[:FEW])
    assert "Paris" in on_two_ranks[0]["text"]


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
    for prompt, answer in zip(PROMPTS, answers, strict=False):
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


@pytest.fixture(scope="module")
def of_a_script(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What tiny-mtp answers to TINY on two ranks, asked by a script without a main guard."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(
        "from unisono import LLM, SamplingParams\n"
        "with LLM('tiny-mtp', tp=2) as llm:\n"
        "    params = SamplingParams(max_tokens=10)\n"
        f"    answers = llm.generate({TINY}, params)\n"
        f"    answers += llm.generate({TINY[0]!r}, params)\n"
        "    print([list(answer.token_ids) for answer in answers])\n"
    )
    out, _ = run(str(script), command=(sys.executable,))
    return json.loads(out)


TINY = ["def read(", "class Reader:"]


def test_llm_in_a_script_without_a_main_guard(of_a_script: list[list[int]]) -> None:
    one, _, again = of_a_script
    assert one == again


def test_torchrun_gives_the_answer_of_our_launcher(of_a_script: list[list[int]]) -> None:
    limits = ("--max-tokens", "10", "--json")
    command = (*TORCHRUN, "--nproc-per-node", "2", sys.executable, "-m", "unisono")
    out, err = run("generate", "tiny-mtp", *TINY, *limits, command=command)
    assert "launched by torchrun, rank 0 of 2" in err
    assert token_ids(json_lines(out)) == of_a_script[:2]


def perplexity_oracle(ids: list[int]) -> tuple[float, int]:
    """Sum and number of the negative log-likelihoods, as transformers' documentation has them."""
    model, _ = demo_oracle()
    total, count, done = 0.0, 0, 0
    for start in range(0, len(ids), STRIDE):
        stop = min(start + WINDOW, len(ids))
        window = torch.tensor([ids[start:stop]])
        labels = window.clone()
        labels[:, : max(done - start, 0)] = -100
        with torch.no_grad():
            loss = model(window, labels=labels).loss
        tokens = int((labels[:, 1:] != -100).sum())
        total += loss.item() * tokens
        count += tokens
        done = stop
        if stop == len(ids):
            break
    return total, count


def evaluate(model: str, path: Path, *options: str) -> dict[str, Any]:
    settings = ("--window", str(WINDOW), "--stride", str(STRIDE), "--dtype", "float32", "--json")
    return json.loads(run("eval", "ppl", model, "--text", str(path), *settings, *options)[0])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.timeout(400)
@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.soak) for tp in (1, 3))])
def test_its_perplexity_is_transformers_on_any_rank_count(text: Path, tp: int) -> None:
    """Two ranks hold unequal shares of its nine heads in three groups."""
    total, count = perplexity_oracle(demo_oracle()[1](TEXT)["input_ids"])
    found = evaluate("demo", text, "--tp", str(tp))
    assert found["tokens"] == count
    assert found["bytes"] == len(TEXT.encode())
    assert found["nll"] == pytest.approx(total, rel=1e-4)
    assert found["ppl"] == pytest.approx(math.exp(total / count), rel=1e-3)


def test_however_windows_are_computed_together_no_bit_changes(text: Path) -> None:
    together = evaluate("tiny-mtp", text)
    apart = evaluate("tiny-mtp", text, "--max-requests", "1", "--max-step-tokens", "64")
    assert (apart["nll"], apart["digest"]) == (together["nll"], together["digest"])
