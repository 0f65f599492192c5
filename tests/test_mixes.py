"""Random traffic on the real scheduler and runners: every answer is the one the request has alone.

A mix draws a model, a dtype, ranks, a company and the engine's settings from its seed, so that
chunks, prefix hits, pre-emptions, arrivals and aborts come together as nobody would think of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.closeness import assert_same_bits
from tests.rig import Answer, LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.launcher.demo_model import demo_model_path
from unisono.runtime.protocol import SamplingParams
from unisono.workers.model_runner import StepOutput
from unisono.workers.protocol import Phase, StepPlan

TINY = (
    *("llama", "llama-bias-llama3", "qwen2", "qwen2-sliding"),
    *("qwen3", "qwen3-bias-untied-1003"),
)
DEMO = "demo"
MAX_MODEL_LEN = 320
MOST_BLOCKS = 96
MOST_REQUESTS = 16
ALONE = {"num_blocks": MOST_BLOCKS, "max_requests": 1, "prefix_cache": False, "max_in_flight": 1}
"""Settings of a solo run, whose prompt is computed whole."""


class WatchedEngine(LocalEngine):
    """Counts the rows that it runs, and keeps no logits that no answer needs."""

    def __init__(self, model: Path, tp: int, dtype: str) -> None:
        super().__init__(
            model,
            tp=tp,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=MOST_BLOCKS,
            max_requests=MOST_REQUESTS,
        )
        self.seen: Counter[str] = Counter()

    def step(self, plan: StepPlan) -> tuple[StepOutput, list[torch.Tensor]]:
        phases = Counter(plan.rows.phase)
        self.seen["chunks"] += phases[Phase.CHUNK]
        self.seen["mixed steps"] += len(phases) > 1
        starts_counts = zip(plan.rows.phase, plan.rows.start, plan.rows.count, strict=True)
        self.seen["short tails"] += sum(
            phase == Phase.PROMPT and start > 0 and count <= 64
            for phase, start, count in starts_counts
        )
        result = super().step(plan)
        for rank in self.ranks:
            rank.logits.clear()
        return result


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What one seed stands for."""

    model: str
    dtype: str
    tp: int
    prompts: list[tuple[int, ...]]
    params: list[SamplingParams]
    arrivals: list[int]
    priorities: list[int]
    aborts: dict[int, int]
    max_tokens: int
    ends: tuple[int, ...]
    settings: dict[str, Any]


@dataclass
class Bench:
    """Engines and solo answers, each made once."""

    directory: Path
    engines: dict[tuple[str, str, int], WatchedEngine] = field(default_factory=dict)
    solos: dict[tuple[object, ...], Answer] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def engine(self, model: str, dtype: str, tp: int) -> WatchedEngine:
        key = (model, dtype, tp)
        if key not in self.engines:
            if model == DEMO:
                # Half a gigabyte each: one at a time.
                self.engines = {k: v for k, v in self.engines.items() if k[0] != DEMO}
            self.engines[key] = WatchedEngine(self._path(model), tp, dtype)
        return self.engines[key]

    def alone(self, mix: Mix, i: int) -> Answer:
        prompt, params = mix.prompts[i], mix.params[i]
        key = (mix.model, mix.dtype, mix.tp, prompt, params, mix.max_tokens, mix.ends)
        if key not in self.solos:
            engine = self.engine(mix.model, mix.dtype, mix.tp)
            [self.solos[key]] = engine.generate(
                [prompt], mix.max_tokens, (), mix.ends, params=[params], scheduling=ALONE
            )
        return self.solos[key]

    def _path(self, model: str) -> Path:
        if model == DEMO:
            return demo_model_path()
        path = self.directory / model
        if not path.is_dir():
            write_checkpoint(model, path)
        return path

    def run(self, seed: int) -> None:
        """Run the mix of `seed` and hold each answer against its solo run."""
        mix = draw_mix(seed)
        engine = self.engine(mix.model, mix.dtype, mix.tp)
        engine.seen = Counter()
        answers = engine.generate(
            mix.prompts,
            mix.max_tokens,
            mix.arrivals,
            mix.ends,
            params=mix.params,
            priorities=mix.priorities,
            aborts=mix.aborts,
            scheduling=mix.settings,
        )
        self.seen += engine.seen
        self.seen["mixes"] += 1
        self.seen[f"mixes on {mix.tp} ranks"] += 1
        self.seen[f"mixes of {mix.dtype}"] += 1
        self.seen[f"mixes of {mix.model}"] += 1
        self.seen["pre-emptions"] += engine.num_preemptions
        self.seen["prefix hits"] += sum(count > 0 for count in engine.num_cached_tokens)
        self.seen["joins"] += sum(arrival > 0 for arrival in mix.arrivals)
        for i, answer in enumerate(answers):
            self._compare(f"seed {seed}, request {i} of {mix}", mix, i, answer)

    def _compare(self, name: str, mix: Mix, i: int, answer: Answer) -> None:
        if mix.params[i].temperature and mix.params[i].seed is None:
            self.seen["unseeded"] += 1
            return
        alone = self.alone(mix, i)
        count = len(answer.token_ids)
        if i in mix.aborts and not answer.reason:
            self.seen["aborts"] += 1
            self.seen["aborts while answering"] += count > 0
        else:
            assert (count, answer.reason) == (len(alone.token_ids), alone.reason), name
            self.seen["answers"] += 1
            self.seen["drawn answers"] += mix.params[i].temperature > 0
            self.seen["early ends"] += answer.reason == "stop"
        assert answer.token_ids == alone.token_ids[:count], name
        assert answer.logprobs == alone.logprobs[:count], name
        if count:
            assert answer.prompt_logprobs == alone.prompt_logprobs, name
            assert_same_bits(name, torch.stack(answer.logits), torch.stack(alone.logits[:count]))
        self.seen["tokens"] += count
        self.seen["tokens with logprobs"] += sum(row is not None for row in answer.logprobs)
        self.seen["prompts with logprobs"] += bool(answer.prompt_logprobs)


def is_of_demo(seed: int) -> bool:
    return seed % 24 == 23


def draw_mix(seed: int) -> Mix:
    """Return the mix of `seed`; those of the demo model have less to compute."""
    rng = random.Random(seed)
    is_demo = is_of_demo(seed)
    num_requests = rng.randint(1, 6 if is_demo else 16)
    vocabulary = 199
    prompts = _draw_prompts(rng, num_requests, vocabulary, most=160 if is_demo else 250)
    max_tokens = rng.randint(2, 6) if is_demo else rng.choice([1, 3, 8, 12, 20, 40])
    least = max(-(-(len(prompt) + max_tokens - 1) // 64) for prompt in prompts)
    return Mix(
        model=DEMO if is_demo else rng.choice(TINY),
        # bfloat16 is many times slower on most CPUs, which a tiny model does not show.
        dtype="float32" if is_demo and seed % 72 != 71 else rng.choice(["float32", "bfloat16"]),
        tp=rng.choice([1, 1, 1, 2, 2, 3]),
        prompts=prompts,
        params=[_draw_params(rng) for _ in prompts],
        arrivals=[rng.choice([0, 0, rng.randint(0, 25)]) for _ in prompts],
        priorities=[rng.choice([0, 0, 0, rng.randint(-2, 2)]) for _ in prompts],
        aborts={i: rng.randint(1, 40) for i in range(num_requests) if rng.random() < 0.15},
        max_tokens=max_tokens,
        ends=tuple(rng.sample(range(3, vocabulary), rng.choice([0, 0, 4, 12]))),
        settings={
            "num_blocks": min(least + rng.choice([0, 1, 2, 4, 90]), MOST_BLOCKS),
            "max_requests": rng.randint(1, MOST_REQUESTS),
            "max_step_tokens": rng.choice([64, rng.randint(64, 200), rng.randint(64, 200), 2048]),
            "prefix_cache": rng.random() < 0.75,
        },
    )


def _draw_prompts(
    rng: random.Random, count: int, vocabulary: int, most: int
) -> list[tuple[int, ...]]:
    """Prompts of 1 to `most` tokens: some share their first 64 or more, some are identical."""
    stem = random_ids(most, vocabulary, seed=rng.randrange(2**31))
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.15 and prompts:
            prompts.append(rng.choice(prompts))
        elif kind < 0.55:
            shared = rng.randint(64, most)
            own = random_ids(rng.randint(0, most - shared), vocabulary, rng.randrange(2**31))
            prompts.append((*stem[:shared], *own))
        else:
            length = rng.choice([rng.randint(1, 70), rng.randint(1, most), 63, 64, 65, 128])
            prompts.append(tuple(random_ids(length, vocabulary, rng.randrange(2**31))))
    return prompts


def _draw_params(rng: random.Random) -> SamplingParams:
    """Half are greedy; of the drawn ones a few have no seed and are company only."""
    params = SamplingParams()
    if rng.random() < 0.5:
        params = SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.5, 3.0]),
            seed=rng.choice([None, 42, 42, rng.randrange(2**63), rng.randrange(2**63)]),
            top_k=rng.choice([0, 0, 1, 20]),
            top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
        )
    if rng.random() < 0.3:
        params = replace(
            params,
            repetition_penalty=rng.choice([1.0, 0.8, 1.5]),
            presence_penalty=rng.choice([0.0, 1.0]),
            frequency_penalty=rng.choice([0.0, -0.5, 0.7]),
        )
    if rng.random() < 0.2:
        bias = {rng.randrange(199): rng.choice([-100.0, 2.0, 5.0]) for _ in range(5)}
        params = replace(params, logit_bias=tuple(bias.items()))
    if rng.random() < 0.2:
        stops = tuple(rng.sample(range(199), 10))
        params = replace(params, min_tokens=rng.randint(0, 10), stop_token_ids=stops)
    if rng.random() < 0.3:
        params = replace(params, logprobs=rng.choice([0, 1, 5, 20]))
    if rng.random() < 0.2:
        params = replace(params, prompt_logprobs=rng.choice([0, 1, 5]))
    return params


OFTEN = {
    "answers": 6.0,
    "drawn answers": 1.5,
    "tokens": 60.0,
    "pre-emptions": 0.3,
    "prefix hits": 0.7,
    "chunks": 2.0,
    "short tails": 1.5,
    "mixed steps": 2.0,
    "joins": 1.5,
    "aborts": 0.3,
    "aborts while answering": 0.1,
    "early ends": 0.4,
    "unseeded": 0.3,
    "tokens with logprobs": 10.0,
    "prompts with logprobs": 0.7,
    "mixes on 2 ranks": 0.15,
    "mixes on 3 ranks": 0.05,
    "mixes of float32": 0.3,
    "mixes of bfloat16": 0.3,
    **{f"mixes of {model}": 0.05 for model in TINY},
}
"""How often, a mix, the whole run must have reached each situation. What unseeded requests draw,
and so how long they stay, differs from run to run: floors lie well below what is usual."""


def run_mixes(directory: Path, seeds: Sequence[int]) -> None:
    bench = Bench(directory)
    for seed in seeds:
        bench.run(seed)
    print(f"\nreached: {dict(sorted(bench.seen.items()))}")
    least = {what: often * len(seeds) for what, often in OFTEN.items()}
    least[f"mixes of {DEMO}"] = sum(map(is_of_demo, seeds))
    seldom = {what: bench.seen[what] for what in least if bench.seen[what] < least[what]}
    assert not seldom, f"too seldom for {len(seeds)} mixes: {seldom}"


@pytest.mark.timeout(400)
def test_27_random_mixes_answer_as_alone(tmp_path: Path) -> None:
    """Tokens, logits and log-probabilities have the bits of the solo run; ledgers add up."""
    run_mixes(tmp_path, [seed for seed in range(28) if not is_of_demo(seed)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_300_random_mixes_answer_as_alone(tmp_path: Path) -> None:
    """Of the demo model, too."""
    run_mixes(tmp_path, range(300))
