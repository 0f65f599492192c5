"""Finds out what the user means by MODEL: a built-in name, a shape, a directory or a GGUF file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unisono.models import shapes
from unisono.models.config import ConfigError, ModelConfig
from unisono.models.config_reader import read_model_config
from unisono.models.shapes import PREFIX, is_shape, shape_config

if TYPE_CHECKING:
    from unisono.launcher.demo_model import Progress

DEMO_NAME, TINY_NAME = "demo", "tiny-mtp"
TINY_PATH = Path(shapes.__file__).with_name("tiny_mtp")
"""Checkpoint of the model that is part of the package; `scripts/train_tiny.py` made it."""
_CHOICES = (
    f"'{DEMO_NAME}', '{TINY_NAME}', {PREFIX}NAME, a directory with config.json, or a .gguf file"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are."""

    name: str
    """As the user wrote it."""
    path: Path
    """Absolute: a directory for "huggingface", a file for "gguf". For "shape" there is no file, and
    this is the name."""
    kind: Literal["huggingface", "gguf", "shape"]


def name_of(model: object) -> str:
    """A model's name as text; a path becomes one. Raises ConfigError for anything else."""
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str):
        raise ConfigError(f"model {model!r}: expected a name or a path")
    return name


def resolve_model(name: str, on_progress: Progress | None = None) -> ModelSource:
    """Return the files that `name` stands for.

    The word "demo" is always the demo model, fetched if need be (`on_progress` then hears of it),
    "tiny-mtp" the one that is part of the package, and "shape:..." always a shape; a directory of
    such a name is written "./demo". Raises ConfigError for everything else that is neither a
    directory with a config.json nor a .gguf file.
    """
    if is_shape(name):
        shape_config(name)
        return ModelSource(name=name, path=Path(name), kind="shape")
    if name == DEMO_NAME:
        from unisono.launcher.demo_model import demo_model_path

        return ModelSource(name=name, path=demo_model_path(on_progress), kind="gguf")
    if name == TINY_NAME:
        if not (TINY_PATH / "config.json").is_file():
            raise ConfigError(
                f"model {name!r} is part of the package, and {TINY_PATH} is not there; install"
                " unisono again"
            )
        return ModelSource(name=name, path=TINY_PATH, kind="huggingface")
    if not name:
        raise ConfigError(f"model '' is empty; choose {_CHOICES}")
    try:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            return ModelSource(name=name, path=_checked_directory(name, path), kind="huggingface")
        if path.is_file():
            return ModelSource(name=name, path=_checked_file(name, path), kind="gguf")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"model {name!r} cannot be opened ({reason}); choose {_CHOICES}"
        ) from error
    raise ConfigError(f"model {name!r} does not exist; choose {_CHOICES}{_hub_hint(name)}")


def read_source_config(source: ModelSource, load_format: str) -> ModelConfig:
    """Read the config of `source`; for random weights without a look at the weight files.

    Raises ConfigError, CheckpointError for the headers of the weights.
    """
    if source.kind == "shape":
        return shape_config(source.name)
    return read_model_config(source.path, use_headers=load_format != "random")


def _checked_directory(name: str, path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    inside = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() == ".gguf")
    hint = f"; it holds {inside[0]}: name that file" if inside else ""
    raise ConfigError(f"model {name!r} is a directory without config.json; choose {_CHOICES}{hint}")


def _checked_file(name: str, path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return path
    raise ConfigError(f"model {name!r} is a file that does not end in .gguf; choose {_CHOICES}")


def _hub_hint(name: str) -> str:
    if not _HUB_NAME.fullmatch(name):
        return ""
    return f"; if it is a hub name, first run: hf download {name} --local-dir {name.split('/')[1]}"
