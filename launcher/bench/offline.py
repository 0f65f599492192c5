"""`unisono bench offline MODEL`: how long it takes to answer many requests that come at once.

The workload has prompts and answers of random lengths; `--grid` has fixed ones. Both are the same
ids every time, and every answer has its full length.
"""

from __future__ import annotations

import os
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from unisono.launcher.answering import numerics_of
from unisono.launcher.bench.compare import compare, compare_options, is_wanted
from unisono.launcher.bench.engine import (
    OPTIONS,
    Asked,
    Got,
    are_same,
    check_same,
    describe,
    digests,
    partition_of,
    prepare_engine,
    serve,
    show_header,
    started,
)
from unisono.launcher.bench.process import measure_machine
from unisono.launcher.bench.report import SHOWN, Report, output_options
from unisono.launcher.draft_counts import DraftCounts
from unisono.launcher.graph_counts import GraphCounts
from unisono.launcher.option_kinds import WHOLE
from unisono.launcher.options import config_options, given, option_spec
from unisono.launcher.prompts import wanted_kv_tokens
from unisono.launcher.resolve import Prepared
from unisono.launcher.roofline import Items, answers_bytes, floor_s
from unisono.models.config import ConfigError
from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import MOST_REQUESTS
from unisono.workers.timings import Machine

ENGINE_OPTIONS = (*OPTIONS, "speculate", "max_requests", "kv_tokens", "memory_utilization")
NUM_REQUESTS, LEAST, MOST, TEMPERATURE = 256, 100, 1024, 0.6
"""The workload that is published of several engines."""
LAST_ID = 10_000
"""Prompts hold ids from 0 to this one, or to the last of a smaller vocabulary."""
AT_ONCE = 256
"""Requests that run at the same time unless --max-requests says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A line of the result: requests that are submitted together."""

    name: str
    asked: Sequence[Asked]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and its answer."""
        return [(len(prompt), params.max_tokens) for prompt, params in self.asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBench:
    """What is to be measured, checked."""

    model: str
    prepared: Prepared
    jobs: tuple[Job, ...]
    repeats: int
    warm_up: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the lines of its result."""
        return tuple(job.name for job in self.jobs)


@click.command("offline")
@click.argument("model")
@click.option("--requests", type=WHOLE, metavar="N", help=f"[default: {NUM_REQUESTS}]")
@click.option("--min", "least", type=WHOLE, metavar="N", help=f"Least tokens.  [default: {LEAST}]")
@click.option("--max", "most", type=WHOLE, metavar="N", help=f"Most tokens.  [default: {MOST}]")
@click.option(
    "--grid",
    metavar="NxINxOUT,...",
    help="Instead N requests of IN prompt tokens and OUT of answer, as 1x128x256,32x128x256.",
)
@click.option(
    "--temperature",
    type=float,
    metavar="X",
    help=f"[default: {TEMPERATURE}, with --grid 0, which is greedy]",
)
@click.option(
    "--seed", type=WHOLE, default=0, metavar="N", help="Of lengths, ids and drawing.  [default: 0]"
)
@click.option("--repeats", type=WHOLE, default=1, metavar="N", help="Timed runs.  [default: 1]")
@click.option(
    "--warm-up",
    type=WHOLE,
    metavar="N",
    help="Runs before them.  [default: 1 on a GPU, otherwise 0]",
)
@output_options
@compare_options
@config_options(*ENGINE_OPTIONS)
def offline_command(model: str, **values: Any) -> int:
    """Time how long MODEL takes to answer 256 requests that come at once, or those of --grid.

    Lengths of prompts and answers are uniform in --min to --max, drawn with Python's random.Random
    as nano-vllm's bench.py does; end tokens are ignored, and request i draws with seed --seed + i.
    The floor is the time to read the weights once a step of the longest answer, and the KV of every
    token, at the bandwidth measured on this machine; with --speculate as many steps fewer as all
    drafts could spare. The last line is JSON. Ends with 1 if the same requests ever have other
    answers.
    """
    report = Report(as_json=values["as_json"], output=values["output"])
    plan = make_plan(model=model, **values)
    if is_wanted(values):
        return compare(make_plan, report)
    worker = plan.prepared.worker
    params = plan.jobs[0].asked[0][1]
    requests = f"temperature {params.temperature:g}, seed {values['seed']}"
    if worker.num_drafts:
        requests += f", speculate {worker.speculate}"
    facts = describe(plan.prepared, model, requests)
    machine = measure_machine(worker.device, os.environ)
    show_header(report, facts, machine)
    report.line(
        f"{plan.repeats} timed and {plan.warm_up} untimed runs, at most {worker.max_requests} "
        "requests at a time, no prefix cache"
    )
    report.line()
    report.line(titles())
    lines, graphs = [], [GraphCounts.of([])]
    with started(plan.prepared) as (engine, ready):
        numerics = numerics_of(ready, worker)
        for job in plan.jobs:
            runs = [serve(engine, job.asked) for _ in range(plan.warm_up + plan.repeats)]
            answers = [[each.token_ids for each in got] for got, _ in runs]
            graphs.append(GraphCounts.of(each for got, _ in runs for each in got))
            lines.append(
                {
                    **summary(job, runs[plan.warm_up :], _floor(plan, job, machine)),
                    **digests(answers[0], numerics),
                    "same_answers": are_same(answers),
                    "graphs": graphs[-1].since(graphs[-2]).as_json(),
                }
            )
            report.line(line_of(lines[-1]))
    report.line(closing_line(lines[0]))
    if worker.device == "cuda":
        report.line(f"untimed runs included: {graphs[-1]}")
    result = {"machine": machine.device, "bytes_per_s": machine.bytes_per_s, "lines": lines}
    report.end({**facts, "bench": "offline", "numerics_of": numerics, **result})
    check_same(lines, numerics)
    return 0


def make_plan(*, model: str, **values: Any) -> OfflineBench:
    """Check everything that a user can get wrong. Raises ConfigError."""
    for name, flag in (("repeats", "--repeats"), ("requests", "--requests"), ("least", "--min")):
        if values[name] is not None and values[name] < 1:
            raise ConfigError(f"{flag} {values[name]}: must be at least 1")
    if (values["requests"] or 0) > MOST_REQUESTS:
        raise ConfigError(f"--requests {values['requests']}: must be at most {MOST_REQUESTS}")
    if values["warm_up"] is not None and values["warm_up"] < 0:
        raise ConfigError(f"--warm-up {values['warm_up']}: must be at least 0")
    option_spec("seed").check(values["seed"])
    if values["temperature"] is not None:
        option_spec("temperature").check(values["temperature"])
    shapes = _grid(values)
    least = LEAST if values["least"] is None else values["least"]
    most = MOST if values["most"] is None else values["most"]
    if most < least:
        raise ConfigError(f"--max {most}: must be at least --min, {least}")
    options = given(values, ENGINE_OPTIONS)
    num_requests = values["requests"] or NUM_REQUESTS
    count = max((shape[0] for shape in shapes), default=num_requests)
    options.setdefault("max_requests", min(count, AT_ONCE))
    longest = max((shape[1] + shape[2] for shape in shapes), default=2 * most)
    options |= {"max_model_len": longest, "no_prefix_cache": True}
    flag = f"--grid {values['grid']}" if shapes else f"--max {most}"
    prepared = prepare_engine(
        model,
        options,
        f"{flag}: a prompt and its answer may have {longest} tokens",
        lambda limit: "choose less" if shapes else f"choose at most {limit // 2}",
    )
    vocab_size = prepared.worker.model.vocab_size
    temperature, seed = values["temperature"], values["seed"]
    if shapes:
        jobs = [grid_job(shape, vocab_size, temperature or 0.0, seed) for shape in shapes]
    else:
        heat = TEMPERATURE if temperature is None else temperature
        jobs = [workload(num_requests, least, most, vocab_size, heat, seed)]
    held = max(sum(lengths) - 1 for job in jobs for lengths in job.lengths)
    if wanted := wanted_kv_tokens(held, prepared.worker):
        raise ConfigError(
            f"--kv-tokens {prepared.worker.kv_tokens}: a prompt and its answer take {held} tokens "
            f"({flag}); choose {wanted} or more"
        )
    warm_up = values["warm_up"]
    if warm_up is None:
        warm_up = int(prepared.worker.device == "cuda")
    return OfflineBench(
        model=model,
        prepared=prepared,
        jobs=tuple(jobs),
        repeats=values["repeats"],
        warm_up=warm_up,
    )


def workload(
    num_requests: int, least: int, most: int, vocab_size: int, temperature: float, seed: int
) -> Job:
    """Random prompts with answers of random lengths, drawn in the order of nano-vllm's bench.py."""
    generator = random.Random(seed)
    last = min(LAST_ID, vocab_size - 1)
    prompts = [
        [generator.randint(0, last) for _ in range(generator.randint(least, most))]
        for _ in range(num_requests)
    ]
    lengths = [generator.randint(least, most) for _ in prompts]
    return Job(
        name=f"{num_requests} requests, {least}-{most}",
        asked=_asked(prompts, lengths, temperature, seed),
    )


def grid_job(shape: tuple[int, int, int], vocab_size: int, temperature: float, seed: int) -> Job:
    """Requests of one length: how many, prompt tokens, answer tokens."""
    count, num_in, num_out = shape
    generator = random.Random(seed)
    last = min(LAST_ID, vocab_size - 1)
    prompts = [[generator.randint(0, last) for _ in range(num_in)] for _ in range(count)]
    asked = _asked(prompts, [num_out] * count, temperature, seed)
    return Job(name="x".join(map(str, shape)), asked=asked)


def summary(job: Job, runs: Sequence[tuple[Sequence[Got], float]], floor: float) -> dict[str, Any]:
    """The figures of a line: of the run in the middle, of two the quicker."""
    seconds = statistics.median_low([each for _, each in runs])
    got = next(got for got, each in runs if each == seconds)
    last = max(got, key=lambda each: each.total_s)
    firsts = sorted(each.first_token_s for each in got)
    num_out = sum(len(each.token_ids) for each in got)
    counts = DraftCounts.of(got)
    return {
        "name": job.name,
        "seconds": seconds,
        "runs_s": [each for _, each in runs],
        "requests": len(got),
        "prompt_tokens": sum(num_in for num_in, _ in job.lengths),
        "output_tokens": num_out,
        "output_tokens_per_s": num_out / seconds,
        "floor_s": floor,
        "of_floor": floor / seconds,
        "first_token_s": statistics.median(firsts),
        "first_token_p99_s": firsts[min(len(firsts) * 99 // 100, len(firsts) - 1)],
        "ms_per_token": 1e3 * statistics.median(each.token_s for each in got),
        "waiting_for_ranks": last.waited_s / last.total_s,
        "preemptions": sum(each.num_preemptions for each in got),
        "tokens_per_step": counts.tokens_per_step,
        "right": counts.shares,
    }


def titles() -> str:
    """The titles of the table's columns."""
    return (
        f"{'':<22}{'s':>9}{'tok out':>10}{'tok/s':>10}{'of floor':>9}{'first s':>9}{'ms/tok':>10}"
        "  digest"
    )


def line_of(entry: Mapping[str, Any]) -> str:
    """A line of the table."""
    return (
        f"{entry['name']:<22}{entry['seconds']:>9.2f}{entry['output_tokens']:>10,}"
        f"{entry['output_tokens_per_s']:>10,.1f}{entry['of_floor']:>9.0%}"
        f"{entry['first_token_s']:>9.3f}{entry['ms_per_token']:>10.2f}  {entry['digest'][:SHOWN]}"
    )


def closing_line(entry: Mapping[str, Any]) -> str:
    """Say where the time went."""
    preempted = f", {entry['preemptions']} pre-emptions" if entry["preemptions"] else ""
    drafted = f", {entry['tokens_per_step']:.2f} tokens a row and step" if entry["right"] else ""
    return (
        f"{entry['name']}: {entry['seconds']:.2f} s, {100 * entry['of_floor']:.0f} % of the floor; "
        f"a request's first token after {entry['first_token_s']:.2f} s, then "
        f"{entry['ms_per_token']:.1f} ms a token (medians); "
        f"{100 * entry['waiting_for_ranks']:.0f} % of it waiting for the ranks{preempted}{drafted}"
    )


def _asked(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float, seed: int
) -> list[Asked]:
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=length, ignore_eos=True, temperature=temperature, seed=seed + number
            ),
        )
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def _floor(plan: OfflineBench, job: Job, machine: Machine) -> float:
    worker = plan.prepared.worker
    items = Items.of(worker.dtype, worker.state_dtype)
    read = answers_bytes(partition_of(plan.prepared), items, job.lengths, worker.num_drafts)
    return floor_s(read, machine.bytes_per_s, share=worker.device == "cpu")


def _grid(values: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """How many requests, prompt tokens and answer tokens of each line; [] without --grid."""
    text = values["grid"]
    if text is None:
        return []
    for name, flag in (("requests", "--requests"), ("least", "--min"), ("most", "--max")):
        if values[name] is not None:
            raise ConfigError(f"{flag} {values[name]}: --grid {text} says how many and how long")
    shapes = []
    for part in text.split(","):
        match = re.fullmatch("([1-9][0-9]{0,5})x([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", part)
        if match is None or int(match[1]) > MOST_REQUESTS:
            raise ConfigError(
                f"--grid {text}: expected NxINxOUT, as 1x128x256,32x128x256, N of 1 to "
                f"{MOST_REQUESTS}"
            )
        shapes.append((int(match[1]), int(match[2]), int(match[3])))
    return list(dict.fromkeys(shapes))
