"""What `unisono bench step` is to measure: options checked, steps and their requests made up.

Steps are of one kind: in each of them either so many requests decode, or so many whole prompts are
computed and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.launcher.bench.engine import (
    OPTIONS,
    Asked,
    forced_share,
    prepare_engine,
    whole_numbers,
)
from unisono.launcher.options import given
from unisono.launcher.resolve import Prepared
from unisono.models.config import ConfigError
from unisono.runtime.config import STEP_TOKENS
from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase
from unisono.workers.timings import WatchSteps

BATCHES = "1,8,32"
SKIPPED = 4
"""Full steps of each round before the watched ones: the first still follow another kind of step."""
TRACED = 16
"""Steps that the profiler records."""
SPARE = 128
"""Further tokens that a request may answer, for those who are handed over late."""
SPARE_STEPS = 4
"""Further steps that there are prompts for."""
SEED = 0
_AT_ONCE = 2
"""Steps whose prompts hold slots and blocks: one is computed, the next one planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What is to be measured, checked."""

    model: str
    prepared: Prepared
    batches: tuple[int, ...]
    """Rows of a step, for each kind of step."""
    context: int
    steps: int
    rounds: int
    forced: float = 0.0
    """Which part of the drafts is taken for right; 0: the model says."""
    prompt_tokens: int = 0
    """Of a step of whole prompts; 0: the rows decode."""
    temperature: float = 0.0

    @property
    def drafts(self) -> int:
        """Behind each row of a step."""
        return self.prepared.worker.num_drafts

    @property
    def names(self) -> tuple[str, ...]:
        """Of the lines of its result."""
        if self.prompt_tokens:
            return (f"{self.prompt_tokens} prompt tokens",)
        return tuple(f"batch {batch}" for batch in self.batches)

    @property
    def choice(self) -> str:
        """How tokens are chosen, in words."""
        return f"drawn at temperature {self.temperature:g}" if self.temperature else "greedy"

    @property
    def workload(self) -> str:
        """What is asked, but for the batches: with another one answers may differ."""
        parts = [f"prompts of {self.context} tokens"]
        parts += [f"{self.prompt_tokens} of them a step"] * bool(self.prompt_tokens)
        parts.append(f"{self.steps} steps")
        parts += [f"{self.drafts} drafts"] * bool(self.drafts)
        parts += [f"synthetic acceptance {self.forced:g}"] * bool(self.forced)
        parts += [f"temperature {self.temperature:g}"] * bool(self.temperature)
        return ", ".join(parts)

    def watch(self, batch: int, num_steps: int, *, traced: bool = False) -> WatchSteps:
        """What ranks are told to take note of."""
        return WatchSteps(
            num_rows=batch,
            num_tokens=self.prompt_tokens or batch,
            phase=int(Phase.PROMPT if self.prompt_tokens else Phase.DECODE),
            skip=SKIPPED,
            num_steps=num_steps,
            traced=traced,
        )

    def requests(self, batch: int) -> list[Asked]:
        """The first `batch` of the same random prompts every time, with a seed each; where steps
        compute prompts, again for each step."""
        worker, generator = self.prepared.worker, random.Random(SEED)
        answer = 1
        if not self.prompt_tokens:
            budget = self.prepared.launch.runtime.max_step_tokens
            answer = num_tokens(batch, self.context, self.steps, budget, self.drafts)
        asked: list[Asked] = [
            (
                [generator.randrange(worker.model.vocab_size) for _ in range(self.context)],
                SamplingParams(
                    max_tokens=answer,
                    ignore_eos=True,
                    temperature=self.temperature,
                    seed=number,
                ),
            )
            for number in range(batch)
        ]
        return asked * num_prompt_steps(self.steps) if self.prompt_tokens else asked

    def answers(
        self, batch: int, num_steps: int, got: Sequence[Sequence[int]]
    ) -> list[list[list[int]]]:
        """Of the tokens of all requests of a round, runs of the same requests; at least one."""
        if not self.prompt_tokens:
            return [[list(tokens[:num_steps]) for tokens in got]]
        steps = [list(map(list, got[at : at + batch])) for at in range(0, len(got), batch)]
        return [step for step in steps if all(step)]


class _Sizes(NamedTuple):
    """What follows from the kind of step."""

    batches: tuple[int, ...]
    max_requests: int
    answer: int
    """Tokens of the longest."""
    max_step_tokens: int


def make_plan(*, model: str, **values: Any) -> StepBench:
    """Check everything that a user can get wrong. Raises ConfigError."""
    for name, least in (("context", 1), ("steps", 1), ("rounds", 1)):
        if values[name] < least:
            raise ConfigError(f"--{name} {values[name]}: must be at least {least}")
    drafts = _drafts(values.get("speculate"))
    forced = forced_share(values.get("force_acceptance"))
    if forced and not drafts:
        raise ConfigError(f"--force-acceptance {forced:g}: is of drafts; choose --speculate 1 to 8")
    prompt_tokens = values.get("prompt_tokens")
    if prompt_tokens is None:
        sizes = _decoding(values, drafts)
    else:
        sizes = _prompts(values, prompt_tokens, drafts)
    context = values["context"]
    longest = context + sizes.answer
    answer = f"{sizes.answer} token{'s' if sizes.answer > 1 else ''} of answer"
    options = {
        **given(values, (*OPTIONS, "speculate")),
        "max_step_tokens": sizes.max_step_tokens,
        "max_model_len": longest,
        "max_requests": sizes.max_requests,
        "kv_tokens": sizes.max_requests * -(-longest // BLOCK_SIZE) * BLOCK_SIZE,
        "no_prefix_cache": True,
    }
    prepared = prepare_engine(
        model,
        options,
        f"--context {context}: with {answer} that is {longest} tokens",
        lambda limit: (
            f"choose at most {limit - sizes.answer}"
            if limit > sizes.answer
            else "choose fewer --steps, or a smaller --context"
        ),
        forced,
    )
    return StepBench(
        model=model,
        prepared=prepared,
        batches=sizes.batches,
        context=context,
        steps=values["steps"],
        rounds=values["rounds"],
        forced=forced,
        prompt_tokens=prompt_tokens or 0,
        temperature=values.get("temperature") or 0.0,
    )


def num_tokens(batch: int, context: int, steps: int, budget: int, drafts: int = 0) -> int:
    """Tokens that a request answers at the most until the last watched step is through, if all of
    its `drafts` a step are right.

    While prompts are computed, within `budget` tokens a step, those that are through run ahead: by
    a step for each that the prompts take and each that goes by while requests are handed over.
    """
    prompts = -(-batch * context // (budget - batch * (1 + drafts) - BLOCK_SIZE + 1)) + 1
    return (prompts + batch + SPARE + SKIPPED + max(steps, TRACED) + 2) * (1 + drafts)


def num_prompt_steps(steps: int) -> int:
    """Steps that there are prompts for, where `steps` are timed."""
    return SKIPPED + max(steps + 1, TRACED) + SPARE_STEPS


def _decoding(values: Mapping[str, Any], drafts: int) -> _Sizes:
    """Of steps in which as many requests decode as --batch says."""
    text = BATCHES if values["batch"] is None else values["batch"]
    batches = whole_numbers("--batch", text, "from 1 up, as 1,8,32")
    most = max(batches)
    least = most * (1 + drafts) + BLOCK_SIZE
    budget = values.get("max_step_tokens") or max(STEP_TOKENS["cpu"], 2 * least)
    if budget < least:
        raise ConfigError(
            f"--max-step-tokens {budget}: {most} requests that decode"
            f"{f' with {drafts} drafts each' if drafts else ''} and a block of a prompt take "
            f"{least}; choose at least that, or a smaller --batch"
        )
    context, steps = values["context"], values["steps"]
    answer = max(num_tokens(batch, context, steps, budget, drafts) for batch in batches)
    return _Sizes(batches, most, answer, budget)


def _prompts(values: Mapping[str, Any], prompt_tokens: int, drafts: int) -> _Sizes:
    """Of steps in which --prompt-tokens tokens of whole prompts are computed."""
    flag, context = f"--prompt-tokens {prompt_tokens}", values["context"]
    for name, value, why in (
        ("batch", values["batch"], "a step has as many prompts of --context tokens as that takes"),
        ("max-step-tokens", values.get("max_step_tokens"), "steps have as many tokens as that"),
        ("speculate", drafts, "there are no drafts to check"),
    ):
        if value:
            raise ConfigError(f"--{name} {value}: with {flag} {why}; leave one of the two out")
    if prompt_tokens < BLOCK_SIZE:
        raise ConfigError(f"{flag}: must be at least {BLOCK_SIZE}, a block of a prompt")
    batch, rest = divmod(prompt_tokens, context)
    if rest or not batch:
        near = (batch * context, (batch + 1) * context)
        legal = [str(tokens) for tokens in near if tokens >= BLOCK_SIZE]
        raise ConfigError(
            f"{flag}: a step computes whole prompts, here of --context {context} tokens; choose "
            f"{' or '.join(legal)}, or another --context"
        )
    return _Sizes((batch,), _AT_ONCE * batch, 1, prompt_tokens)


def _drafts(speculate: str | None) -> int:
    """Of every row and step. Raises ConfigError for a number that changes."""
    if speculate == "auto":
        raise ConfigError(
            "--speculate auto: steps that are timed have the same number of drafts; choose off or "
            "1 to 8"
        )
    return 0 if speculate in (None, "off") else int(speculate)
