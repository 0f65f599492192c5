"""`unisono doctor [MODEL]`: can this machine run it, how fast is it, and what to do about the rest.

Everything is measured in processes of their own, started and wired like an engine's ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from unisono.launcher.cluster import detect_cluster
from unisono.launcher.console import Console
from unisono.launcher.doctor.advice import Finding, ModelFit, findings
from unisono.launcher.doctor.probes import ProbePlan, ProbeReport, run_probes, unproven
from unisono.launcher.host_report import HostReport, is_linux, read_host
from unisono.launcher.options import config_options, given, make_launch_config, option_spec
from unisono.models.config import ConfigError, ModelConfig
from unisono.models.partition import ModelPartition, legal_rank_counts
from unisono.runtime.protocol import EngineError
from unisono.workers.config import BLOCK_SIZE, HOST_SHARE
from unisono.workers.probes import LinearShape, Measured

OPTIONS = ("tp", "dtype")
MOST_RANKS = 64
WIDTH = 100
PROBE_TIMEOUT_S = 60.0
STREAM_BYTES = 512 << 20
"""More than the caches of most processors hold."""
HEAD_DIMS = (64, 128)
HIDDEN_SIZE = 2048
SHAPES = ((576, 576), (1536, 576), (2048, 2048))
"""Weights [out, in] whose heights are proven where no model is given."""
LARGEST_WEIGHT = 64 << 20
"""Elements: the proof of a larger one would take too long."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Unusable(EngineError):
    """Something on this machine must be put right before unisono can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything `unisono doctor` says; its JSON output has these names."""

    usable: bool
    findings: tuple[Finding, ...]
    host: HostReport
    tp: int
    model: ModelFit | None
    probes: ProbeReport
    unproven: tuple[LinearShape, ...]
    """Weights for whose proof the time was not enough."""


@click.command("doctor")
@click.argument("model", required=False)
@config_options(*OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object on stdout.")
def command(model: str | None, as_json: bool, **options: Any) -> int:
    """Examine this machine: versions, memory, speed, exactness, and what to do about it.

    With MODEL its own shapes are examined, and whether it fits. Ends with 1 where something makes
    unisono unusable.
    """
    cluster = detect_cluster(os.environ)
    if cluster is not None and cluster.world_size > 1:
        raise ConfigError(
            f"doctor starts its own ranks, and {cluster.launcher} started it {cluster.world_size} "
            "times: run it once on each host"
        )
    asked = given(options, OPTIONS)
    tp, dtype = asked.get("tp", 1), asked.get("dtype", "auto")
    if tp > MOST_RANKS:
        raise ConfigError(f"{option_spec('tp').flag} {tp}: choose 1 to {MOST_RANKS}")
    if dtype not in ("auto", *_ITEM_BYTES):
        raise ConfigError(f"--dtype {dtype}: on cpu choose {' or '.join(_ITEM_BYTES)}")
    cores = len(os.sched_getaffinity(0)) if is_linux() else os.cpu_count() or 1
    host = read_host(os.environ, cores)
    partition = None if model is None else _partition(model, asked)
    dtype = "float32" if dtype == "auto" else dtype
    fit = None if partition is None else model_fit(str(model), partition, dtype, host)
    plan = probe_plan(partition, dtype, tp, host)
    diagnosis = _diagnose(host, tp, fit, plan, _run(host, plan, cores))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(diagnosis), default=list))
    else:
        click.echo("\n".join(plain_lines(diagnosis)))
    if not diagnosis.usable:
        raise Unusable(f"unusable: {diagnosis.findings[0].message}")
    return 0


def model_fit(name: str, partition: ModelPartition, dtype: str, host: HostReport) -> ModelFit:
    """Compute what a model needs in `dtype`, and whether this host has it."""
    config, item = partition.config, _ITEM_BYTES[dtype]
    ranks = range(partition.ranks)
    # The head is packed in float32, beside the embedding where the two are tied.
    head = config.vocab_size * config.hidden_size * (4 if config.tie_word_embeddings else 4 - item)
    read = sum(spec.nbytes(item) for rank in ranks for spec in partition.weights(rank))
    weights = read + head
    per_token = config.num_kv_layers * sum(map(partition.kv_elements, ranks)) * item
    left = host.memory_available - weights
    return ModelFit(
        name=name,
        dtype=dtype,
        tp=partition.ranks,
        legal_rank_counts=legal_rank_counts(config),
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        fits=left * HOST_SHARE >= per_token * BLOCK_SIZE,
        kv_tokens=max(int(left * HOST_SHARE) // per_token, 0),
    )


def probe_plan(
    partition: ModelPartition | None, dtype: str, tp: int, host: HostReport
) -> ProbePlan:
    """Choose what is measured: the model's own shapes, or some usual ones in both dtypes."""
    if partition is None:
        shapes = [
            LinearShape(name="example", out_features=out, in_features=width, dtype=kind)
            for kind in _ITEM_BYTES
            for out, width in SHAPES
        ]
    else:
        shapes = list(_rank_shapes(partition, dtype))
    return ProbePlan(
        ranks=max(tp, 2),
        shapes=tuple(shape for shape in shapes if _num_elements(shape) <= LARGEST_WEIGHT),
        too_large=tuple(shape for shape in shapes if _num_elements(shape) > LARGEST_WEIGHT),
        head_dims=HEAD_DIMS if partition is None else (partition.config.head_dim,),
        hidden_size=HIDDEN_SIZE if partition is None else partition.config.hidden_size,
        stream_bytes=max(min(STREAM_BYTES, host.memory_available // 8), 1 << 20),
    )


def plain_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as text lines of at most `WIDTH` columns."""
    lines: list[str] = []
    for label, value in (*_host_facts(diagnosis.host), *_model_facts(diagnosis.model)):
        lines += _folded(f"{label:<20}", value)
    for line in diagnosis.host.links:
        lines += [line[start : start + WIDTH] for start in range(0, len(line), WIDTH)]
    if diagnosis.probes.measured is not None:
        for label, value in _measured_facts(diagnosis.probes, diagnosis.probes.measured):
            lines += _folded(f"{label:<20}", value)
    if diagnosis.unproven:
        names = ", ".join(dict.fromkeys(shape.name for shape in diagnosis.unproven))
        lines += _folded(f"{'not proven':<20}", f"{names}: too large for the time")
    lines.append("")
    for finding in diagnosis.findings:
        lines += _folded("problem: " if finding.fatal else "warning: ", finding.message)
    return [*lines, "unisono can run here" if diagnosis.usable else "unisono cannot run here"]


def _partition(model: str, asked: dict[str, Any]) -> ModelPartition:
    from unisono.launcher.model_source import read_source_config, resolve_model
    from unisono.launcher.resolve import check_checkpoint

    with Console().fetching() as fetched:
        source = resolve_model(model, fetched)
    config: ModelConfig = read_source_config(source, "auto")
    worker = make_launch_config(asked, model_path=str(source.path), model=config).runtime.worker
    partition = ModelPartition.of(config, worker.tp)
    if source.kind != "shape":
        check_checkpoint(source.path, partition, weights_required=False)
    return partition


def _run(host: HostReport, plan: ProbePlan, cores: int) -> ProbeReport:
    if host.private_directory_fault:
        return ProbeReport(measured=None, fault="nothing was measured without a directory")
    return run_probes(plan, os.environ, cores, PROBE_TIMEOUT_S)


def _diagnose(
    host: HostReport, tp: int, fit: ModelFit | None, plan: ProbePlan, probes: ProbeReport
) -> Diagnosis:
    skipped = bool(host.private_directory_fault)
    found = findings(host, is_linux(), tp, None if skipped else probes, fit)
    return Diagnosis(
        usable=not any(finding.fatal for finding in found),
        findings=tuple(found),
        host=host,
        tp=tp,
        model=fit,
        probes=probes,
        unproven=() if probes.measured is None else unproven(plan, probes.measured),
    )


def _rank_shapes(partition: ModelPartition, dtype: str) -> Iterator[LinearShape]:
    """The weights of rank 0 as they are packed: fused, and the head in float32."""
    config = partition.config
    queries = partition.heads.size(0) * config.head_dim
    keys = partition.kv_heads.size(0) * config.head_dim
    hidden = config.hidden_size
    shapes = [
        ("qkv", queries * (1 + config.attn_output_gate) + 2 * keys, hidden),
        ("o_proj", hidden, queries),
    ]
    if delta := config.delta:
        values = partition.value_heads.size(0) * delta.value_head_dim
        mixed = 2 * partition.key_heads.size(0) * delta.key_head_dim + values
        shapes += [("delta in", mixed + values, hidden), ("delta out", hidden, values)]
    for name, cut in (
        ("", partition.mlp),
        ("expert ", partition.experts),
        ("shared expert ", partition.shared_expert),
    ):
        if width := cut.size(0):
            shapes.append((name + "gate and up", 2 * width, hidden))
            shapes.append((name + "down_proj", hidden, width))
    for name, out, inner in shapes:
        yield LinearShape(name=name, out_features=out, in_features=inner, dtype=dtype)
    yield LinearShape(
        name="head", out_features=partition.vocab.size(0), in_features=hidden, dtype="float32"
    )


def _num_elements(shape: LinearShape) -> int:
    return shape.out_features * shape.in_features


def _host_facts(host: HostReport) -> Iterator[tuple[str, str]]:
    yield "unisono", f"{host.unisono}, Python {host.python}"
    yield (
        "libraries",
        ", ".join(f"{each.name} {each.installed or 'missing'}" for each in host.libraries),
    )
    quota = f", {host.cpu_quota:g} granted by the control group" if host.cpu_quota else ""
    yield "processor", f"{host.cpu}, {host.cores} usable cores{quota}"
    limit = f", control group's limit {_gib(host.memory_limit)}" if host.memory_limit else ""
    yield (
        "memory",
        f"{_gib(host.memory_available)} free of {_gib(host.memory_total)}{limit}",
    )
    shm = "missing"
    if host.shm_total >= 0:
        shm = f"{_gib(host.shm_free)} free of {_gib(host.shm_total)}"
    yield "/dev/shm", shm
    state = "not writable" if host.private_directory_fault else "writable"
    yield (
        "sockets",
        f"in {host.private_directory}, {state}, paths of {host.socket_path_bytes} bytes",
    )
    yield "interfaces", ", ".join(host.interfaces) or "none"
    gpus = f"{host.num_gpus} visible GPU" + ("" if host.num_gpus == 1 else "s")
    yield "devices", f"{gpus}; this version computes on: {', '.join(host.served_devices)}"


def _model_facts(model: ModelFit | None) -> Iterator[tuple[str, str]]:
    if model is None:
        return
    ranks = f"{model.tp} rank" + ("" if model.tp == 1 else "s")
    yield "model", f"{model.name} in {model.dtype} on {ranks}"
    yield "legal rank counts", ", ".join(map(str, model.legal_rank_counts))
    fits = "fits" if model.fits else "does not fit"
    yield (
        "weights",
        f"{_gib(model.weight_bytes)}, {fits}; KV cache for {model.kv_tokens:,} tokens",
    )


def _measured_facts(probes: ProbeReport, measured: Measured) -> Iterator[tuple[str, str]]:
    threads = f"{measured.threads} thread" + ("" if measured.threads == 1 else "s")
    yield "memory bandwidth", f"{measured.bytes_per_s / 1e9:.1f} GB/s read by {threads}"
    speeds = [f"{each.flops_per_s / 1e9:,.0f} GFLOP/s {each.dtype}" for each in measured.matrix]
    yield "matrix products", ", ".join(speeds)
    for each in measured.collectives:
        rows = f"{each.rows} row" + ("" if each.rows == 1 else "s")
        yield (
            f"all-reduce, {each.ranks} ranks",
            f"{each.seconds * 1e6:,.0f} us for {rows} of a step of decoding",
        )
    if measured.gpu_collectives:
        yield "GPUs of one host", f"exchange numbers over {measured.gpu_collectives}"
    for trip in probes.round_trips:
        yield (
            "message and answer",
            f"{trip.seconds * 1e6:,.0f} us with {trip.payload_bytes:,} bytes",
        )
    for proof in measured.attention:
        how = "one thread only" if proof.one_thread else "all threads"
        yield f"head_dim {proof.head_dim}", f"attention exact on {how}"
    for each_proof in measured.linear:
        shape = each_proof.shape
        inexact = ", ".join(map(str, each_proof.inexact))
        yield (
            shape.name,
            f"[{shape.out_features}, {shape.in_features}] {shape.dtype}: exact at "
            + (f"all row counts but {inexact}" if inexact else "every row count"),
        )


def _folded(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        label + text,
        WIDTH,
        subsequent_indent=" " * len(label),
        drop_whitespace=True,
        break_on_hyphens=False,
    )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
