"""`unisono bench speculate MODEL`: what drafts are worth, for each number of them.

For each number of drafts an engine answers the same prompts, as many at a time as each batch says,
again and again. Drafts change no answer, so that all of them must have one digest; what changes is
how long they take. How many drafts are right depends on the text: the prompts should be like those
to be served.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import click

from unisono.launcher.answering import numerics_of
from unisono.launcher.bench.engine import (
    OPTIONS,
    SYNTHETIC,
    Asked,
    Got,
    are_same,
    check_same,
    describe,
    digests,
    force_option,
    forced_share,
    prepare_engine,
    serve,
    show_forced,
    show_header,
    started,
    whole_numbers,
)
from unisono.launcher.bench.process import measure_machine
from unisono.launcher.bench.report import SHOWN, Report, output_options
from unisono.launcher.draft_counts import DraftCounts
from unisono.launcher.option_kinds import WHOLE
from unisono.launcher.options import config_options, given, option_spec
from unisono.launcher.prompts import gather_prompts, tokenize_prompts
from unisono.launcher.resolve import Prepared
from unisono.models.config import ConfigError
from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import MOST_REQUESTS

ENGINE_OPTIONS = tuple(name for name in OPTIONS if name != "trace")
"""A trace is of one engine; here are several."""
OFF = "off"
MOST_DRAFTS = 8
WORTH = 1.02
"""How much faster drafts must be than none to be recommended: less is noise."""
RANDOM_TOKENS = 64
"""Of a prompt where the model has no tokenizer."""
PROMPTS = (
    "def read_lines(path):",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "class Queue:",
    "List the steps to make a cup of tea.",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Summarise the history of the printing press.",
    "import argparse",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateBench:
    """What is to be measured, checked: an engine for each of `settings`, "off" first."""

    model: str
    settings: tuple[tuple[str, Prepared], ...]
    batches: tuple[int, ...]
    asked: tuple[Asked, ...]
    """As many as the largest batch; smaller ones take the first."""
    repeats: int
    knows_text: bool
    forced: float
    """Which part of the drafts is taken for right; 0: the model says."""


@click.command("speculate")
@click.argument("model")
@click.option(
    "--drafts",
    default="1,2,3,4,5,6,7,8",
    show_default=True,
    metavar="K,K,...",
    help=f"Numbers of drafts, 1 to {MOST_DRAFTS}, each beside none.",
)
@click.option("--batch", default="1,8", show_default=True, metavar="N,N,...")
@click.option("--prompts-file", metavar="FILE", help="One prompt a line; by default a few of ours.")
@click.option(
    "--tokens", type=WHOLE, default=128, show_default=True, metavar="N", help="Of each answer."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, metavar="X")
@force_option
@click.option(
    "--repeats", type=WHOLE, default=3, show_default=True, metavar="N", help="Timed runs."
)
@output_options
@config_options(*ENGINE_OPTIONS)
def speculate_command(model: str, **values: Any) -> int:
    """Answer the same prompts with MODEL's own drafts, none to 8 of them, and say how many pay.

    A row tells, for a number of drafts and a batch, the tokens a second, how much faster that is
    than without, how many tokens a step gave, and which share of the drafts at each place in a
    chain was right. The first run of each batch is not timed. Ends with 1 if drafts, company or a
    repetition ever change an answer. The last line is JSON.
    """
    report = Report(as_json=values["as_json"], output=values["output"])
    plan = make_plan(model=model, **values)
    first = plan.settings[0][1]
    requests = f"{len(plan.asked)} prompts, temperature {values['temperature']:g}"
    if plan.forced:
        requests += f", synthetic acceptance {plan.forced:g}"
    facts = describe(first, model, requests)
    machine = measure_machine(first.worker.device, os.environ)
    show_header(report, facts, machine)
    show_forced(report, plan.forced)
    if not plan.forced and not plan.knows_text:
        report.line("random prompts: how many drafts are right says nothing of real text")
    report.line()
    report.line(titles())
    lines: list[dict[str, Any]] = []
    for drafts, prepared in plan.settings:
        with started(prepared) as (engine, ready):
            numerics = numerics_of(ready, prepared.worker)
            for batch in plan.batches:
                asked = plan.asked[:batch]
                runs = [serve(engine, asked) for _ in range(1 + plan.repeats)]
                base = next((line for line in lines if line["batch"] == batch), None)
                lines.append(summary(drafts, batch, runs, base, numerics))
                if plan.forced and drafts != OFF:
                    lines[-1] |= dict.fromkeys(("digest", "tokens"), SYNTHETIC)
                    lines[-1]["same_answers"] = None
                report.line(line_of(lines[-1]))
    advice = {str(batch): recommended(lines, batch) for batch in plan.batches}
    report.line()
    for each, best in advice.items():
        report.line(f"batch {each}: {advice_of(lines, int(each), best, plan.forced)}")
    marked = {
        each: f"{SYNTHETIC}: {best}" if plan.forced else best for each, best in advice.items()
    }
    result = {"bench": "speculate", "recommended": marked, "lines": lines}
    report.end({**facts, "synthetic": plan.forced, **result, "numerics_of": numerics})
    check_same(lines, numerics)
    return 0


def make_plan(*, model: str, **values: Any) -> SpeculateBench:
    """Check everything that a user can get wrong. Raises ConfigError."""
    for name in ("tokens", "repeats"):
        if values[name] < 1:
            raise ConfigError(f"--{name} {values[name]}: must be at least 1")
    option_spec("temperature").check(values["temperature"])
    forced = forced_share(values["force_acceptance"])
    drafts = sorted(whole_numbers("--drafts", values["drafts"], MOST_DRAFTS, "1,3"))
    batches = sorted(whole_numbers("--batch", values["batch"], MOST_REQUESTS, "1,8"))
    options = {
        **given(values, ENGINE_OPTIONS),
        "max_requests": max(batches),
        "no_prefix_cache": True,
    }
    prompts, knows_text = _prompts(model, options, values["prompts_file"])
    prompts = list(islice(cycle(prompts), max(batches)))
    longest_prompt = max(map(len, prompts))
    longest = longest_prompt + values["tokens"]
    settings = [
        (
            each,
            prepare_engine(
                model,
                {**options, "max_model_len": longest, "speculate": each},
                f"--tokens {values['tokens']}: a prompt and its answer may have {longest} tokens",
                lambda limit: (
                    f"choose at most {limit - longest_prompt}"
                    if limit > longest_prompt
                    else f"a prompt has {longest_prompt} by itself; choose a shorter one"
                ),
                forced,
            ),
        )
        for each in (OFF, *map(str, drafts))
    ]
    asked = [
        (
            prompt,
            SamplingParams(
                max_tokens=values["tokens"],
                ignore_eos=True,
                temperature=values["temperature"],
                seed=number,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    return SpeculateBench(
        model=model,
        settings=tuple(settings),
        batches=tuple(batches),
        asked=tuple(asked),
        repeats=values["repeats"],
        knows_text=knows_text,
        forced=forced,
    )


def summary(
    drafts: str,
    batch: int,
    runs: Sequence[tuple[Sequence[Got], float]],
    base: Mapping[str, Any] | None,
    numerics: str,
) -> dict[str, Any]:
    """The figures of a line; the first of `runs` is not timed, `base` is the line without drafts.

    Times are medians of the timed runs, counts those of the last.
    """
    seconds = statistics.median([each for _, each in runs[1:]])
    got = runs[-1][0]
    counts = DraftCounts.of(got)
    answers = [[each.token_ids for each in got] for got, _ in runs]
    digest = digests(answers[0], numerics)
    speed = sum(map(len, answers[0])) / seconds
    return {
        "name": f"drafts {drafts}, batch {batch}",
        "drafts": drafts,
        "batch": batch,
        "seconds": seconds,
        "runs_s": [each for _, each in runs],
        "tokens_per_s": speed,
        "speedup": 1.0 if base is None else speed / base["tokens_per_s"],
        "tokens_per_step": counts.tokens_per_step,
        "right": counts.shares,
        **digest,
        "same_answers": are_same(answers) and (base is None or digest["digest"] == base["digest"]),
    }


def recommended(lines: Sequence[Mapping[str, Any]], batch: int) -> str:
    """The number of drafts that was fastest at `batch`; "off" where none pays."""
    best = max((line for line in lines if line["batch"] == batch), key=lambda e: e["tokens_per_s"])
    drafts: str = best["drafts"]
    return drafts if best["speedup"] >= WORTH else OFF


def advice_of(
    lines: Sequence[Mapping[str, Any]], batch: int, best: str, forced: float = 0.0
) -> str:
    """The same in words; synthetic where a share of the drafts was `forced`."""
    mark = f"SYNTHETIC, {forced:g} right: " if forced else ""
    if best == OFF:
        return f"{mark}no number of drafts pays; leave --speculate off"
    line = next(e for e in lines if e["batch"] == batch and e["drafts"] == best)
    return (
        f"{mark}--speculate {best}, {line['speedup']:.2f} times as fast as without "
        f"({line['tokens_per_step']:.2f} tokens a step)"
    )


def titles() -> str:
    """The titles of the table's columns."""
    return (
        f"{'drafts':>6}{'batch':>7}{'tok/s':>11}{'x off':>8}{'tok/step':>10}  "
        f"{'digest':<{SHOWN}}  right at each place"
    )


def line_of(entry: Mapping[str, Any]) -> str:
    """A line of the table."""
    right = " ".join(f"{100 * share:.0f}" for share in entry["right"])
    return (
        f"{entry['drafts']:>6}{entry['batch']:>7}{entry['tokens_per_s']:>11,.1f}"
        f"{entry['speedup']:>8.2f}{entry['tokens_per_step']:>10.2f}  {entry['digest'][:SHOWN]}"
        f"  {f'{right} %' if right else ''}"
    ).rstrip()


def _prompts(
    model: str, options: Mapping[str, Any], prompts_file: str | None
) -> tuple[list[list[int]], bool]:
    """Token ids of the prompts, and whether they are text. Raises ConfigError."""
    prepared = prepare_engine(model, {**options, "max_model_len": 0}, "", lambda limit: "")
    if not prepared.has_tokenizer:
        if prompts_file is not None:
            why = f"{model} has no tokenizer; leave it out"
            raise ConfigError(f"--prompts-file {prompts_file}: {why}")
        generator, size = random.Random(0), prepared.worker.model.vocab_size
        few = range(len(PROMPTS))
        return [[generator.randrange(size) for _ in range(RANDOM_TOKENS)] for _ in few], False
    from unisono.launcher.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(prepared.source)
    asked = gather_prompts(() if prompts_file else PROMPTS, prompts_file, sys.stdin)
    requests = tokenize_prompts(asked, tokenizer, raw=False, system=None)
    return [list(request.prompt_ids) for request in requests], True
