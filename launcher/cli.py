"""The command `unisono`: finds a command, runs it, and turns every end into an exit code.

0 success, 1 fault, 2 user error, 128 + n ended by signal n (130 Ctrl-C, 143 SIGTERM, 141 the
reader of stdout or stderr went away). The last line on stderr says what was wrong.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

import unisono
from unisono.launcher.diagnosis import asks_too_much
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError, RequestRejected, WorkerLost

COMMANDS = {
    "generate": ("unisono.launcher.generate", "Answer prompts with a model on 1 to N ranks."),
    "chat": ("unisono.launcher.chat", "Talk with a model in the terminal."),
    "eval": ("unisono.launcher.evaluate", "Measure a model on data: the perplexity of a text."),
    "inspect": (
        "unisono.launcher.inspect",
        "Show what each rank would hold and how fast it can be.",
    ),
    "replay": ("unisono.launcher.replay", "Run a step of a crashed engine again and compare."),
    "verify": (
        "unisono.launcher.verify.command",
        "Prove that each request has one answer, however it is run.",
    ),
    "doctor": (
        "unisono.launcher.doctor.command",
        "Examine this machine and say what to do about it.",
    ),
    "bench": ("unisono.launcher.bench.command", "Measure how fast this machine computes."),
}
"""Command name: the module whose `command` it is, and the line that `unisono --help` shows."""

EXIT_FAULT, EXIT_USER = 1, 2
INSIST_S = 0.5
"""How long an interruption may take to arrive before it is raised again."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; everything open is closed on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class CommandTable(click.Group):
    """Imports a command only when it is asked for, so that help and errors are instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            raise ConfigError(f"no command {args[0]!r}: choose {' or '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=CommandTable, context_settings={"max_content_width": 100})
@click.version_option(unisono.__version__, prog_name="unisono", message="%(prog)s %(version)s")
@click.option("--json-errors", is_flag=True, help="Write the last line of a failure as JSON.")
def unisono_command(json_errors: bool) -> None:
    """Run large language models on 1 to N ranks: one request, one answer."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; the console script and `python -m unisono`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character must not end the answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = _output_gone()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code. Errors become one line on stderr."""
    report = _Report()
    try:
        with _signals_raise():
            return _invoke(arguments or ["--help"], report)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return report(error, f"error: {_usage_message(error)}", EXIT_USER)
    except (ConfigError, RequestRejected) as error:
        return report(error, f"error: {error}", EXIT_USER)
    except (Interrupted, KeyboardInterrupt, click.Abort) as stop:
        return 128 + (stop.signum if isinstance(stop, Interrupted) else signal.SIGINT)
    except EngineError as error:
        return report(error, str(error), EXIT_USER if asks_too_much(error) else EXIT_FAULT)
    except BrokenPipeError as error:
        return _output_gone() if _streams_without_reader() else _report_bug(error, report)
    except Exception as error:
        return _report_bug(error, report)


def _invoke(arguments: list[str], report: _Report) -> int:
    # click's own main() would end Ctrl-C, a broken pipe and errors in its way, not in ours.
    with unisono_command.make_context("unisono", arguments) as context:
        report.as_json = context.params["json_errors"]
        code = unisono_command.invoke(context)
        return code if isinstance(code, int) else 0


class _Report:
    """Writes the last line of a failure, as text or as JSON."""

    def __init__(self) -> None:
        self.as_json = False

    def __call__(self, error: Exception, message: str, code: int) -> int:
        """Write one line whatever the message holds: a path may contain a line break."""
        line = f"unisono: {' '.join(message.split())}"
        try:
            click.echo(json.dumps(_as_facts(error, code)) if self.as_json else line, err=True)
        except BrokenPipeError:
            return _output_gone()
        return code


def _as_facts(error: Exception, code: int) -> dict[str, object]:
    message = _usage_message(error) if isinstance(error, click.ClickException) else str(error)
    facts: dict[str, object] = {
        "error": type(error).__name__,
        "message": " ".join(message.split()),
        "exit_code": code,
    }
    if isinstance(error, WorkerLost):
        facts["error"] = error.error or facts["error"]
        facts |= {"rank": error.rank, "phase": error.phase, "step": error.step}
        facts |= {"flight": error.flight} if error.flight else {}
    return facts


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; later ones must not break the close.

    A library may lose an exception that a signal raises inside it. So it is raised again until it
    is on its way out.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A shell starts background jobs with SIGINT ignored, and it must stay so.
    taken = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for number in taken:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: insist(signum))
        signal.setitimer(signal.ITIMER_REAL, INSIST_S, INSIST_S)
        raise Interrupted(signum)

    def insist(signum: int) -> None:
        if not _is_unwinding():
            raise Interrupted(signum)

    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in taken:
            signal.signal(number, handlers[number])


def _is_unwinding() -> bool:
    """Whether an `Interrupted` is being handled where the main thread is."""
    error = sys.exception()
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    return message if context is None else f"{message}; see {context.command_path} --help"


def _report_bug(error: Exception, report: _Report) -> int:
    try:
        traceback.print_exception(error)
    except BrokenPipeError:
        return _output_gone()
    return report(error, f"fault: {type(error).__name__}: {error}", EXIT_FAULT)


def _streams_without_reader() -> list[int]:
    """Which of stdout and stderr are pipes that nobody reads any more (`| head`)."""
    poller = select.poll()
    for stream in (1, 2):
        poller.register(stream, 0)
    return [stream for stream, events in poller.poll(0) if events & select.POLLERR]


def _output_gone() -> int:
    # The interpreter flushes once more at exit and must not complain then.
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in _streams_without_reader():
        os.dup2(devnull, stream)
    os.close(devnull)
    return 128 + signal.SIGPIPE
