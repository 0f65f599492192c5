"""What this machine and this installation are, found out without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import unisono
from unisono.launcher.private_directory import PrivateDirectory
from unisono.launcher.resolve import host_facts
from unisono.models.config import ConfigError
from unisono.workers.config import SERVED_DEVICES

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>|~=)\s*([0-9][\w.*]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that unisono needs: what is wanted and what is installed."""

    name: str
    wanted: str
    """Version bounds, such as ">=2.11,<2.14"."""
    installed: str
    """Its version; empty: it is missing."""

    @property
    def fits(self) -> bool:
        return bool(self.installed) and satisfies(self.installed, self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Numbers in bytes; 0 for a limit means that there is none."""

    python: str
    unisono: str
    libraries: tuple[Library, ...]
    cpu: str
    cores: int
    """CPUs that this process may use."""
    cpu_quota: float
    """CPUs' worth of time that the control group grants."""
    omp_num_threads: str
    memory_total: int
    memory_available: int
    """Free within the limit of the control group."""
    memory_limit: int
    shm_total: int
    """-1: there is no /dev/shm."""
    shm_free: int
    private_directory: str
    private_directory_fault: str
    socket_path_bytes: int
    interfaces: tuple[str, ...]
    gloo_interface: str
    """GLOO_SOCKET_IFNAME."""
    num_gpus: int
    torch_has_cuda: bool
    served_devices: tuple[str, ...]
    links: tuple[str, ...]
    """What nvidia-smi says of the links between GPUs, line by line."""


def read_host(environ: Mapping[str, str], cores: int, root: Path = Path("/")) -> HostReport:
    """Look at this host. `root`: where /proc, /sys and /dev are."""
    gpus = host_facts(environ)
    total, available = _memory(root)
    limit = _first_number(root / "sys/fs/cgroup/memory.max")
    if limit:
        used = _first_number(root / "sys/fs/cgroup/memory.current")
        available = min(available, max(limit - used, 0))
    shm_total, shm_free = _file_system(root / "dev/shm")
    directory, fault = _private_directory()
    return HostReport(
        python=platform.python_version(),
        unisono=unisono.__version__,
        libraries=tuple(_library(line) for line in requirements()),
        cpu=cpu_model(root),
        cores=cores,
        cpu_quota=_cpu_quota(root),
        omp_num_threads=environ.get("OMP_NUM_THREADS", ""),
        memory_total=total,
        memory_available=available,
        memory_limit=limit,
        shm_total=shm_total,
        shm_free=shm_free,
        private_directory=str(directory.parent),
        private_directory_fault=fault,
        socket_path_bytes=len(os.fsencode(directory / "client")),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        num_gpus=gpus.num_gpus,
        torch_has_cuda=gpus.torch_has_cuda,
        served_devices=SERVED_DEVICES,
        links=_links() if gpus.num_gpus else (),
    )


def requirements() -> list[str]:
    """Return the requirement lines of pyproject.toml, from the checkout or the installation."""
    project = Path(unisono.__file__).resolve().parent.parent / "pyproject.toml"
    if str(project.parent) in unisono.__path__:
        wanted: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
        return wanted
    lines = importlib.metadata.requires("unisono") or []
    return [line for line in lines if "extra ==" not in line]


def satisfies(version: str, bounds: str) -> bool:
    """Whether the release numbers of `version` lie within `bounds` (">=2.11,<2.14")."""
    release = _release(version)
    for sign, text in _CLAUSE.findall(bounds):
        bound = _release(text)
        width = max(len(release), len(bound))
        have, want = _padded(release, width), _padded(bound, width)
        holds = {
            ">=": have >= want,
            "<=": have <= want,
            "==": have[: len(bound)] == bound if text.endswith("*") else have == want,
            "!=": have != want,
            "<": have < want,
            ">": have > want,
            "~=": have >= want and have[: len(bound) - 1] == bound[:-1],
        }
        if not holds[sign]:
            return False
    return True


def _release(version: str) -> list[int]:
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return [int(part) for part in match[0].split(".")] if match else [0]


def _padded(numbers: Sequence[int], width: int) -> list[int]:
    return [*numbers, *[0] * (width - len(numbers))]


def _library(requirement: str) -> Library:
    match = _NAME.match(requirement)
    assert match is not None, requirement
    try:
        installed = importlib.metadata.version(match[0])
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    wanted = requirement[match.end() :].partition(";")[0]
    return Library(name=match[0], wanted=wanted.replace(" ", "").strip("()"), installed=installed)


def _memory(root: Path) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = total
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
    return total, available


def cpu_model(root: Path = Path("/")) -> str:
    """Return the name of the processor."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _cpu_quota(root: Path) -> float:
    words = _text(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return 0.0
    return int(words[0]) / int(words[1])


def _first_number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _file_system(path: Path) -> tuple[int, int]:
    try:
        facts = os.statvfs(path)
    except OSError:
        return -1, -1
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _private_directory() -> tuple[Path, str]:
    """Make the directory that a session would make; return its path and what is wrong with it."""
    try:
        with PrivateDirectory() as directory:
            return directory.path, ""
    except (ConfigError, OSError) as error:
        return PrivateDirectory().path, str(error)


def _links() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in done.stdout.splitlines()]
    return tuple(line.expandtabs(8) for line in lines if line.startswith(("GPU", "\t", "NIC")))


def is_linux() -> bool:
    """Whether gloo is told to use the interface "lo" (workers/entry.py)."""
    return sys.platform == "linux"
