"""What scripts/train_tiny.py is asked to do: read and checked before anything is trained."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from tiny_model import CHUNK

DEVICES = ("cuda", "cpu")
LONGEST = 2048
"""Tokens of a sequence: positions of the model."""
MOST_BATCH = 4096
"""Sequences a step: more than a GPU has room for."""


class Options(argparse.ArgumentParser):
    """Refuses in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_arguments(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of the command line, checked; ends the process with 2 where one is not legal."""
    options = Options(description=description)
    options.add_argument("--output", required=True, help="directory of the checkpoint")
    options.add_argument("--seconds", type=float, default=220.0, help="of training")
    options.add_argument("--steps", type=int, help="train so many instead")
    options.add_argument("--batch", type=int, help="sequences a step (64)")
    options.add_argument("--length", type=int, help="tokens of a sequence (512)")
    options.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", choices=DEVICES, help="cuda where there is one, or cpu")
    options.add_argument("--tiny", action="store_true", help="a smaller model on a few files")
    asked = options.parse_args(arguments)
    if asked.batch is None:
        asked.batch = 4 if asked.tiny else 64
    if asked.length is None:
        asked.length = 128 if asked.tiny else 512
    if fault := fault_of(asked):
        options.error(fault)
    return asked


def fault_of(asked: argparse.Namespace) -> str:
    """What is not legal among the arguments, in one line; "" where all is. Makes the directory."""
    ranges = (
        ("seconds", asked.seconds > 0 and math.isfinite(asked.seconds), "a number above 0"),
        ("steps", asked.steps is None or asked.steps > 0, "at least 1"),
        ("batch", 1 <= asked.batch <= MOST_BATCH, f"at least 1 and at most {MOST_BATCH}"),
        (
            "length",
            0 < asked.length <= LONGEST and asked.length % CHUNK == 0,
            f"a multiple of {CHUNK}, at least {CHUNK} and at most {LONGEST}",
        ),
        ("lr", 0 < asked.lr <= 1, "above 0 and at most 1"),
        ("seed", 0 <= asked.seed < 2**63, f"at least 0 and at most {2**63 - 1}"),
    )
    for name, is_legal, legal in ranges:
        if not is_legal:
            return f"--{name} {getattr(asked, name)}: must be {legal}"
    if asked.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch sees no GPU here; choose cpu"
    if not asked.output:
        return "--output '': must be a directory, new or one to write to"
    asked.output = Path(asked.output)
    try:
        asked.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=asked.output):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return f"--output {asked.output}: {why}; choose a directory, new or one to write to"
    return ""
