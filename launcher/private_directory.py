"""The directory of a session's sockets: short, private, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from unisono.models.config import ConfigError

MAX_SOCKET_PATH = 100
"""Bytes. The system's limit for a socket's path is 107 on Linux, 103 on macOS."""
_LONGEST_NAME = "unisono-4194304-0123456789ab/client"


class PrivateDirectory:
    """A directory only we may enter. The constructor chooses its path, `create` makes it.

    So a caller can see to its removal before it exists: a Ctrl-C in between leaves nothing.
    """

    def __init__(self) -> None:
        self.path = _root() / f"unisono-{os.getpid()}-{secrets.token_hex(6)}"

    def create(self) -> None:
        """Remove what dead launchers left, then make the directory. Raises ConfigError."""
        sweep(self.path.parent)
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot make {self.path}: {error.strerror}; set TMPDIR to a writable directory"
            ) from None

    def endpoint(self, name: str) -> str:
        """Return the ipc:// endpoint of a socket in it."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove it, if it is there. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> PrivateDirectory:
        self.create()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(root: Path) -> None:
    """Remove our own user's session directories whose launcher is dead."""
    for path in root.glob("unisono-*"):
        match = re.fullmatch(r"unisono-([1-9][0-9]*)-[0-9a-f]+", path.name)
        if match is not None and _is_our_directory(path) and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _root() -> Path:
    root = Path(tempfile.gettempdir())
    if len(os.fsencode(root / _LONGEST_NAME)) <= MAX_SOCKET_PATH:
        return root
    return Path("/tmp")


def _is_our_directory(path: Path) -> bool:
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
