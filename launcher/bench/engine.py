"""An engine under `unisono bench`: what every command that starts one does with it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import click

from unisono.launcher.answering import POLL_S, digest_of
from unisono.launcher.bench.report import Command, Report, versions, versions_line
from unisono.launcher.cluster import detect_cluster
from unisono.launcher.console import Console
from unisono.launcher.engine_client import Engine
from unisono.launcher.host_report import cpu_model
from unisono.launcher.option_kinds import whole_number
from unisono.launcher.resolve import Prepared, prepare
from unisono.launcher.timed import TimedEngine
from unisono.models.config import ConfigError
from unisono.models.partition import ModelPartition
from unisono.runtime.protocol import (
    Delta,
    EngineError,
    EngineReady,
    Finished,
    Rejected,
    SamplingParams,
    Tokens,
)
from unisono.workers.timings import Machine

OPTIONS = (
    "tp",
    "dtype",
    "device",
    "attn",
    "numerics",
    "collectives",
    "load_format",
    "overlay",
    "state_dtype",
    "max_step_tokens",
    "no_graphs",
    "graph_buckets",
    "capture",
    "random_padding",
    "log_level",
    "start_timeout_s",
    "stop_grace_s",
    "trace",
)
"""Of the engine. What a workload decides by itself, such as lengths and slots, is no option."""

SYNTHETIC = "synthetic"
"""Stands in the place of digests of answers that mean nothing."""
EXACT = "numerics=exact"
"""Stands in how answers were computed where one answer is promised."""

Asked = tuple[Sequence[int], SamplingParams]
"""A prompt and how to answer it."""


class AnswersDiffer(EngineError):
    """What is promised to have one answer had two."""


@dataclass(slots=True)
class Got:
    """What has come of one request. Times are seconds since the engine received it."""

    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0
    waited_s: float = 0.0
    num_preemptions: int = 0
    num_replays: int = 0
    """Graphs that the engine had replayed by its end; `eager`: by reason, what else it ran."""
    eager: tuple[tuple[str, int], ...] = ()
    drafted: Sequence[int] = ()
    """By place in a chain: drafts of it that were checked; `accepted`: and were right."""
    accepted: Sequence[int] = ()

    @property
    def token_s(self) -> float:
        """Seconds per token after the first; 0 where there is no second one."""
        later = len(self.token_ids) - 1
        return (self.total_s - self.first_token_s) / later if later > 0 else 0.0


def whole_numbers(flag: str, text: str, most: int, example: str) -> tuple[int, ...]:
    """The numbers of 1 to `most` that `text` lists, each once. Raises ConfigError for others."""
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    legal = [number for number in numbers if number and number <= most]
    if len(legal) < len(numbers):
        raise ConfigError(f"{flag} {text}: expected whole numbers of 1 to {most}, as {example}")
    return tuple(dict.fromkeys(legal))


def force_option(command: Command) -> Command:
    """A decorator that gives a click command --force-acceptance, which `forced_share` reads."""
    return click.option(
        "--force-acceptance",
        type=float,
        metavar="X",
        help="Take this share of the drafts for right, whatever the model says, to time random "
        "weights: a synthetic figure.",
    )(command)


def forced_share(forced: float | None) -> float:
    """Which part of the drafts is taken for right; 0: the model says. Raises ConfigError."""
    if forced is not None and not 0 < forced <= 1:
        raise ConfigError(f"--force-acceptance {forced:g}: must be above 0 and at most 1")
    return forced or 0.0


def show_forced(report: Report, share: float) -> None:
    """Warn of what is synthetic, if anything is."""
    if share:
        report.line(
            f"SYNTHETIC: {share:g} of the drafts at each place are taken for right, whatever the "
            "model says; answers mean nothing"
        )


def prepare_engine(
    model: str,
    options: Mapping[str, Any],
    what: str,
    legal: Callable[[int], str],
    forced_acceptance: float = 0.0,
) -> Prepared:
    """Resolve everything; raises ConfigError for what a user can get wrong.

    `what` asks for the max_model_len among `options`, which is no option of the user's; `legal`
    says what to do about it where the model serves less.
    """
    cluster = detect_cluster(os.environ)
    if cluster is not None and cluster.world_size > 1:
        raise ConfigError(
            f"unisono bench starts its own ranks, and {cluster.launcher} started this command "
            f"{cluster.world_size} times: run it alone with --tp {cluster.world_size}"
        )
    with Console().fetching() as fetched:
        prepared = prepare(model, {**options, "max_model_len": 0}, os.environ, None, fetched)
    if options["max_model_len"] > (limit := prepared.worker.max_model_len):
        raise ConfigError(f"{what}, and the model's limit is {limit}: {legal(limit)}")
    prepared = prepare(model, options, os.environ)
    worker = replace(prepared.worker, forced_acceptance=forced_acceptance)
    runtime = replace(prepared.launch.runtime, worker=worker)
    return replace(prepared, launch=replace(prepared.launch, runtime=runtime))


@contextmanager
def started(prepared: Prepared) -> Iterator[tuple[Engine, EngineReady]]:
    """An engine that is ready."""
    logging.basicConfig(
        level=prepared.launch.log_level.upper(),
        format="%(asctime)s launcher %(levelname)s %(message)s",
    )
    with (TimedEngine if prepared.launch.trace else Engine)(prepared.launch) as engine:
        with Console().loading() as progress:
            ready = engine.start(progress)
        yield engine, ready


def serve(
    engine: Engine,
    asked: Sequence[Asked],
    is_enough: Callable[[Sequence[Got]], bool] = lambda answers: False,
    *,
    together: bool = False,
) -> tuple[list[Got], float]:
    """Submit all requests at once; return what came of them, and the seconds that took.

    Ends with the last answer, or once there `is_enough`, and aborts what is left then. `together`:
    no step is to begin before the engine has them all. Raises WorkerLost, and EngineError for a
    request that the engine refuses.
    """
    started = time.monotonic()
    answers = {
        engine.submit(prompt, params, more=together and number < len(asked)): Got()
        for number, (prompt, params) in enumerate(asked, 1)
    }
    got, left = list(answers.values()), set(answers)
    while left and not is_enough(got):
        for event in engine.poll(POLL_S):
            # Of requests aborted before, some tokens may still come.
            if isinstance(event, Tokens):
                for request_id, token_id in zip(event.request_ids, event.token_ids, strict=True):
                    if (answer := answers.get(request_id)) is not None:
                        answer.token_ids.append(token_id)
            elif event.request_id in answers and _take(answers[event.request_id], event):
                left.discard(event.request_id)
    seconds = time.monotonic() - started
    for request_id in left:
        engine.abort(request_id)
    return got, seconds


def describe(prepared: Prepared, model: str, requests: str) -> dict[str, Any]:
    """The facts that every result begins with. `requests`: what of them its lines do not say."""
    worker = prepared.worker
    weights = " ".join(filter(None, [worker.load_format, worker.overlay]))
    return {
        **versions(),
        "model": model,
        "workload": f"{requests}, weights {weights}",
        "tp": worker.tp,
        "device": worker.device,
        "dtype": worker.dtype,
        "state_dtype": worker.state_dtype if worker.model.is_hybrid else "",
        "attn": worker.attn,
        "numerics": worker.numerics,
        "collectives": worker.collectives,
        "graphs": worker.device == "cuda" and not worker.no_graphs,
        "random_padding": worker.random_padding,
        "max_step_tokens": prepared.launch.runtime.max_step_tokens,
        "cpu": cpu_model(),
        "traced": bool(prepared.launch.trace),
    }


def show_header(report: Report, facts: Mapping[str, Any], machine: Machine) -> None:
    """Show machine, versions, commit, what is run and how fast memory was seen to be."""
    device = machine.device
    ranks = f"{facts['tp']} rank{'s' if facts['tp'] > 1 else ''}"
    report.line(f"{facts['cpu'] if device == 'cpu' else device}, {ranks}")
    report.line(versions_line(facts))
    states = f", states {facts['state_dtype']}" if facts["state_dtype"] else ""
    report.line(
        f"{facts['model']}: {facts['dtype']}{states}, attention {facts['attn']}, numerics "
        f"{facts['numerics']}; memory{' of one GPU' if device != 'cpu' else ''} gives "
        f"{machine.bytes_per_s / 1e9:,.1f} GB/s, measured"
    )


def partition_of(prepared: Prepared) -> ModelPartition:
    """How the ranks share the model."""
    return ModelPartition.of(prepared.worker.model, prepared.worker.tp)


def digests(answers: Sequence[Sequence[int]], numerics: str) -> dict[str, str]:
    """One digest of all answers, as `answer.digest` is one of one; and one of the tokens alone."""
    tokens = [token for answer in answers for token in (len(answer), *answer)]
    return {"digest": digest_of(tokens, numerics), "tokens": digest_of(tokens, "")}


def are_same(runs: Sequence[Sequence[Sequence[int]]]) -> bool:
    """Whether every request has one answer in all `runs`, of which shorter ones lack the last."""
    most = max(runs, key=len)
    return all(answer == other for run in runs for answer, other in zip(run, most, strict=False))


def check_same(lines: Sequence[Mapping[str, Any]], numerics: str) -> None:
    """Raise AnswersDiffer if requests had another answer when they ran again, and may not. Where
    answers are synthetic, "same_answers" is None."""
    if EXACT in numerics and any(line["same_answers"] is False for line in lines):
        raise AnswersDiffer("the same requests had other answers when they ran again")


def _take(answer: Got, event: Delta | Finished | Rejected) -> bool:
    """Add what has come; True if that was the end."""
    match event:
        case Delta():
            answer.token_ids += event.token_ids
            return False
        case Finished():
            answer.first_token_s, answer.total_s = event.first_token_s, event.total_s
            answer.waited_s, answer.num_preemptions = event.waited_s, event.num_preemptions
            answer.num_replays, answer.eager = event.num_replays, event.eager
            answer.drafted, answer.accepted = event.drafted, event.accepted
            return True
        case Rejected():
            raise EngineError(f"a request of the benchmark was rejected: {event.message}")
