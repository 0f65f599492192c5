"""What the facts of `unisono doctor` mean: each finding says what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unisono.launcher.doctor.probes import ProbeReport
from unisono.launcher.host_report import HostReport, satisfies
from unisono.launcher.option_kinds import whole_number
from unisono.launcher.private_directory import MAX_SOCKET_PATH
from unisono.workers.probes import CollectiveTime, LinearProof, Measured

PYTHON_WANTED = ">=3.11"
LITTLE_MEMORY = 1 << 30
LITTLE_SHM = 1 << 30
MANY_CORES = 4
SLOW_COLLECTIVE_S = 2e-3
"""Twice a layer: with 30 layers, a token would wait for more than 0.1 s."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know. `fatal`: unisono cannot be used like this."""

    message: str
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """What MODEL needs on this host, in bytes over all ranks."""

    name: str
    dtype: str
    tp: int
    legal_rank_counts: tuple[int, ...]
    weight_bytes: int
    """With the float32 copy of the head that ranks compute logits with."""
    kv_bytes_per_token: int
    fits: bool
    """Whether weights and one block of KV are within the available memory."""
    kv_tokens: int
    """Tokens that the KV cache would hold by default, all requests together."""


def findings(
    host: HostReport, linux: bool, tp: int, probes: ProbeReport | None, model: ModelFit | None
) -> list[Finding]:
    """Return everything worth saying, what is fatal first."""
    found = [
        *_installation(host),
        *_cores(host, tp),
        *_memory(host, model),
        *_sockets(host, linux, tp),
        *_devices(host),
        *(() if probes is None else _probed(probes)),
    ]
    return sorted(found, key=lambda finding: not finding.fatal)


def _installation(host: HostReport) -> Iterator[Finding]:
    if not satisfies(host.python, PYTHON_WANTED):
        yield Finding(
            message=f"Python {host.python} is not {PYTHON_WANTED}: make a virtual environment "
            "with Python 3.11 or 3.12",
            fatal=True,
        )
    for library in host.libraries:
        if not library.installed:
            yield Finding(
                message=f"{library.name} is not installed: pip install '{library.name}"
                f"{library.wanted}'",
                fatal=True,
            )
        elif not library.fits:
            yield Finding(
                message=f"{library.name} {library.installed} is not {library.wanted}, which is "
                f"what unisono is tested with: pip install '{library.name}{library.wanted}'"
            )


def _cores(host: HostReport, tp: int) -> Iterator[Finding]:
    threads = host.omp_num_threads
    if threads == "1" and host.cores // tp >= MANY_CORES:
        yield Finding(
            message=f"OMP_NUM_THREADS=1 leaves {host.cores - tp} of {host.cores} cores idle: "
            f"unset it, or set it to {host.cores // tp}"
        )
    elif (whole_number(threads) or 0) * tp > host.cores:
        yield Finding(
            message=f"OMP_NUM_THREADS={threads} on {tp} ranks is more than the {host.cores} cores: "
            f"unset it, or set it to {max(1, host.cores // tp)}"
        )
    if tp > host.cores:
        yield Finding(
            message=f"{tp} ranks share {host.cores} cores and wait for each other: choose --tp up "
            f"to {host.cores}"
        )
    if host.cpu_quota and host.cpu_quota < host.cores and not threads:
        yield Finding(
            message=f"the control group grants {host.cpu_quota:g} CPUs and {host.cores} are "
            f"visible, so threads are stopped in between: set OMP_NUM_THREADS="
            f"{max(1, int(host.cpu_quota / tp))}, or raise the quota"
        )


def _memory(host: HostReport, model: ModelFit | None) -> Iterator[Finding]:
    free = host.memory_available
    if model is not None and not model.fits:
        yield Finding(
            message=f"{model.name} in {model.dtype} needs {_gib(model.weight_bytes)} for its "
            f"weights and {_gib(free)} of memory are free: free memory, choose --dtype bfloat16 "
            "if it is not, or a smaller model",
            fatal=True,
        )
    elif model is not None and model.kv_tokens < 1024:
        yield Finding(
            message=f"the KV cache would hold {model.kv_tokens} tokens: free memory, or give "
            "--memory-utilization above 0.25, the share of it that the cache gets"
        )
    if free < LITTLE_MEMORY:
        limit = f" (the control group's limit is {_gib(host.memory_limit)})"
        yield Finding(
            message=f"{_gib(free)} of memory are free{limit if host.memory_limit else ''}: close "
            "other programs or raise the limit; the demo model alone needs about 1 GiB on a rank"
        )


def _sockets(host: HostReport, linux: bool, tp: int) -> Iterator[Finding]:
    if host.private_directory_fault:
        yield Finding(message=host.private_directory_fault, fatal=True)
    if host.socket_path_bytes > MAX_SOCKET_PATH:
        yield Finding(
            message=f"socket paths in {host.private_directory} have {host.socket_path_bytes} bytes "
            f"of at most {MAX_SOCKET_PATH}: set TMPDIR to a shorter directory",
            fatal=True,
        )
    known = ", ".join(host.interfaces) or "none"
    if host.gloo_interface and host.gloo_interface not in host.interfaces:
        yield Finding(
            message=f"GLOO_SOCKET_IFNAME={host.gloo_interface} is no network interface: unset it, "
            f"or choose one of {known}",
            fatal=tp > 1,
        )
    if not host.gloo_interface and linux and "lo" not in host.interfaces:
        yield Finding(
            message='the loopback interface "lo" is missing, where ranks of one host meet: bring '
            f"it up (ip link set lo up), or set GLOO_SOCKET_IFNAME to one of {known}",
            fatal=tp > 1,
        )


def _devices(host: HostReport) -> Iterator[Finding]:
    if not host.num_gpus:
        return
    if not host.torch_has_cuda:
        yield Finding(
            message=f"{_count(host.num_gpus, 'GPU')} can be seen and torch is built without CUDA: "
            "install a torch with CUDA"
        )
    if host.shm_total < LITTLE_SHM:
        size = "missing" if host.shm_total < 0 else f"{host.shm_total >> 20} MiB"
        yield Finding(
            message=f"/dev/shm is {size} and NCCL keeps its buffers there: in a container give it "
            "--shm-size=1g or --ipc=host"
        )


def _probed(probes: ProbeReport) -> Iterator[Finding]:
    if probes.measured is None:
        yield Finding(
            message=f"{probes.fault}: what it wrote above says why; a firewall on the loopback "
            "interface, a lack of memory and a broken torch are the usual causes",
            fatal=True,
        )
        return
    yield from _exactness(probes.measured)
    yield from _collectives(probes.measured.collectives)


def _exactness(measured: Measured) -> Iterator[Finding]:
    if not measured.onednn:
        yield Finding(
            message="this torch has no oneDNN, so products are exact at few row counts and "
            "slower: install the torch of a release for this processor"
        )
    slow = [str(proof.head_dim) for proof in measured.attention if proof.one_thread]
    if slow:
        yield Finding(
            message=f"attention of head_dim {', '.join(slow)} is exact on one thread only, and "
            f"uses one of {measured.threads}: more ranks (--tp) use the other cores"
        )
    for dtype in ("float32", "bfloat16"):
        yield from _heights(
            dtype, [proof for proof in measured.linear if proof.shape.dtype == dtype]
        )


def _heights(dtype: str, proofs: Iterable[LinearProof]) -> Iterator[Finding]:
    """Say once per dtype what the worst shape costs. The answer is right at any height."""
    broken = [proof for proof in proofs if proof.inexact]
    if not broken:
        return
    worst = min(broken, key=lambda proof: (max(proof.exact), -len(proof.inexact)))
    least, most = min(worst.exact), max(worst.exact)
    shape = f"[{worst.shape.out_features}, {worst.shape.in_features}]"
    cost = f"prompts are computed in pieces of at most {most} rows"
    if least > min(worst.inexact):
        cost = f"a single token costs as much as {least}, and {cost}"
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    yield Finding(
        message=f"{dtype} products with {_count(len(broken), 'weight shape')} are not exact at "
        f"every row count (of {shape} at {_list(worst.inexact)}): answers stay the same, {cost}; "
        f"compare with --dtype {other}"
    )


def _collectives(times: Iterable[CollectiveTime]) -> Iterator[Finding]:
    slow = [time for time in times if time.seconds > SLOW_COLLECTIVE_S]
    if slow:
        worst = max(slow, key=lambda time: time.seconds)
        yield Finding(
            message=f"an all-reduce of {worst.rows} rows over {worst.ranks} ranks takes "
            f"{worst.seconds * 1e3:.1f} ms, and a layer has two: end other programs, or choose a "
            "smaller --tp"
        )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
