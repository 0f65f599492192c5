"""`unisono bench step MODEL`: how long a decode step takes, and where its time goes.

For each batch the engine is filled with as many requests, again and again: a round each. The ranks
time their own steps, so that a slow reader of the answers shows in no figure. On a GPU a first
round captures graphs and is not timed. Once all batches are timed, a round more of each is recorded
by torch's profiler: what it leaves behind in a process could slow down what is timed later.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from unisono.launcher.answering import numerics_of
from unisono.launcher.bench_compare import compare, compare_options, is_wanted
from unisono.launcher.bench_engine import (
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
    partition_of,
    prepare_engine,
    serve,
    show_forced,
    show_header,
    started,
    whole_numbers,
)
from unisono.launcher.bench_process import measure_machine
from unisono.launcher.bench_report import Report, output_options
from unisono.launcher.bench_step_report import (
    BatchTimes,
    closing_line,
    details_of,
    row_of,
    titles,
)
from unisono.launcher.engine_client import Engine
from unisono.launcher.options import config_options, given
from unisono.launcher.resolve import Prepared
from unisono.launcher.roofline import Items, floor_s, step_bytes, weight_bytes
from unisono.models.config import ConfigError
from unisono.runtime.config import STEP_TOKENS
from unisono.runtime.protocol import EngineError, SamplingParams
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.timings import DeviceTime, Machine, StepsSeen, WatchSteps

SKIPPED = 4
"""Full steps of each round before the watched ones: the first still follow a step of prompts."""
TRACED = 16
"""Steps that the profiler records."""
SPARE = 128
"""Further tokens that a request may answer, for those who are handed over late."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What is to be measured, checked."""

    model: str
    prepared: Prepared
    batches: tuple[int, ...]
    context: int
    steps: int
    rounds: int
    forced: float = 0.0
    """Which part of the drafts is taken for right; 0: the model says."""

    @property
    def drafts(self) -> int:
        """Behind each row of a step."""
        return self.prepared.worker.num_drafts

    @property
    def names(self) -> tuple[str, ...]:
        """Of the lines of its result."""
        return tuple(f"batch {batch}" for batch in self.batches)


@click.command("step")
@click.argument("model")
@click.option("--batch", default="1,8,32", metavar="N,N,...", help="[default: 1,8,32]")
@click.option("--context", type=int, default=128, metavar="N", help="Prompt tokens. [default: 128]")
@click.option("--steps", type=int, default=64, metavar="N", help="Timed in a round. [default: 64]")
@click.option("--rounds", type=int, default=3, metavar="N", help="[default: 3]")
@config_options("speculate")
@force_option
@output_options
@compare_options
@config_options(*OPTIONS)
def step_command(model: str, **values: Any) -> int:
    """Time the decode steps of MODEL with N requests at a time, and say where the time goes.

    The floor is the time that the weights and the KV of a step take at the bandwidth measured on
    this machine; with --speculate also what each of the drafts takes. Requests have random prompts
    of --context ids and are greedy. The last line is JSON. Ends with 1 if a request ever has
    another answer, whatever its company.
    """
    report = Report(as_json=values["as_json"], output=values["output"])
    plan = make_plan(model=model, **values)
    if is_wanted(values):
        return compare(make_plan, report)
    requests = f"prompts of {plan.context} tokens, {plan.steps} steps"
    requests += f", {plan.drafts} drafts" if plan.drafts else ""
    requests += f", synthetic acceptance {plan.forced:g}" if plan.forced else ""
    facts = describe(plan.prepared, model, requests)
    machine = measure_machine(plan.prepared.worker.device, os.environ)
    show_header(report, facts, machine)
    show_plan(report, plan)
    seen: list[BatchTimes] = []
    lines: list[dict[str, Any]] = []
    runs: list[list[list[int]]] = []
    with started(plan.prepared) as (engine, ready):
        numerics = numerics_of(ready, plan.prepared.worker)
        for batch in plan.batches:
            times, rounds = measure(engine, plan, batch, machine)
            runs += rounds
            answers = {**digests(rounds[0], numerics), "same_answers": are_same(runs)}
            if plan.forced:
                answers = {"digest": SYNTHETIC, "tokens": SYNTHETIC, "same_answers": None}
            lines.append(answers)
            seen.append(times)
            report.line(row_of(times, str(answers["digest"])))
        if facts["device"] == "cuda":
            seen = [dataclasses.replace(each, devices=trace(engine, plan, each)) for each in seen]
    for times in seen:
        for text in details_of(times):
            report.line(text)
    report.line(closing_line(seen[0]))
    lines = [{**each.as_json(), **line} for each, line in zip(seen, lines, strict=True)]
    result = {"machine": machine.device, "bytes_per_s": machine.bytes_per_s, "lines": lines}
    report.end({**facts, "bench": "step", "numerics_of": numerics, **result})
    check_same(lines, numerics)
    return 0


def make_plan(*, model: str, **values: Any) -> StepBench:
    """Check everything that a user can get wrong. Raises ConfigError."""
    batches = whole_numbers("--batch", values["batch"], "from 1 up, as 1,8,32")
    for name, least in (("context", 1), ("steps", 1), ("rounds", 1)):
        if values[name] < least:
            raise ConfigError(f"--{name} {values[name]}: must be at least {least}")
    drafts = _drafts(values.get("speculate"))
    forced = forced_share(values.get("force_acceptance"))
    if forced and not drafts:
        raise ConfigError(f"--force-acceptance {forced:g}: is of drafts; choose --speculate 1 to 8")
    options = given(values, (*OPTIONS, "speculate"))
    least = max(batches) * (1 + drafts) + BLOCK_SIZE
    budget = options.setdefault("max_step_tokens", max(STEP_TOKENS["cpu"], 2 * least))
    if budget < least:
        raise ConfigError(
            f"--max-step-tokens {budget}: {max(batches)} requests that decode"
            f"{f' with {drafts} drafts each' if drafts else ''} and a block of a prompt take "
            f"{least}; choose at least that, or a smaller --batch"
        )
    longest = values["context"] + max(
        num_tokens(batch, values["context"], values["steps"], budget, drafts) for batch in batches
    )
    options |= {
        "max_model_len": longest,
        "max_requests": max(batches),
        "kv_tokens": max(batches) * -(-longest // BLOCK_SIZE) * BLOCK_SIZE,
        "no_prefix_cache": True,
    }
    answer = longest - values["context"]
    prepared = prepare_engine(
        model,
        options,
        f"--context {values['context']}: with {answer} tokens of answer that is {longest} tokens",
        lambda limit: (
            f"choose at most {limit - answer}"
            if limit > answer
            else "choose fewer --steps, or a smaller --context"
        ),
        forced,
    )
    return StepBench(
        model=model,
        prepared=prepared,
        batches=batches,
        context=values["context"],
        steps=values["steps"],
        rounds=values["rounds"],
        forced=forced,
    )


def num_tokens(batch: int, context: int, steps: int, budget: int, drafts: int = 0) -> int:
    """Tokens that a request answers at the most until the last watched step is through, if all of
    its `drafts` a step are right.

    While prompts are computed, within `budget` tokens a step, those that are through run ahead: by
    a step for each that the prompts take and each that goes by while requests are handed over.
    """
    prompts = -(-batch * context // (budget - batch * (1 + drafts) - BLOCK_SIZE + 1)) + 1
    return (prompts + batch + SPARE + SKIPPED + max(steps, TRACED) + 2) * (1 + drafts)


def measure(
    engine: Engine, plan: StepBench, batch: int, machine: Machine
) -> tuple[BatchTimes, list[list[list[int]]]]:
    """Time the steps of one batch; return that, not traced, and the answers of each round."""
    worker = plan.prepared.worker
    on_gpu = worker.device == "cuda"
    asked = _requests(plan, batch)
    watch = WatchSteps(num_rows=batch, skip=SKIPPED, num_steps=plan.steps + 1)
    if on_gpu:
        _round(engine, watch, asked, worker.tp)
    rounds = [_round(engine, watch, asked, worker.tp) for _ in range(plan.rounds)]
    partition = partition_of(plan.prepared)
    num_keys = rounds[0][0][0].watched.num_keys / (batch * watch.num_steps)
    items = Items.of(worker.dtype, worker.state_dtype)
    read = step_bytes(partition, items, batch, num_keys, plan.drafts)
    times = BatchTimes(
        batch=batch,
        num_keys=num_keys,
        step_bytes=sum(read),
        floor_s=floor_s(read, machine.bytes_per_s, share=not on_gpu),
        rounds=[[each.watched for each in seen] for seen, _ in rounds],
        drafts=plan.drafts,
    )
    return times, [[answer.token_ids[: watch.num_steps] for answer in got] for _, got in rounds]


def trace(engine: Engine, plan: StepBench, times: BatchTimes) -> list[DeviceTime | None]:
    """Have one more round of a batch recorded; return what each rank's GPU did in a step."""
    wanted = WatchSteps(num_rows=times.batch, skip=SKIPPED, num_steps=TRACED, traced=True)
    ranks = plan.prepared.worker.tp
    seen, _ = _round(engine, wanted, _requests(plan, times.batch), ranks)
    return [each.watched.device for each in seen]


def show_plan(report: Report, plan: StepBench) -> None:
    """The rest of the header, and the titles of the table."""
    partition, worker = partition_of(plan.prepared), plan.prepared.worker
    item = Items.of(worker.dtype, worker.state_dtype).model
    most = max(weight_bytes(partition, rank, item) for rank in range(worker.tp))
    rounds = f"{plan.rounds} round{'s' if plan.rounds > 1 else ''}"
    report.line(
        f"{rounds} of {plan.steps} steps, prompts of {plan.context} random ids, greedy; a step "
        f"reads {most / 1e6:,.1f} MB of weights"
    )
    show_forced(report, plan.forced)
    report.line()
    report.line(titles())


def _round(
    engine: Engine, watch: WatchSteps, asked: Sequence[Asked], num_ranks: int
) -> tuple[list[StepsSeen], list[Got]]:
    """Serve the requests until every rank has seen its steps; return that in rank order."""
    engine.seen.clear()
    engine.watch(watch)

    def is_enough(answers: Sequence[Got]) -> bool:
        least = min(len(answer.token_ids) for answer in answers)
        return len(engine.seen) == num_ranks and least >= watch.num_steps

    answers, _ = serve(engine, asked, is_enough)
    if len(engine.seen) < num_ranks:
        raise EngineError(
            f"{watch.num_rows} requests did not decode together for {watch.num_steps} steps"
        )
    return sorted(engine.seen, key=lambda seen: seen.rank), answers


def _requests(plan: StepBench, batch: int) -> list[Asked]:
    """The first `batch` of the same random prompts every time."""
    worker, generator = plan.prepared.worker, random.Random(SEED)
    budget = plan.prepared.launch.runtime.max_step_tokens
    params = SamplingParams(
        max_tokens=num_tokens(batch, plan.context, plan.steps, budget, plan.drafts),
        ignore_eos=True,
    )
    return [
        ([generator.randrange(worker.model.vocab_size) for _ in range(plan.context)], params)
        for _ in range(batch)
    ]


def _drafts(speculate: str | None) -> int:
    """Of every row and step. Raises ConfigError for a number that changes."""
    if speculate == "auto":
        raise ConfigError(
            "--speculate auto: steps that are timed have the same number of drafts; choose off or "
            "1 to 8"
        )
    return 0 if speculate in (None, "off") else int(speculate)
