"""Every end of the command line: its exit code and the one line that explains it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import click
import pytest

import unisono
from unisono.launcher import cli
from unisono.models.config import ConfigError
from unisono.runtime.protocol import CapacityExceeded, RequestRejected, WorkerLost

PROGRAM = """
import sys, click
from unisono.launcher import cli, generate

@click.command("generate")
def command():
{body}

generate.command = command
cli.main(["generate"])
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process, `generate` replaced by a function."""

    def call(*arguments, behaviour=None):
        if behaviour is not None:
            command = click.Command("generate", callback=behaviour)
            monkeypatch.setattr("unisono.launcher.generate.command", command)
        code = cli.run(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def raising(error):
    def behaviour():
        raise error

    return behaviour


def start(body: str) -> subprocess.Popen[str]:
    """Start a program whose `generate` is `body`."""
    source = PROGRAM.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_version_and_help(run):
    assert run("--version") == (0, f"unisono {unisono.__version__}\n", "")
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert run() == (0, out, "")
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"  {name}" in out
        assert summary in out


def test_commands_of_the_table_exist_under_their_names():
    context = click.Context(cli.unisono_command)
    for name in cli.COMMANDS:
        command = cli.unisono_command.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_help_loads_no_command():
    source = (
        "import sys\nfrom unisono.launcher import cli\ncode = cli.run(['--help'])\n"
        "print([name for name in sys.modules if name in %r], file=sys.stderr)"
    ) % [module for module, _ in cli.COMMANDS.values()]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve"],
            "unisono: error: no command 'serve': choose generate or chat or",
        ),
        (["--frob"], "unisono: error: No such option"),
        (
            ["generate"],
            "unisono: error: Missing argument 'MODEL'; see unisono generate --help\n",
        ),
        (["generate", "m", "p", "--tp", "0"], "unisono: error: --tp 0: must be at least 1\n"),
        (["generate", "m", "p", "--tp"], "unisono: error: Option '--tp' requires an argument"),
        (["inspect", "m", "x"], "unisono: error: Got unexpected extra argument (x); see unisono"),
        (["generate", "m", "p", "--maxtokens", "3"], "unisono: error: No such option"),
        (["inspect", "no/such"], "unisono: error: model 'no/such' does not exist; choose"),
        (["generate", "no/such", "hi"], "unisono: error: model 'no/such' does not exist; choose"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_are_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (ConfigError("a path\nwith a break"), 2, "unisono: error: a path with a break"),
        (RequestRejected("too long"), 2, "unisono: error: too long"),
        (WorkerLost("rank 1 failed in load"), 1, "unisono: rank 1 failed in load"),
        (CapacityExceeded("full"), 1, "unisono: full"),
        (KeyError("slot"), 1, "unisono: fault: KeyError: 'slot'"),
        (BrokenPipeError(32, "Broken pipe"), 1, "unisono: fault: BrokenPipeError: [Errno 32]"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_and_their_codes(run, error, code, last):
    got, out, err = run("generate", behaviour=raising(error))
    assert (got, out) == (code, "")
    assert (err.splitlines() or [""])[-1].startswith(last)


def test_a_bug_shows_its_traceback(run):
    _, _, err = run("generate", behaviour=raising(KeyError("slot")))
    assert err.startswith("Traceback")
    assert "raise error" in err


def test_the_code_of_a_command_is_the_exit_code(run):
    assert run("generate", behaviour=lambda: 2)[0] == 2
    assert run("generate", behaviour=lambda: None)[0] == 0


def test_signal_handlers_are_given_back(run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("generate", behaviour=lambda: 0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_closes_what_is_open_and_later_ones_do_not_disturb(signum, code):
    body = """
import os, time
try:
    print("open", flush=True)
    time.sleep(30)
finally:
    for again in (2, 15):
        os.kill(os.getpid(), again)
    print("closed", flush=True)
"""
    with start(body) as program:
        assert program.stdout.readline() == "open\n"
        program.send_signal(signum)
        out, err = program.communicate(timeout=20)
    assert (program.returncode, out, err) == (code, "closed\n", "")


def test_a_background_job_keeps_ignoring_ctrl_c(run):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, _, _ = run("generate", behaviour=lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0


def test_a_reader_that_goes_away_ends_it_quietly():
    body = """
import time
from unisono.launcher.console import Console
for _ in range(1000):
    Console().write("word ")
    time.sleep(0.01)
"""
    with start(body) as program:
        program.stdout.read(4)
        program.stdout.close()
        program.wait(timeout=20)
        assert (program.returncode, program.stderr.read()) == (141, "")


def test_a_terminal_without_unicode_still_gets_its_answer():
    body = 'from unisono.launcher.console import Console\nConsole().write("caf\\u00e9 \\u732b")'
    source = PROGRAM.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONIOENCODING": "latin-1",
    }
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, env=environ)
    assert (done.returncode, done.stdout) == (0, b"caf\xe9 \\u732b")


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            WorkerLost("rank 1 failed", rank=1, phase="step", step=3, error="ValueError"),
            {
                "error": "ValueError",
                "message": "rank 1 failed",
                "exit_code": 1,
                "rank": 1,
                "phase": "step",
                "step": 3,
            },
        ),
        (
            ConfigError("--tp 0: must be\nat least 1"),
            {"error": "ConfigError", "message": "--tp 0: must be at least 1", "exit_code": 2},
        ),
        (KeyError("x"), {"error": "KeyError", "message": "'x'", "exit_code": 1}),
    ],
)
def test_json_errors_says_the_last_line_in_json(run, error, facts):
    code, out, err = run("--json-errors", "generate", behaviour=raising(error))
    assert (code, out) == (facts["exit_code"], "")
    assert json.loads(err.splitlines()[-1]) == facts


def test_json_errors_holds_for_usage_errors_too(run):
    code, _, err = run("--json-errors", "generate", "--frob", behaviour=lambda: 0)
    facts = json.loads(err)
    assert (code, facts["error"], facts["exit_code"]) == (2, "NoSuchOption", 2)
    assert "--frob" in facts["message"]


def test_an_interruption_that_a_library_loses_is_raised_again():
    body = """
    print("ready", flush=True)
    import time
    for _ in range(3):
        try:
            time.sleep(10)
        except BaseException:
            pass  # lost
    time.sleep(10)
    """
    process = start(textwrap.dedent(body))
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert time.monotonic() - begin < 5


def test_a_slow_close_is_not_interrupted_again():
    body = """
    import time
    try:
        print("ready", flush=True)
        time.sleep(10)
    finally:
        time.sleep(1.5)
        print("closed", flush=True)
    """
    process = start(textwrap.dedent(body))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "closed\n")
