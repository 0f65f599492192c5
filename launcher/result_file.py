"""Files that a command writes at its end: whether it can is found out before it begins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unisono.models.config import ConfigError


def check_result_file(flag: str, name: str) -> Path:
    """Return the absolute path of a file that can be written. Raises ConfigError.

    A link stands for what it leads to. Nothing is left of the attempt.
    """
    path, fault = Path(name), ""
    try:
        path = path.expanduser().resolve()
        if path.exists() and not path.is_file():
            fault = "is no file"
        elif path.exists() and not os.access(path, os.W_OK):
            fault = "may not be written"
        else:
            tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name[:40]}.").close()
    except (OSError, ValueError, RuntimeError) as error:
        fault = f"cannot be written ({getattr(error, 'strerror', None) or error})"
    if fault:
        raise ConfigError(
            f"{flag} {name}: {fault}; choose a file in a directory that you may write to"
        )
    return path
