"""Runs the command as a user would, and plants faults in single ranks of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.paths import python_path
from unisono.launcher import cli

UNISONO = (sys.executable, "-m", "unisono")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with the checkout importable, without a cluster's variables."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return {**environ, "PYTHONPATH": python_path(), **(extra or {})}


def start(
    *arguments: str, env: Mapping[str, str] | None = None, command: Sequence[str] = UNISONO
) -> subprocess.Popen[str]:
    """Start the command with its output in pipes."""
    return subprocess.Popen(
        [*command, *arguments],
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = UNISONO,
    code: int = 0,
    timeout_s: float = 100,
) -> tuple[str, str]:
    """Run the command to its end; return stdout and stderr. Fails unless it exits with `code`."""
    process = start(*arguments, env=env, command=command)
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == code, (
        f"exit code {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    )
    return out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that ends with code 2 before it starts a process, in this one; its stderr."""
    code = cli.run([*arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), f"exit code {code}\n{out[-2000:]}\n{err[-4000:]}"
    return err


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def plant(directory: Path, rank: int | None, patches: Mapping[str, str]) -> dict[str, str]:
    """Environment in which `rank` runs with methods of ours replaced; None: every rank does.

    `patches`: "module:attribute.path" -> source of a function `def planted(original, *args)`
    that is called in its stead.
    """
    ranks = [str(each) for each in (range(64) if rank is None else [rank])]
    source = textwrap.dedent(
        f"""
        import os, sys
        if os.environ.get("RANK") in {ranks!r}:
            import importlib.abc, importlib.util
            PATCHES = {dict(patches)!r}

            def bound(planted, original):
                return lambda *args, **kwargs: planted(original, *args, **kwargs)

            class Planter(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path, target=None):
                    mine = [key for key in PATCHES if key.split(":")[0] == name]
                    if not mine:
                        return None
                    sys.meta_path.remove(self)
                    spec = importlib.util.find_spec(name)
                    sys.meta_path.insert(0, self)
                    load = spec.loader.exec_module

                    def exec_module(module):
                        load(module)
                        for key in mine:
                            *owners, attribute = key.split(":")[1].split(".")
                            owner = module
                            for part in owners:
                                owner = getattr(owner, part)
                            space = {{}}
                            exec(PATCHES[key], space)
                            original, planted = getattr(owner, attribute), space["planted"]
                            setattr(owner, attribute, bound(planted, original))

                    spec.loader.exec_module = exec_module
                    return spec

            sys.meta_path.insert(0, Planter())
        """
    )
    (directory / "sitecustomize.py").write_text(source)
    return {"PYTHONPATH": python_path(directory)}
