"""From what the user asked to a `LaunchConfig` with no "auto" left, before any process starts.

`resolve_config` is pure: the same options, model and host facts give the same config. `prepare`
reads what it needs (the model's config, the headers of its weights, the host) and calls it.
Everything is torch-free, and every refusal is a ConfigError of one line.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.launcher.cluster import ClusterFacts, check_cluster_tp
from unisono.launcher.config import LaunchConfig
from unisono.launcher.graph_options import resolve_graphs
from unisono.launcher.model_source import ModelSource, read_source_config, resolve_model
from unisono.launcher.option_kinds import whole_number
from unisono.launcher.options import make_launch_config
from unisono.launcher.result_file import check_result_file
from unisono.models.config import (
    ConfigError,
    ModelConfig,
    max_model_len_limit,
)
from unisono.models.headers import check_weights, has_safetensors, read_headers
from unisono.models.overlay import parse_overlay
from unisono.models.partition import ModelPartition
from unisono.models.shapes import is_shape
from unisono.runtime.config import STEP_TOKENS
from unisono.workers.config import DTYPES, SERVED_DEVICES, WorkerConfig

CPU_DTYPES = ("float32", "bfloat16")
"""What the operations compute in on a CPU."""
FLASH_HEAD_DIM = 256
"""Widest heads that torch's flash attention takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What this host offers, found out without importing torch."""

    num_gpus: int
    """GPUs that a process started here would see."""
    torch_has_cuda: bool
    """Whether the installed torch was built for CUDA."""
    served: tuple[str, ...] = SERVED_DEVICES
    """Device types that this version computes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that can be served, and how."""

    source: ModelSource
    launch: LaunchConfig

    @property
    def worker(self) -> WorkerConfig:
        return self.launch.runtime.worker

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is text: not for a shape, nor for random weights of a bare config."""
        bare = self.source.kind == "huggingface" and self.worker.load_format == "random"
        return self.source.kind != "shape" and not (
            bare and not (self.source.path / "tokenizer.json").exists()
        )


def prepare(
    model_name: str,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    cluster: ClusterFacts | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Find the model, read its config and headers, and resolve the options.

    `on_progress` hears of the bytes done and in total if the model has to be fetched.

    Raises ConfigError (PartitionError, CheckpointError) for everything a user can get wrong
    before a process starts.
    """
    source = resolve_model(model_name, on_progress)
    model = read_source_config(source, options.get("load_format", "auto"))
    launch = resolve_config(options, str(source.path), model, host_facts(environ), cluster)
    if "trace" in options:
        launch = replace(launch, trace=str(check_result_file("--trace", launch.trace)))
    if launch.runtime.worker.load_format != "random":
        worker = launch.runtime.worker
        drafts = worker.num_drafts > 0
        check_checkpoint(source.path, ModelPartition.of(model, worker.tp, drafts=drafts))
    return Prepared(source=source, launch=launch)


def check_checkpoint(
    path: Path, partition: ModelPartition, *, weights_required: bool = True
) -> tuple[str, ...]:
    """Compare the headers of all weight files with the config; return the names of tensors that
    are ignored. Raises CheckpointError.

    Without `weights_required` a directory that holds a config and no weights passes.
    """
    if weights_required or path.is_file() or has_safetensors(path):
        return check_weights(read_headers(path), partition)
    return ()


def resolve_config(
    options: Mapping[str, Any],
    model_path: str,
    model: ModelConfig,
    host: HostFacts,
    cluster: ClusterFacts | None = None,
) -> LaunchConfig:
    """Return a config in which nothing is left open: tp, device, dtype, max_model_len,
    max_step_tokens and graph_buckets are decided.

    `options` holds the values the user gave, by field name. Under a cluster launcher tp is the
    number of its ranks. The weights of a shape are always random. Raises ConfigError.
    """
    asked = make_launch_config(options, model_path=model_path, model=model)
    worker = asked.runtime.worker
    tp = _resolve_tp(options, worker.tp, cluster)
    ModelPartition.of(model, tp)
    check_states(options, model)
    _check_speculation(worker.speculate, worker.accept, model)
    device = resolve_device(worker.device, host)
    check_device(device, host, tp if cluster is None else cluster.local_world_size)
    check_collectives(worker.collectives, device, tp)
    parse_overlay(worker.overlay, model)
    dtype = resolve_dtype(worker.dtype, device, model)
    worker = replace(
        worker,
        tp=tp,
        load_format="random" if is_shape(model_path) else worker.load_format,
        device=device,
        dtype=dtype,
        attn=resolve_attn(worker.attn, worker.numerics, device, dtype, model),
        max_model_len=resolve_max_model_len(worker.max_model_len, model),
    )
    most = asked.runtime.max_step_tokens or STEP_TOKENS[device]
    runtime = replace(asked.runtime, worker=resolve_graphs(worker), max_step_tokens=most)
    return replace(asked, runtime=runtime)


def resolve_device(device: str, host: HostFacts) -> str:
    """Return cpu or cuda; "auto" is cuda where a GPU is visible, and torch and we can use it."""
    if device != "auto":
        return device
    usable = host.num_gpus and host.torch_has_cuda and "cuda" in host.served
    return "cuda" if usable else "cpu"


def resolve_dtype(dtype: str, device: str, model: ModelConfig) -> str:
    """Return float32, bfloat16 or float16. Raises ConfigError for an impossible pair."""
    if dtype == "auto":
        return "float32" if device == "cpu" else model.dtype
    legal = CPU_DTYPES if device == "cpu" else DTYPES[1:]
    if dtype not in legal:
        raise ConfigError(f"--dtype {dtype}: on {device} choose {' or '.join(legal)}")
    return dtype


def resolve_attn(attn: str, numerics: str, device: str, dtype: str, model: ModelConfig) -> str:
    """Return triton, torch-flash or reference; on the CPU tiled or reference.

    Raises ConfigError for an attention that the device has not, that cannot serve the model, or
    that `numerics` does not permit.
    """
    if attn == "auto":
        return "triton" if device == "cuda" else "tiled"
    if attn == "reference":
        return attn
    if device == "cpu":
        raise ConfigError(f"--attn {attn}: needs a GPU; on cpu choose auto or reference")
    if attn == "torch-flash":
        _check_flash(numerics, dtype, model)
    return attn


def check_collectives(collectives: str, device: str, tp: int) -> None:
    """Raise ConfigError for a way to exchange numbers that `tp` ranks on `device` have not."""
    if collectives == "auto":
        return
    if device == "cpu":
        raise ConfigError(
            f"--collectives {collectives}: needs GPUs, and ranks on cpu meet over gloo; choose auto"
        )
    if tp == 1:
        raise ConfigError(
            f"--collectives {collectives}: one rank exchanges nothing; choose auto, or --tp 2 or "
            "more"
        )


def resolve_max_model_len(max_model_len: int, model: ModelConfig) -> int:
    """Return the most tokens of one request; 0 asks for the model's own limit."""
    limit = max_model_len_limit(model)
    if max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model's limit is {limit} tokens; "
            f"choose 2 to {limit}, or 0 for the limit"
        )
    return max_model_len or limit


def with_tokenizer(launch: LaunchConfig, size: int, eos_ids: Iterable[int]) -> LaunchConfig:
    """The same config with what the tokenizer knows.

    Ids from `size` on are never chosen, and the end tokens that it names end an answer as well.
    """
    worker = launch.runtime.worker
    eos = tuple(sorted({*worker.model.eos_token_ids, *eos_ids}))
    worker = replace(
        worker,
        model=replace(worker.model, eos_token_ids=eos),
        num_token_ids=min(size, worker.model.vocab_size),
    )
    return replace(launch, runtime=replace(launch.runtime, worker=worker))


def host_facts(environ: Mapping[str, str]) -> HostFacts:
    """Look at this host. Never imports torch."""
    return HostFacts(num_gpus=count_gpus(environ), torch_has_cuda=_torch_has_cuda())


def num_cores() -> int:
    """Count the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Count the GPUs that CUDA would show to a process with this environment.

    Like CUDA, CUDA_VISIBLE_DEVICES is read up to its first entry that names no GPU.
    """
    present = sum(1 for _ in devices.glob("nvidia[0-9]*"))
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return present
    visible = 0
    for entry in environ["CUDA_VISIBLE_DEVICES"].split(","):
        name = entry.strip()
        number = whole_number(name)
        if not (name.startswith(("GPU-", "MIG-")) or (number is not None and number < present)):
            break
        visible += 1
    return min(visible, present)


def check_states(options: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError for options about recurrent states of a model without any, or too few."""
    slots, requests = options.get("state_slots", 0), options.get("max_requests", 0)
    for flag, value in (("--state-slots", slots), ("--state-dtype", options.get("state_dtype"))):
        if value and not model.is_hybrid:
            raise ConfigError(
                f"{flag} {value}: is for models with a recurrent state, and {model.family} keeps a "
                "KV cache alone; leave it out"
            )
    if slots and slots < requests:
        raise ConfigError(
            f"--state-slots {slots}: each of --max-requests {requests} needs a state; choose at "
            "least as many, or 0 (automatic)"
        )


def _check_flash(numerics: str, dtype: str, model: ModelConfig) -> None:
    others = "--attn auto, triton or reference"
    windows = [window for layer in range(model.num_layers) if (window := model.window_of(layer))]
    if windows:
        raise ConfigError(
            f"--attn torch-flash: serves no sliding window, and this model has one of {windows[0]} "
            f"tokens; choose {others}"
        )
    if model.head_dim > FLASH_HEAD_DIM:
        raise ConfigError(
            f"--attn torch-flash: serves heads of up to {FLASH_HEAD_DIM} channels, and this "
            f"model's have {model.head_dim}; choose {others}"
        )
    if dtype == "float32":
        raise ConfigError(
            "--attn torch-flash: serves no float32; choose --dtype bfloat16 or float16, or "
            f"{others}"
        )
    if numerics == "exact":
        raise ConfigError(
            "--attn torch-flash: --numerics exact refuses it, since a token has other bits decoded "
            f"than in a prompt; choose {others}, or --numerics fast"
        )


def _check_speculation(speculate: str, accept: str, model: ModelConfig) -> None:
    if speculate != "off" and not model.num_mtp_layers:
        raise ConfigError(
            f"--speculate {speculate}: drafts come from a layer of the model's own (MTP), and this "
            "checkpoint has none; choose a model that has one, or off"
        )
    if accept == "rejection" and speculate == "off":
        raise ConfigError(
            "--accept rejection: judges drafts, and --speculate off makes none; choose coupled, or "
            "--speculate auto or 1 to 8"
        )


def _resolve_tp(options: Mapping[str, Any], tp: int, cluster: ClusterFacts | None) -> int:
    if cluster is None:
        return tp
    if "tp" in options:
        check_cluster_tp(tp, cluster)
    return cluster.world_size


def check_device(device: str, host: HostFacts, ranks: int) -> None:
    """Raise ConfigError unless `ranks` ranks of this host can compute on `device`."""
    if device == "cpu":
        return
    if not host.num_gpus:
        raise ConfigError("--device cuda: no GPU is visible here; choose cpu or auto")
    if not host.torch_has_cuda:
        raise ConfigError(
            "--device cuda: the installed torch is built without CUDA; choose cpu or auto"
        )
    if host.num_gpus < ranks:
        raise ConfigError(
            f"tp={ranks} on cuda: every rank needs a GPU and {host.num_gpus} are visible; "
            f"choose --tp up to {host.num_gpus}, or --device cpu"
        )


def _torch_has_cuda() -> bool:
    """Read what torch was built for from its version file: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, flags=re.MULTILINE) is not None
