"""What every `unisono bench` command says beside its figures: how and with what they were made."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

import unisono
from unisono.launcher.result_file import check_result_file

WIDTH = 100
SHOWN = 16
"""Digits of a digest in a table; JSON has them all."""
VERSIONS = ("unisono", "commit", "torch", "triton", "driver")
Command = Callable[..., Any]


def output_options(command: Command) -> Command:
    """A decorator that gives a click command --json and --output, which a `Report` takes."""
    command = click.option(
        "--output", metavar="FILE", help="Write the JSON object to this file too."
    )(command)
    return click.option("--json", "as_json", is_flag=True, help="One JSON object and no table.")(
        command
    )


class Report:
    """Lines as they come, unless only JSON is wanted, and one JSON object at the end.

    Raises ConfigError for an `output` that cannot be written.
    """

    def __init__(self, *, as_json: bool, output: str | None) -> None:
        self._as_json = as_json
        self._output = None if output is None else check_result_file("--output", output)

    def line(self, text: str = "") -> None:
        """Show a line of the table; what is too long goes on below."""
        if not self._as_json:
            indent = " " * (len(text) - len(text.lstrip()) + 2)
            lines = textwrap.wrap(
                text,
                WIDTH,
                subsequent_indent=indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
            click.echo("\n".join(lines))

    def end(self, result: dict[str, Any]) -> None:
        """Write the object, as the last line and to the file."""
        text = json.dumps(result)
        click.echo(text)
        if self._output is not None:
            self._output.write_text(text + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return what the figures were made with; "" for what is not there."""
    driver = Path("/sys/module/nvidia/version")
    found = (
        unisono.__version__,
        commit_of(Path(__file__).resolve().parents[2]),
        _installed("torch"),
        _installed("triton"),
        driver.read_text().strip() if driver.exists() else "",
    )
    return dict(zip(VERSIONS, found, strict=True))


def versions_line(facts: Mapping[str, Any]) -> str:
    """Return the `versions` among `facts` as a line of a header."""
    return ", ".join(f"{name} {facts[name]}" for name in VERSIONS if facts[name])


def commit_of(root: Path) -> str:
    """Of the checkout at `root`, with a "+" where it was changed since; "" if that is none."""
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if commit and _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _git(root: Path, *arguments: str) -> str:
    ask = ["git", "-C", str(root), *arguments]
    return subprocess.run(ask, capture_output=True, text=True, timeout=5).stdout.strip()


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
