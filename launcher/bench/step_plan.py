"""What `unisono bench step` is to measure: options checked, steps and their requests made up.

Steps are of one kind: in each of them either so many requests decode, or so many whole prompts are
computed and nothing else.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from unisono.launcher.bench.engine import (
    OPTIONS,
    Asked,
    forced_share,
    prepare_engine,
    whole_numbers,
)
from unisono.launcher.options import MOST_KV_TOKENS, given
from unisono.launcher.prompts import whole_blocks
from unisono.launcher.resolve import Prepared
from unisono.models.config import ConfigError
from unisono.runtime.config import STEP_TOKENS
from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import BLOCK_SIZE, MOST_REQUESTS
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
MOST_PROMPTS = 1_000_000
"""Of a round: all of them are handed over at once."""
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
    what: str
    """Which options ask for the longest request."""
    legal: Callable[[int], str]
    """What to do where the model serves only so many tokens."""


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
    options = {
        **given(values, (*OPTIONS, "speculate")),
        "max_step_tokens": sizes.max_step_tokens,
        "max_model_len": longest,
        "max_requests": sizes.max_requests,
        # What is longer than any model serves is refused as that.
        "kv_tokens": min(sizes.max_requests * whole_blocks(longest), MOST_KV_TOKENS),
        "no_prefix_cache": True,
    }
    prepared = prepare_engine(model, options, sizes.what, sizes.legal, forced)
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
    batches = whole_numbers("--batch", text, MOST_REQUESTS, BATCHES)
    most, asked = max(batches), values.get("max_step_tokens")
    least, budget = _budget(asked, most, drafts)
    if budget < least:
        raise ConfigError(
            f"--max-step-tokens {budget}: {most} requests that decode"
            f"{f' with {drafts} drafts each' if drafts else ''} and a block of a prompt take "
            f"{least}; choose at least that, or a smaller --batch"
        )
    context, steps = values["context"], values["steps"]
    answer = num_tokens(most, context, steps, budget, drafts)
    what = (
        f"--batch {most}, --context {context}, --steps {steps}: while {_requests(most)} "
        f"{'decodes' if most == 1 else 'decode together'}, one may have {context + answer} tokens"
    )
    sizes = {"batch": most, "context": context, "steps": steps, "speculate": drafts}
    least_drafts = 1 if values.get("force_acceptance") else 0
    legal = partial(_advice, sizes, least_drafts, asked)
    return _Sizes(batches, most, answer, budget, what, legal)


def _requests(number: int) -> str:
    return f"{number} request{'s' if number > 1 else ''}"


def _budget(asked: int | None, batch: int, drafts: int) -> tuple[int, int]:
    """Least tokens of a step in which `batch` decode and a block of a prompt is computed; and how
    many a step gets."""
    least = batch * (1 + drafts) + BLOCK_SIZE
    return least, asked or max(STEP_TOKENS["cpu"], 2 * least)


def _advice(sizes: Mapping[str, int], least_drafts: int, asked: int | None, limit: int) -> str:
    """Which of `sizes` to lower, and how far, for requests to have at most `limit` tokens."""
    least = {"batch": 1, "context": 1, "steps": 1, "speculate": least_drafts}

    def fits(tried: Mapping[str, int]) -> bool:
        batch, context, steps, drafts = (tried[name] for name in least)
        _, budget = _budget(asked, batch, drafts)
        return context + num_tokens(batch, context, steps, budget, drafts) <= limit

    def is_too_large(name: str, value: int) -> bool:
        return not fits({**sizes, name: value})

    if not fits(least):
        return "too few to time steps of requests that decode; choose --prompt-tokens instead"
    ways = []
    for name, size in sizes.items():
        values = range(least[name], min(size, limit + 1))
        number = bisect_left(values, True, key=partial(is_too_large, name))
        if number:
            most = values[number - 1]
            ways.append(f"--{name} {'off' if name == 'speculate' and not most else most}")
    if not ways:
        lower = ", ".join(f"--{name}" for name in sizes if sizes[name] > least[name])
        return f"choose less of more than one of {lower}"
    return f"choose at most {' or '.join(ways)}"


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
    if _AT_ONCE * batch > MOST_REQUESTS:
        raise ConfigError(
            f"{flag}: of --context {context} that is {batch} prompts a step, and at most "
            f"{MOST_REQUESTS // _AT_ONCE} can be; choose less, or a larger --context"
        )
    steps, most = values["steps"], MOST_PROMPTS // batch - SKIPPED - SPARE_STEPS - 1
    if steps > most:
        raise ConfigError(
            f"--steps {steps}: a round has at most {MOST_PROMPTS} prompts, here {batch} a step; "
            f"choose at most {most}"
        )
    what = f"--context {context}: with 1 token of answer that is {context + 1} tokens"
    return _Sizes(
        batches=(batch,),
        max_requests=_AT_ONCE * batch,
        answer=1,
        max_step_tokens=prompt_tokens,
        what=what,
        legal=lambda limit: f"choose at most {limit - 1}",
    )


def _drafts(speculate: str | None) -> int:
    """Of every row and step. Raises ConfigError for a number that changes."""
    if speculate == "auto":
        raise ConfigError(
            "--speculate auto: steps that are timed have the same number of drafts; choose off or "
            "1 to 8"
        )
    return 0 if speculate in (None, "off") else int(speculate)
