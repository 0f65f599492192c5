"""Where flights lie: the files with an engine's last steps (runtime/flight.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from unisono.models.config import ConfigError
from unisono.runtime.flight import SUFFIX


def flight_file(directory: str, environ: Mapping[str, str], session: str) -> Path:
    """Return the absolute path of the file that a failing engine writes.

    `directory` is the user's choice and made at once, so that a wrong one is refused before
    anything starts (ConfigError); "" stands for the user's own place, made when it is needed.
    """
    place = _chosen(directory) if directory else _own_place(environ)
    return place / f"{time.strftime('%Y%m%d-%H%M%S')}-{session[:8]}{SUFFIX}"


def _chosen(directory: str) -> Path:
    path = Path(directory).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--flight-dir {directory}: cannot be made ({error.strerror})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--flight-dir {directory}: not writable; choose another directory")
    return path


def _own_place(environ: Mapping[str, str]) -> Path:
    if environ.get("UNISONO_CACHE"):
        return Path(environ["UNISONO_CACHE"]).expanduser().absolute() / "flights"
    state = Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state.absolute() / "unisono" / "flights"
