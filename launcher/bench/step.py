"""`unisono bench step MODEL`: how long a step takes, and where its time goes.

For each kind of step the engine is given the requests that such steps are made of, again and again:
a round each. The ranks time their own steps, so that a slow reader of the answers shows in no
figure. On a GPU a first round captures graphs and is not timed. Once all kinds are timed, a round
more of each is recorded by torch's profiler: what it leaves behind in a process could slow down
what is timed later.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import click

from unisono.launcher.answering import numerics_of
from unisono.launcher.bench.compare import compare, compare_options, is_wanted
from unisono.launcher.bench.engine import (
    OPTIONS,
    SYNTHETIC,
    Got,
    are_same,
    check_same,
    describe,
    digests,
    force_option,
    partition_of,
    serve,
    show_forced,
    show_header,
    started,
)
from unisono.launcher.bench.process import measure_machine
from unisono.launcher.bench.report import Report, output_options
from unisono.launcher.bench.step_plan import BATCHES, TRACED, StepBench, make_plan
from unisono.launcher.bench.step_report import (
    BatchTimes,
    closing_line,
    details_of,
    row_of,
    titles,
)
from unisono.launcher.engine_client import Engine
from unisono.launcher.option_kinds import WHOLE
from unisono.launcher.options import config_options
from unisono.launcher.roofline import (
    Items,
    floor_s,
    prompt_bytes,
    prompt_flops,
    step_bytes,
    weight_bytes,
)
from unisono.runtime.protocol import EngineError
from unisono.workers.timings import DeviceTime, Machine, StepsSeen, WatchSteps


@click.command("step")
@click.argument("model")
@click.option(
    "--batch", metavar="N,N,...", help=f"Requests that decode in a step.  [default: {BATCHES}]"
)
@click.option(
    "--prompt-tokens",
    type=WHOLE,
    metavar="N",
    help="Time steps that compute N tokens of whole prompts instead, with no request that decodes; "
    "--context must divide N.",
)
@click.option(
    "--context", type=WHOLE, default=128, metavar="N", help="Prompt tokens. [default: 128]"
)
@click.option(
    "--steps", type=WHOLE, default=64, metavar="N", help="Timed in a round. [default: 64]"
)
@click.option("--rounds", type=WHOLE, default=3, metavar="N", help="[default: 3]")
@config_options("speculate", "temperature")
@force_option
@output_options
@compare_options
@config_options(*OPTIONS)
def step_command(model: str, **values: Any) -> int:
    """Time the steps of MODEL in which N requests decode, or N tokens of prompts are computed, and
    say where the time goes.

    The floor of a decode step is the time that the weights and the KV of it take at the bandwidth
    measured on this machine, with --speculate also what each of the drafts takes; that of a step
    of prompts the time that either its bytes or its products take, whichever is longer. Requests
    have random prompts of --context ids. The last line is JSON. Ends with 1 if a request ever has
    another answer, whatever its company.
    """
    report = Report(as_json=values["as_json"], output=values["output"])
    plan = make_plan(model=model, **values)
    if is_wanted(values):
        return compare(make_plan, report)
    facts = describe(plan.prepared, model, plan.workload)
    machine = measure_machine(plan.prepared.worker.device, os.environ)
    show_header(report, facts, machine)
    show_plan(report, plan, machine)
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
    for times in seen:
        report.line(closing_line(times))
    lines = [{**each.as_json(), **line} for each, line in zip(seen, lines, strict=True)]
    speeds = {"bytes_per_s": machine.bytes_per_s, "flops_per_s": machine.flops_per_s}
    result = {"machine": machine.device, **speeds, "lines": lines}
    report.end({**facts, "bench": "step", "numerics_of": numerics, **result})
    check_same(lines, numerics)
    return 0


def measure(
    engine: Engine, plan: StepBench, batch: int, machine: Machine
) -> tuple[BatchTimes, list[list[list[int]]]]:
    """Time the steps of `batch` rows; return that, not traced, and the answers of the same
    requests, again and again."""
    worker = plan.prepared.worker
    on_gpu = worker.device == "cuda"
    watch = plan.watch(batch, plan.steps + 1)
    if on_gpu:
        _round(engine, plan, watch)
    rounds = [_round(engine, plan, watch) for _ in range(plan.rounds)]
    num_keys = rounds[0][0][0].watched.num_keys / (batch * watch.num_steps)
    read, computed = _least(plan, batch, num_keys)
    times = BatchTimes(
        name=plan.names[plan.batches.index(batch)],
        batch=batch,
        num_keys=num_keys,
        step_bytes=sum(read),
        step_flops=sum(computed),
        memory_s=floor_s(read, machine.bytes_per_s, share=not on_gpu),
        products_s=floor_s(computed, machine.flops_per_s, share=not on_gpu),
        rounds=[[each.watched for each in seen] for seen, _ in rounds],
        drafts=plan.drafts,
        prompt_tokens=plan.prompt_tokens,
    )
    answers = [[answer.token_ids for answer in got] for _, got in rounds]
    runs = [run for got in answers for run in plan.answers(batch, watch.num_steps, got)]
    return times, runs


def trace(engine: Engine, plan: StepBench, times: BatchTimes) -> list[DeviceTime | None]:
    """Have one more round of a batch recorded; return what each rank's GPU did in a step."""
    seen, _ = _round(engine, plan, plan.watch(times.batch, TRACED, traced=True))
    return [each.watched.device for each in seen]


def show_plan(report: Report, plan: StepBench, machine: Machine) -> None:
    """The rest of the header, and the titles of the table."""
    partition, worker = partition_of(plan.prepared), plan.prepared.worker
    item = Items.of(worker.dtype, worker.state_dtype).model
    most = max(weight_bytes(partition, rank, item) for rank in range(worker.tp))
    rounds = f"{plan.rounds} round{'s' if plan.rounds > 1 else ''} of {plan.steps} steps"
    reads = f"a step reads {most / 1e6:,.1f} MB of weights"
    if plan.prompt_tokens:
        [batch] = plan.batches
        _, computed = _least(plan, batch, plan.context)
        report.line(
            f"{rounds}, each of {batch} prompt{'s' if batch > 1 else ''} of {plan.context} random "
            f"ids, {plan.choice}; {reads} and takes {max(computed) / 1e9:,.2f} GFLOP; products "
            f"reach {machine.flops_per_s / 1e12:.2f} TFLOP/s, measured"
        )
    else:
        report.line(f"{rounds}, prompts of {plan.context} random ids, {plan.choice}; {reads}")
    show_forced(report, plan.forced)
    report.line()
    report.line(titles())


def _least(plan: StepBench, batch: int, num_keys: float) -> tuple[list[float], list[float]]:
    """What each rank reads and computes at least in a step: bytes, and floating point operations,
    which are counted of prompts only."""
    partition, worker = partition_of(plan.prepared), plan.prepared.worker
    items = Items.of(worker.dtype, worker.state_dtype)
    if plan.prompt_tokens:
        prompts = batch, plan.context
        return prompt_bytes(partition, items, *prompts), prompt_flops(partition, *prompts)
    return step_bytes(partition, items, batch, num_keys, plan.drafts), [0.0] * worker.tp


def _round(engine: Engine, plan: StepBench, watch: WatchSteps) -> tuple[list[StepsSeen], list[Got]]:
    """Serve requests until every rank has seen its steps; return that in rank order."""
    ranks = plan.prepared.worker.tp
    engine.seen.clear()
    engine.watch(watch)

    def is_enough(answers: Sequence[Got]) -> bool:
        if len(engine.seen) < ranks or plan.prompt_tokens:
            return len(engine.seen) == ranks
        return min(len(answer.token_ids) for answer in answers) >= watch.num_steps

    together = plan.prompt_tokens > 0
    answers, _ = serve(engine, plan.requests(watch.num_rows), is_enough, together=together)
    if len(engine.seen) < ranks:
        what = "prompts were not computed" if plan.prompt_tokens else "requests did not decode"
        raise EngineError(f"{watch.num_rows} {what} together for {watch.num_steps} steps")
    return sorted(engine.seen, key=lambda seen: seen.rank), answers
