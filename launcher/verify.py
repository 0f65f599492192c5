"""`unisono verify MODEL`: prove that a request has one answer, on the user's own checkpoint.

It runs the same prompts in many ways, compares tokens and every bit of every logit with the plain
way (alone, whole prompt, nothing cached), and ends with 1 if a promised equality does not hold.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import click

from unisono.launcher.console import Bar, Console
from unisono.launcher.ids_only import IdsOnly
from unisono.launcher.options import config_options, given
from unisono.launcher.verify_bisect import Finding, Watch, bisect
from unisono.launcher.verify_compare import Verdict, judge, judge_ranks, rank_bound
from unisono.launcher.verify_options import Choices, read_choices
from unisono.launcher.verify_plan import Setting, matrix
from unisono.launcher.verify_prompts import LENGTHS, id_prompts, text_prompts
from unisono.launcher.verify_report import as_json, closing_line, ranks_text, table_text
from unisono.launcher.verify_run import NUM_TOP, Channel, Run, ask, lost, run_setting
from unisono.launcher.verify_task import Task
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError, SamplingParams

OPTIONS = ("device", "load_format", "overlay", "log_level", "start_timeout_s", "stop_grace_s")
OpenEngine = Callable[[Mapping[str, Any], Watch | None], AbstractContextManager[Channel]]
"""From the options of an engine, and how its ranks are watched, to a running one."""


@click.command("verify")
@click.argument("model")
@click.option("--tp", default="1", metavar="N,N,...", help="Rank counts.  [default: 1]")
@click.option("--dtype", default="auto", metavar="NAME,...", help="Dtypes.  [default: auto]")
@click.option(
    "--batch", default="1,8", metavar="N,N,...", help="Requests at a time.  [default: 1,8]"
)
@click.option(
    "--chunk",
    default="none,64,256",
    metavar="N,N,...",
    help="Most tokens of a step, at least 64, or none.  [default: none,64,256]",
)
@click.option("--prefix-cache", default="on,off", metavar="on,off", help="[default: on,off]")
@click.option("--pre-empt", default="on,off", metavar="on,off", help="[default: on,off]")
@click.option("--seeded", is_flag=True, help="Also draw with a seed.")
@click.option("--full", is_flag=True, help="Every combination, not only informative ones.")
@click.option("--prompts", "num_prompts", type=int, metavar="N", help="[default: 8]")
@click.option("--max-tokens", type=int, default=32, metavar="N", help="[default: 32]")
@click.option("--tokens", type=int, metavar="N", help="As many prompts as give N tokens a setting.")
@click.option(
    "--no-bisect",
    "search",
    flag_value=False,
    default=True,
    help="Do not look for the op at fault where something differs.",
)
@click.option("--json", "json_output", is_flag=True, help="Write JSON instead of the table.")
@config_options(*OPTIONS)
def command(model: str, json_output: bool, search: bool, **values: Any) -> int:
    """Prove that MODEL gives each request one answer: alone or in a batch, its prompt chunked or
    whole, after a prefix-cache hit, after pre-emption.

    Each setting is compared with the plain one of its rank count (alone, whole prompt, nothing
    cached): tokens and all bits of all logits. Rank counts are compared within a bound on what
    another order of sums may do. Ends with 1 if anything that is promised does not hold.
    """
    choices = read_choices(values)
    console = Console()
    options = given(values, OPTIONS)
    task, open_engine = _prepare(model, options, choices, console)
    started = time.monotonic()
    with console.counting("settings", len(task.settings)) as bar:
        verdicts = run_task(task, open_engine, bar)
    findings = find_faults(task, verdicts, open_engine, console) if search else {}
    verdicts = [
        findings[each.setting].verdict if each.setting in findings else each for each in verdicts
    ]
    if json_output:
        console.write(json.dumps(as_json(model, verdicts, findings)) + "\n")
    else:
        console.write(table_text(verdicts) + "\n")
        for setting, finding in findings.items():
            console.write(f"{ranks_text(setting)}, {setting.label}: {finding.text}\n")
    console.note(closing_line(verdicts, time.monotonic() - started))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def run_task(task: Task, open_engine: OpenEngine, bar: Bar) -> list[Verdict]:
    """Run every setting, each group on one engine, and judge it."""
    runs: dict[Setting, Run] = {}
    forced: dict[Setting, list[Any]] = {}
    done = 0
    for options, settings in task.groups:
        left = list(settings)
        while left:
            with _opened(open_engine, options, left, runs, task) as engine:
                while engine is not None and left:
                    setting = left.pop(0)
                    bar.show(f"{setting.tp} ranks, {setting.label}", done, len(task.settings))
                    runs[setting] = run_setting(engine, setting, task.prompts, task.max_tokens)
                    done += 1
                    if runs[setting].fault:
                        break
                    if setting in task.plain_of_counts:
                        forced[setting] = _force(engine, task, runs[task.base_of(setting)])
    return [_verdict(task, setting, runs, forced) for setting in task.settings]


def find_faults(
    task: Task, verdicts: Sequence[Verdict], open_engine: OpenEngine, console: Console
) -> dict[Setting, Finding]:
    """Bisect the first setting of each rank count and dtype that does not hold its promise.

    Others are most likely off for the same reason, and each search starts four engines.
    """
    found: dict[Setting, Finding] = {}
    for verdict in verdicts:
        setting = verdict.setting
        is_known = any((each.tp, each.dtype) == (setting.tp, setting.dtype) for each in found)
        is_off = verdict.first is not None or verdict.bound is not None
        if not verdict.ok and is_off and not verdict.is_lost and not is_known:
            console.note(
                f"unisono: looking for the op at fault: {ranks_text(setting)}, {setting.label}"
            )
            found[setting] = bisect(task, verdict, open_engine)
    return found


@contextmanager
def _opened(
    open_engine: OpenEngine,
    options: Mapping[str, Any],
    left: list[Setting],
    runs: dict[Setting, Run],
    task: Task,
) -> Iterator[Channel | None]:
    """An engine; None if it is lost at its start, which is then the fate of the settings left."""
    with ExitStack() as stack:
        try:
            engine: Channel | None = stack.enter_context(open_engine(options, None))
        except EngineError as error:
            runs |= {setting: lost(setting, str(error)) for setting in left}
            left.clear()
            engine = None
        yield engine


def _force(engine: Channel, task: Task, base: Run) -> list[Any]:
    """Log-probabilities of every prompt with the base's answer behind it."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=NUM_TOP)
    return [
        ask(engine, [(answer.prompt, [*task.prompts[answer.prompt], *answer.token_ids], params)])[
            0
        ].prompt_logprobs
        for answer in base.answers
    ]


def _verdict(
    task: Task, setting: Setting, runs: Mapping[Setting, Run], forced: Mapping[Setting, list[Any]]
) -> Verdict:
    base = task.base_of(setting)
    if setting in forced and base in forced and setting != base:
        bound = rank_bound(task.model, setting.dtype)
        return judge_ranks(runs[setting], runs[base], forced[setting], forced[base], NUM_TOP, bound)
    return judge(runs[setting], runs[setting.plain])


def _prepare(
    model: str, options: Mapping[str, Any], choices: Choices, console: Console
) -> tuple[Task, OpenEngine]:
    """Find everything a user can get wrong before a process starts. Raises ConfigError."""
    from unisono.launcher.engine_client import Engine
    from unisono.launcher.resolve import prepare, with_tokenizer
    from unisono.launcher.tokenizer import Tokenizer

    with console.fetching() as fetched:
        first = prepare(model, options, os.environ, None, fetched)
    vocab_size = first.worker.model.vocab_size
    tokenizer: Tokenizer | IdsOnly = (
        Tokenizer.load(first.source) if first.has_tokenizer else IdsOnly(model, vocab_size)
    )
    prompts = _prompts(tokenizer, choices, first.worker.max_model_len, vocab_size)
    dtypes = dict.fromkeys(
        prepare(model, {**options, "dtype": dtype}, os.environ).worker.dtype
        for dtype in choices.dtypes
    )
    task = Task(
        settings=matrix(
            choices.tps, list(dtypes), choices.values, seeded=choices.seeded, full=choices.full
        ),
        prompts=prompts,
        max_tokens=choices.max_tokens,
        model=first.worker.model,
    )

    def launch_of(engine_options: Mapping[str, Any]) -> Any:
        prepared = prepare(model, {**options, **engine_options}, os.environ)
        return with_tokenizer(prepared.launch, tokenizer.size, tokenizer.eos_ids)

    for engine_options, _ in task.groups:
        launch_of(engine_options)

    @contextmanager
    def open_engine(engine_options: Mapping[str, Any], watch: Watch | None) -> Iterator[Channel]:
        launch = launch_of(engine_options)
        if watch is not None:
            worker = replace(launch.runtime.worker, **asdict(watch))
            launch = replace(launch, runtime=replace(launch.runtime, worker=worker))
        with Engine(launch) as engine:
            engine.start()
            yield engine

    return task, open_engine


def _prompts(
    tokenizer: Any, choices: Choices, max_model_len: int, vocab_size: int
) -> list[tuple[int, ...]]:
    # Room for the answer, and for one token more where it becomes a prompt.
    longest = min(max(LENGTHS), max_model_len - choices.max_tokens - 1)
    if longest < 1:
        raise ConfigError(
            f"--max-tokens {choices.max_tokens}: the model's limit is {max_model_len} tokens, "
            f"prompt included; choose at most {max_model_len - 2}"
        )
    if isinstance(tokenizer, IdsOnly):
        return id_prompts(choices.num_prompts, vocab_size, longest)
    return text_prompts(choices.num_prompts, tokenizer.encode, longest)
