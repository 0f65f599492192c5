"""What a report of `unisono verify` says of where it was made: machine, versions, numerics."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import unisono
from unisono.launcher.host_report import cpu_model
from unisono.launcher.resolve import num_cores
from unisono.launcher.verify.run import Run

LIBRARIES = ("torch", "triton", "transformers")
_GPUS = "proc/driver/nvidia/gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The bits of the plain answers of a rank count and dtype, in 32 hex digits.

    Equal where kind of device, dtype, rank count, attention and numerics are (`numerics`), or
    something is wrong.
    """

    numerics: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Where it was made."""

    model: str
    machine: str
    versions: Mapping[str, str]
    fingerprints: tuple[Fingerprint, ...] = ()


def read_facts(model: str, num_gpus: int, root: Path = Path("/")) -> Facts:
    """Look at this host and installation. `root`: where /proc is."""
    versions = {"unisono": unisono.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = f"{cpu_model(root)}, {num_cores()} cores"
    if num_gpus:
        machine += f"; {num_gpus} x {_gpu_model(root)}"
    return Facts(model=model, machine=machine, versions=versions)


def fingerprint(run: Run, numerics: str) -> Fingerprint:
    """Sum up tokens and logits of a plain run."""
    content = hashlib.blake2b(numerics.encode() + b"\0", digest_size=16)
    for answer in run.answers:
        for number in (*answer.token_ids, *answer.checksums):
            content.update(number.to_bytes(8, "little", signed=True))
    return Fingerprint(numerics=numerics, digest=content.hexdigest())


def _gpu_model(root: Path) -> str:
    for path in sorted((root / _GPUS).glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                return value.strip()
    return "GPU"
