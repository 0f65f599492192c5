"""Compares unisono on the CPU with transformers, in turns, on the demo model: scripts/bench_cpu.py

float32, greedy, the same prompt, one rank with every core. Prints medians over the rounds, the
floor that the machine's memory sets, and as the last line everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unisono
from unisono import LLM, SamplingParams
from unisono.launcher.demo_model import demo_model_path

QUESTION = "What is the capital of France?"
BATCH = 8


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=64)
    asked = options.parse_args()
    rounds = measure(asked.rounds, asked.tokens)
    figures = {name: statistics.median(values) for name, values in rounds.items()}
    figures["read_gb_s"] = read_bandwidth_gb_s()
    figures["floor_tok_s"] = figures["read_gb_s"] * 1e9 / (134_515_008 * 4)
    figures["first_token_s"] = statistics.median(first_token_s() for _ in range(3))
    figures["help_s"] = statistics.median(command_s("--help") for _ in range(5))
    print(f"{machine()}, {asked.rounds} rounds of {asked.tokens} tokens, medians")
    print(f"batch 1          {figures['unisono_1']:8.1f} tok/s")
    print(f"transformers     {figures['transformers_1']:8.1f} tok/s, the same prompt alone")
    print(
        f"floor            {figures['floor_tok_s']:8.1f} tok/s at {figures['read_gb_s']:.1f} GB/s"
    )
    print(f"batch {BATCH}          {figures[f'unisono_{BATCH}']:8.1f} tok/s")
    print(f"first token      {figures['first_token_s']:8.2f} s after the command")
    print(f"unisono --help   {figures['help_s']:8.2f} s")
    print(json.dumps({"machine": machine(), "tokens": asked.tokens, **figures}))


def measure(rounds: int, tokens: int) -> dict[str, list[float]]:
    """Tokens a second, the two programs in turns: a slow moment of the machine hits both."""
    model, tokenizer = transformers_model()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    found: dict[str, list[float]] = {"unisono_1": [], f"unisono_{BATCH}": [], "transformers_1": []}
    with LLM("demo", max_model_len=1024) as llm:
        prompt = tokenizer.decode(ids[0])
        for turn in range(rounds + 1):
            for batch in (1, BATCH):
                began = time.perf_counter()
                answers = llm.generate([prompt] * batch, params)
                seconds = time.perf_counter() - began
                assert all(len(answer.token_ids) == tokens for answer in answers)
                if turn:  # the first round warms up
                    found[f"unisono_{batch}"].append(batch * tokens / seconds)
            began = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
            if turn:
                found["transformers_1"].append(tokens / (time.perf_counter() - began))
    return found


def transformers_model() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = demo_model_path()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def read_bandwidth_gb_s() -> float:
    """What all cores read together, 1 GiB at a time."""
    x = torch.ones(1 << 28)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - began)
    return x.numel() * 4 / statistics.median(seconds) / 1e9


def first_token_s() -> float:
    """Seconds from the start of the command to the first character of its answer."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono", "generate", "demo", QUESTION],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    seconds = time.perf_counter() - began
    process.communicate()
    return seconds


def command_s(*arguments: str) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "unisono", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def machine() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return (
        f"{name}, {cores} cores, torch {torch.__version__}, Python {platform.python_version()}, "
        f"unisono {unisono.__version__}"
    )


if __name__ == "__main__":
    main()
