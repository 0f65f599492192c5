"""`unisono verify MODEL`: prove that a request has one answer, on the user's own checkpoint.

It runs the same prompts in many ways, compares tokens and every bit of every logit with the plain
way (alone, eager, whole prompt, nothing cached), and ends with 1 if a promised equality does not
hold. What was judged is shown however it ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from unisono.launcher.answering import numerics_of
from unisono.launcher.config import LaunchConfig
from unisono.launcher.console import Console
from unisono.launcher.option_kinds import WHOLE
from unisono.launcher.options import config_options, given
from unisono.launcher.result_file import check_result_file
from unisono.launcher.text.ids_only import IdsOnly
from unisono.launcher.verify.bisect import Watch
from unisono.launcher.verify.course import AskOracle, Course
from unisono.launcher.verify.facts import fingerprint, read_facts
from unisono.launcher.verify.options import (
    Choices,
    longest_prompt,
    read_choices,
    with_defaults,
)
from unisono.launcher.verify.plan import Setting, matrix
from unisono.launcher.verify.progress import Progress
from unisono.launcher.verify.prompts import id_prompts, prompt_lengths, text_prompts
from unisono.launcher.verify.report import Report, as_json, closing_line, finding_text, table_text
from unisono.launcher.verify.run import Channel
from unisono.launcher.verify.task import Task
from unisono.models.config import ConfigError

OPTIONS = (
    "device",
    "attn",
    "numerics",
    "load_format",
    "overlay",
    "log_level",
    "start_timeout_s",
    "stop_grace_s",
)


@click.command("verify")
@click.argument("model")
@click.option("--tp", default="1", metavar="N,N,...", help="Rank counts.  [default: 1]")
@click.option("--dtype", default="auto", metavar="NAME,...", help="Dtypes.  [default: auto]")
@click.option(
    "--batch", default="1,8", metavar="N,N,...", help="Requests at a time.  [default: 1,8]"
)
@click.option(
    "--chunk",
    metavar="N,N,...",
    help="Most tokens of a step, at least 64, or none.  [default: none,64,256, as far as prompts "
    "of the model can be longer]",
)
@click.option("--prefix-cache", default="on,off", metavar="on,off", help="[default: on,off]")
@click.option(
    "--pre-empt", metavar="on,off", help="[default: on,off where there are two prompts, else off]"
)
@click.option(
    "--graphs", metavar="on,off", help="Replay CUDA graphs.  [default: on,off on a GPU, off else]"
)
@click.option(
    "--speculate",
    metavar="off,N,...",
    help="Tokens to draft, 1 to 8 or auto.  [default: off,3 where the model has MTP, off else]",
)
@click.option(
    "--sleep",
    metavar="on,off",
    help="Sleep, and wake, amid answers.  [default: on,off from --max-tokens 16 on, else off]",
)
@click.option(
    "--reload",
    metavar="on,off",
    help="Load the weights again amid answers.  [default: as --sleep]",
)
@click.option("--seeded", is_flag=True, help="Also draw with a seed.")
@click.option("--full", is_flag=True, help="Every combination, not only informative ones.")
@click.option("--prompts", "num_prompts", type=WHOLE, metavar="N", help="[default: 8]")
@click.option("--max-tokens", type=WHOLE, default=32, metavar="N", help="[default: 32]")
@click.option(
    "--tokens", type=WHOLE, metavar="N", help="As many prompts as give N tokens a setting."
)
@click.option(
    "--against",
    metavar="transformers",
    help="Also compare the plain answers with transformers, which computes in float32.",
)
@click.option(
    "--no-bisect",
    "search",
    flag_value=False,
    default=True,
    help="Do not look for the op at fault where something differs.",
)
@click.option("--json", "json_output", is_flag=True, help="Write JSON instead of the table.")
@click.option("--html", metavar="FILE", help="Write a page too.")
@config_options(*OPTIONS)
def command(model: str, json_output: bool, html: str | None, search: bool, **values: Any) -> int:
    """Prove that MODEL gives each request one answer: alone or in a batch, its prompt chunked or
    whole, after a prefix-cache hit, after pre-emption, from graphs or eager, drafting or not, and
    where the engine sleeps or loads its weights anew in the middle of it.

    Each setting is compared with the plain one of its rank count (alone, eager, whole prompt,
    nothing cached): tokens and all bits of all logits. Rank counts are compared within a bound on
    what another order of sums may do. Ends with 1 if anything that is promised does not hold.
    """
    choices = read_choices(values)
    page = None if html is None else check_result_file("--html", html)
    console = Console()
    bench = _prepare(model, given(values, OPTIONS), choices, console)
    began = time.monotonic()
    with console.counting("settings", bench.task.num_verdicts) as bar:
        course = Course(bench.task, bench.open_engine, Progress(console, bar, bench.task))
        try:
            course.run_settings()
            if choices.oracle:
                course.ask_oracle(bench.ask_oracle)
            if search:
                course.find_faults()
        finally:
            # Also on the way out: an interruption must not cost what is known.
            report = bench.report(model, course, time.monotonic() - began)
            with bar.hidden():
                is_written = _show(report, console, json_output, page)
    return 0 if report.ok and is_written else 1


def _show(report: Report, console: Console, json_output: bool, html: Path | None) -> bool:
    """Show what there is; False if the page could not be written after all."""
    if not report.verdicts:
        return True
    is_written = html is None or _write(report, console, html)
    if json_output:
        console.write(json.dumps(as_json(report)) + "\n")
    else:
        console.write(table_text(report.verdicts) + "\n")
        for finding in report.findings.values():
            console.write(finding_text(finding) + "\n")
    console.note(closing_line(report))
    return is_written


def _write(report: Report, console: Console, path: Path) -> bool:
    from unisono.launcher.verify.html import page, write_page

    try:
        write_page(path, page(report, time.strftime("%Y-%m-%d %H:%M:%S %z")))
    except OSError as error:
        console.note(f"unisono: --html {path}: not written: {error.strerror}")
        return False
    return True


@dataclass(slots=True, kw_only=True)
class _Bench:
    """What a task is run on."""

    task: Task
    launch_of: Callable[[Mapping[str, Any]], LaunchConfig]
    """From the options of an engine to how it is launched."""
    ask_oracle: AskOracle
    num_gpus: int
    numerics: dict[tuple[int, str], str] = field(default_factory=dict)
    """By rank count and dtype, of the engines that were started."""

    @contextmanager
    def open_engine(self, options: Mapping[str, Any], watch: Watch | None) -> Iterator[Channel]:
        from unisono.launcher.engine_client import Engine

        launch = self.launch_of(options)
        worker = launch.runtime.worker
        if watch is not None:
            watched = replace(worker, **asdict(watch))
            launch = replace(launch, runtime=replace(launch.runtime, worker=watched))
        with Engine(launch) as engine:
            ready = engine.start()
            self.numerics[worker.tp, worker.dtype] = numerics_of(ready, worker)
            yield engine

    def report(self, model: str, course: Course, seconds: float) -> Report:
        facts = read_facts(model, self.num_gpus)
        prints = [
            fingerprint(run, self.numerics[setting.tp, setting.dtype])
            for setting, run in course.runs.items()
            if setting == Setting(tp=setting.tp, dtype=setting.dtype) and not run.fault
        ]
        return Report(
            facts=replace(facts, fingerprints=tuple(prints)),
            verdicts=course.verdicts,
            findings=course.findings,
            num_verdicts=self.task.num_verdicts,
            num_promises=self.task.num_promises,
            seconds=seconds,
        )


def _prepare(model: str, options: Mapping[str, Any], choices: Choices, console: Console) -> _Bench:
    """Find everything a user can get wrong before a process starts. Raises ConfigError."""
    from unisono.launcher.process_table import threads_per_rank
    from unisono.launcher.reload import reload_order
    from unisono.launcher.resolve import host_facts, num_cores, prepare, with_tokenizer
    from unisono.launcher.text.tokenizer import Tokenizer
    from unisono.launcher.verify.oracle import Oracle, ask_oracle, check_oracle

    with console.fetching() as fetched:
        first = prepare(model, options, os.environ, None, fetched)
    choices = with_defaults(choices, first.worker)
    vocab_size = first.worker.model.vocab_size
    tokenizer: Tokenizer | IdsOnly = (
        Tokenizer.load(first.source) if first.has_tokenizer else IdsOnly(model, vocab_size)
    )
    dtypes = dict.fromkeys(
        prepare(model, {**options, "dtype": dtype}, os.environ).worker.dtype
        for dtype in choices.dtypes
    )
    task = Task(
        settings=matrix(
            choices.tps, list(dtypes), choices.values, seeded=choices.seeded, full=choices.full
        ),
        prompts=_prompts(tokenizer, choices, first.worker.max_model_len, vocab_size),
        max_tokens=choices.max_tokens,
        model=first.worker.model,
        again=reload_order(model, first.worker),
        oracle=choices.oracle,
        unasked=frozenset(choices.unasked),
    )
    if not task.num_promises:
        raise ConfigError(
            "every axis has its plain value alone, and nothing would be compared; choose others of "
            "--batch, --chunk, --prefix-cache, --graphs, or more ranks: --tp 1,2"
        )
    if task.oracle:
        check_oracle(first.source, first.worker, dtypes, task.sizes.longest + 1)
    oracle = Oracle(
        source=first.source,
        device=first.worker.device,
        threads=threads_per_rank(os.environ, num_cores(), 1),
        silence_s=first.launch.start_timeout_s,
    )

    def launch_of(engine_options: Mapping[str, Any]) -> LaunchConfig:
        prepared = prepare(model, {**options, **engine_options}, os.environ)
        return with_tokenizer(prepared.launch, tokenizer.size, tokenizer.eos_ids)

    for engine_options, _ in task.groups:
        launch_of(engine_options)
    return _Bench(
        task=task,
        launch_of=launch_of,
        ask_oracle=partial(ask_oracle, oracle, environ=os.environ),
        num_gpus=host_facts(os.environ).num_gpus,
    )


def _prompts(
    tokenizer: Any, choices: Choices, max_model_len: int, vocab_size: int
) -> list[tuple[int, ...]]:
    chunk = max(choices.values["chunk"])
    longest = longest_prompt(choices.max_tokens, max_model_len)
    lengths = prompt_lengths(choices.num_prompts, chunk, longest)
    if isinstance(tokenizer, IdsOnly):
        return id_prompts(lengths, vocab_size)
    return text_prompts(lengths, tokenizer.encode)
