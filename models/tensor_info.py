"""One tensor of a checkpoint as the headers describe it, and the error of damaged files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.models.config import ConfigError


class CheckpointError(ConfigError):
    """A weight file is missing, damaged or not what the configuration says."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: bytes [start, stop) of `file`."""

    name: str
    """As the file spells it."""
    file: Path
    dtype: str
    """safetensors spelling (F32, BF16, ...) or the GGUF type (Q4_1, ...)."""
    shape: tuple[int, ...]
    """In torch order, rows first."""
    start: int
    stop: int
