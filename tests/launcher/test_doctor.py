"""`unisono doctor`: every warning from faked facts, and once from this machine."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import pytest

from tests.end_to_end import command
from tests.launcher.fakes import tiny_model, write_checkpoint
from unisono.launcher import cli
from unisono.launcher.doctor.advice import Finding, findings
from unisono.launcher.doctor.command import (
    LARGEST_WEIGHT,
    WIDTH,
    Diagnosis,
    model_fit,
    plain_lines,
    probe_plan,
)
from unisono.launcher.doctor.probes import ProbeReport, RoundTrip, unproven
from unisono.launcher.host_report import HostReport, Library, read_host, requirements, satisfies
from unisono.models.partition import ModelPartition
from unisono.models.shapes import SHAPES
from unisono.workers.probes import (
    AttentionProof,
    CollectiveTime,
    LinearProof,
    LinearShape,
    MatrixSpeed,
    Measured,
)

GIB = 1 << 30
SHAPE = LinearShape(name="qkv", out_features=320, in_features=576, dtype="bfloat16")
HOST = HostReport(
    python="3.11.7",
    unisono="0.1.0",
    libraries=(Library(name="torch", wanted=">=2.11,<2.14", installed="2.13.0+cpu"),),
    cpu="a processor",
    cores=8,
    cpu_quota=0.0,
    omp_num_threads="",
    memory_total=32 * GIB,
    memory_available=30 * GIB,
    memory_limit=0,
    shm_total=16 * GIB,
    shm_free=16 * GIB,
    private_directory="/tmp",
    private_directory_fault="",
    socket_path_bytes=38,
    interfaces=("lo", "eth0"),
    gloo_interface="",
    num_gpus=0,
    torch_has_cuda=False,
    served_devices=("cpu", "cuda"),
    links=(),
)
MEASURED = Measured(
    torch="2.13.0",
    threads=8,
    onednn=True,
    bytes_per_s=30e9,
    matrix=(MatrixSpeed(dtype="float32", flops_per_s=9e10),),
    attention=(AttentionProof(head_dim=64, one_thread=False),),
    linear=(LinearProof(shape=SHAPE, exact=(2, 4, 8, 16, 32), inexact=()),),
    collectives=(CollectiveTime(ranks=2, rows=1, seconds=2e-4),),
)
TRIPS = (RoundTrip(payload_bytes=4, seconds=1e-4),)


def advise(tp=1, model=None, linux=True, probes=None, **changes) -> list[Finding]:
    report = ProbeReport(measured=MEASURED, round_trips=TRIPS) if probes is None else probes
    return findings(dataclasses.replace(HOST, **changes), linux, tp, report, model)


def advise_measured(**changes) -> list[Finding]:
    measured = dataclasses.replace(MEASURED, **changes)
    return advise(probes=ProbeReport(measured=measured, round_trips=TRIPS))


def fit_of(available: int, tp: int = 1, dtype: str = "float32", **changes):
    host = dataclasses.replace(HOST, memory_available=available)
    return model_fit("m", ModelPartition.of(tiny_model(**changes), tp), dtype, host)


def test_a_good_machine_gets_no_advice():
    assert advise() == []
    assert advise(tp=8, omp_num_threads="1") == []
    assert advise(omp_num_threads="8", cpu_quota=4.0) == []
    assert advise(gloo_interface="eth0", interfaces=("eth0",), tp=2) == []


def library(installed: str) -> tuple[Library, ...]:
    return (Library(name="torch", wanted=">=2.11,<2.14", installed=installed),)


@pytest.mark.parametrize(
    ("facts", "fatal", "message"),
    [
        ({"python": "3.10.2"}, True, "Python 3.10.2 is not >=3.11: make"),
        ({"libraries": library("")}, True, "torch is not installed: pip install 'torch>=2.11,"),
        ({"libraries": library("2.10.1")}, False, "torch 2.10.1 is not >=2.11,<2.14"),
        ({"libraries": library("2.14.0")}, False, "torch 2.14.0 is not >=2.11,<2.14"),
        (
            {"omp_num_threads": "1"},
            False,
            "OMP_NUM_THREADS=1 leaves 7 of 8 cores idle: unset it, or set it to 8",
        ),
        (
            {"omp_num_threads": "8", "tp": 2},
            False,
            "OMP_NUM_THREADS=8 on 2 ranks is more than the 8 cores: unset it, or set it to 4",
        ),
        ({"omp_num_threads": "²", "tp": 9}, False, "9 ranks share 8 cores and wait for each other"),
        ({"tp": 9}, False, "9 ranks share 8 cores and wait for each other: choose --tp up to 8"),
        ({"cpu_quota": 4.0, "tp": 2}, False, "set OMP_NUM_THREADS=2, or raise the quota"),
        ({"memory_available": GIB // 2}, False, "0.50 GiB of memory are free: close"),
        (
            {"memory_available": GIB // 2, "memory_limit": GIB},
            False,
            "are free (the control group's limit is 1.00 GiB): close other programs or raise",
        ),
        ({"private_directory_fault": "set TMPDIR"}, True, "set TMPDIR"),
        ({"socket_path_bytes": 101}, True, "set TMPDIR to a shorter directory"),
        (
            {"gloo_interface": "eth7"},
            False,
            "GLOO_SOCKET_IFNAME=eth7 is no network interface: unset it, or choose one of lo, eth0",
        ),
        ({"gloo_interface": "eth7", "tp": 2}, True, "GLOO_SOCKET_IFNAME=eth7"),
        ({"interfaces": ("eth0",)}, False, 'the loopback interface "lo" is missing'),
        ({"interfaces": ("eth0",), "tp": 2}, True, "set GLOO_SOCKET_IFNAME to one of eth0"),
        (
            {"num_gpus": 2},
            False,
            "2 GPUs can be seen and torch is built without CUDA: install a torch with CUDA",
        ),
        (
            {"num_gpus": 1, "torch_has_cuda": True, "shm_total": 64 << 20},
            False,
            "/dev/shm is 64 MiB and NCCL keeps its buffers there: in a container give it --shm",
        ),
        (
            {"probes": ProbeReport(measured=None, fault="rank 1 ended with code 1")},
            True,
            "rank 1 ended with code 1: what it wrote above says why",
        ),
    ],
)
def test_advice(facts, fatal, message):
    [finding] = advise(**facts)
    assert message in finding.message
    assert finding.fatal == fatal


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"onednn": False}, "this torch has no oneDNN"),
        (
            {"attention": (AttentionProof(head_dim=80, one_thread=True),)},
            "attention of head_dim 80 is exact on one thread only, and uses one of 8: more ranks",
        ),
        (
            {"collectives": (CollectiveTime(ranks=2, rows=32, seconds=5e-3),)},
            "an all-reduce of 32 rows over 2 ranks takes 5.0 ms",
        ),
        (
            {"linear": (LinearProof(shape=SHAPE, exact=(2, 4, 8, 16, 32), inexact=(48, 64)),)},
            "bfloat16 products with 1 weight shape are not exact at every row count (of [320, 576] "
            "at 48, 64): answers stay the same, prompts are computed in pieces of at most 32 rows",
        ),
        (
            {"linear": (LinearProof(shape=SHAPE, exact=(16, 32), inexact=(2, 4, 8)),)},
            "a single token costs as much as 16, and prompts are computed in pieces of at most 32",
        ),
    ],
)
def test_advice_from_measurements(facts, message):
    [finding] = advise_measured(**facts)
    assert message in finding.message
    assert not finding.fatal


def test_what_is_fatal_comes_first():
    found = advise(omp_num_threads="1", python="3.10.0", num_gpus=1)
    assert [finding.fatal for finding in found] == [True, False, False]


def test_a_model_that_does_not_fit():
    fit = fit_of(100_000)
    assert not fit.fits
    found = advise(model=fit, memory_available=100_000)
    assert "m in float32 needs 0.00 GiB for its weights" in found[0].message
    assert found[0].fatal


def test_a_model_with_little_room_for_its_cache():
    weights = fit_of(GIB).weight_bytes
    per_token = fit_of(GIB).kv_bytes_per_token
    fit = fit_of(weights + 4 * 100 * per_token)
    assert (fit.fits, fit.kv_tokens) == (True, 100)
    [finding] = advise(model=fit)
    assert (
        "the KV cache would hold 100 tokens: free memory, or give --memory-utilization"
        in finding.message
    )
    assert not finding.fatal


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_memory_counts_the_head_in_float32(dtype, item, tied):
    table, layers = 300 * 36, 2 * (36 * 4 * (9 + 6) + 36 * 36 + 3 * 36 * 64 + 2 * 36) + 36
    fit = fit_of(GIB, dtype=dtype, tie_word_embeddings=tied)
    assert fit.weight_bytes == (table + layers) * item + table * 4
    assert fit.kv_bytes_per_token == 2 * 2 * 3 * 4 * item


def test_the_model_s_own_shapes_are_proven():
    partition = ModelPartition.of(tiny_model(), 2)
    plan = probe_plan(partition, "bfloat16", 2, HOST)
    shapes = {
        shape.name: (shape.out_features, shape.in_features, shape.dtype) for shape in plan.shapes
    }
    assert shapes == {
        "qkv": ((6 + 2 * 2) * 4, 36, "bfloat16"),
        "o_proj": (36, 6 * 4, "bfloat16"),
        "gate and up": (2 * 32, 36, "bfloat16"),
        "down_proj": (36, 32, "bfloat16"),
        "head": (192, 36, "float32"),
    }
    assert (plan.ranks, plan.head_dims, plan.hidden_size) == (2, (4,), 36)


def test_a_hybrid_s_own_shapes_are_proven():
    partition = ModelPartition.of(SHAPES["qwen3.5-35b-a3b"], 2)
    shapes = {
        shape.name: (shape.out_features, shape.in_features)
        for shape in probe_plan(partition, "bfloat16", 2, HOST).shapes
    }
    assert shapes == {
        "qkv": ((2 * 8 + 2 * 1) * 256, 2048),
        "o_proj": (2048, 8 * 256),
        "delta in": ((2 * 8 + 2 * 16) * 128, 2048),
        "delta out": (2048, 16 * 128),
        "expert gate and up": (2 * 256, 2048),
        "expert down_proj": (2048, 256),
        "shared expert gate and up": (2 * 256, 2048),
        "shared expert down_proj": (2048, 256),
    }


def test_memory_of_a_hybrid_counts_what_keeps_fp32_and_layers_with_kv():
    config = SHAPES["qwen3.5-27b"]
    fit = model_fit("m", ModelPartition.of(config, 1), "bfloat16", HOST)
    specs = list(ModelPartition.of(config, 1).weights(0))
    wide = sum(spec.num_elements for spec in specs if spec.keeps_fp32)
    head = config.vocab_size * config.hidden_size
    count = sum(spec.num_elements for spec in specs)
    assert fit.weight_bytes == 2 * count + 2 * wide + 2 * head
    assert fit.kv_bytes_per_token == 2 * 16 * 4 * 256 * 2


def test_what_is_not_proven_is_named():
    config = tiny_model(vocab_size=2 * LARGEST_WEIGHT // 36)
    plan = probe_plan(ModelPartition.of(config, 1), "float32", 1, HOST)
    assert [shape.name for shape in plan.too_large] == ["head"]
    measured = dataclasses.replace(
        MEASURED,
        linear=tuple(
            LinearProof(shape=shape, exact=(16,), inexact=()) for shape in plan.shapes[:-1]
        ),
    )
    left = unproven(plan, measured)
    assert [shape.name for shape in left] == ["head", "down_proj"]
    lines = plain_lines(diagnosis_of(unproven=left))
    assert "not proven          head, down_proj: too large for the time" in lines


def diagnosis_of(**changes) -> Diagnosis:
    usual = Diagnosis(
        usable=True,
        findings=(),
        host=HOST,
        tp=1,
        model=None,
        probes=ProbeReport(measured=MEASURED, round_trips=TRIPS),
        unproven=(),
    )
    return dataclasses.replace(usual, **changes)


def test_what_gpus_exchange_numbers_over_is_said_where_there_are_some():
    label = "GPUs of one host"
    assert not [line for line in plain_lines(diagnosis_of()) if line.startswith(label)]
    way = "NCCL alone: cuda:0 has no peer access to cuda:1"
    measured = dataclasses.replace(MEASURED, gpu_collectives=way)
    probes = ProbeReport(measured=measured, round_trips=TRIPS)
    assert f"{label:<20}exchange numbers over {way}" in plain_lines(diagnosis_of(probes=probes))


def test_the_page_fits_100_columns():
    many = tuple(
        Library(name=f"library-{number}", wanted="", installed="1.0") for number in range(40)
    )
    host = dataclasses.replace(HOST, libraries=many, links=("GPU0" + " NV18" * 40,), num_gpus=1)
    lines = plain_lines(diagnosis_of(host=host, findings=tuple(advise(num_gpus=1, tp=9))))
    assert max(map(len, lines)) <= WIDTH
    assert "".join(lines).count("NV18") == 40
    assert lines[-1] == "unisono can run here"


@pytest.mark.parametrize(
    ("version", "bounds", "holds"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11", False),
        ("26", ">=26", True),
        ("25.9", ">=26", False),
        ("0.17.3", "==0.17.*", True),
        ("0.18", "==0.17.*", False),
        ("1.4.2", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("3.1.6", "!=3.1.6", False),
        ("1.0rc1", "", True),
    ],
)
def test_version_bounds(version, bounds, holds):
    assert satisfies(version, bounds) is holds


def test_requirements_are_those_of_the_project():
    assert any(line.startswith("torch>=") for line in requirements())
    assert not any("pytest" in line for line in requirements())


def test_limits_of_a_container_are_read(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Abacus 3\n",
        "sys/fs/cgroup/memory.max": "3145728\n",
        "sys/fs/cgroup/memory.current": "1048576\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    host = read_host({"CUDA_VISIBLE_DEVICES": ""}, 4, tmp_path)
    assert (host.memory_available, host.memory_limit) == (2 << 20, 3 << 20)
    assert (host.cpu, host.cpu_quota, host.shm_total) == ("Abacus 3", 1.5, -1)
    assert host.private_directory_fault == ""
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    host = read_host({"CUDA_VISIBLE_DEVICES": ""}, 4, tmp_path)
    assert (host.memory_available, host.memory_limit, host.cpu_quota) == (4 << 20, 0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "model 'gone' does not exist"),
        (["--tp", "65"], "--tp 65: choose 1 to 64"),
        (["--dtype", "float16"], "--dtype float16: on cpu choose float32 or bfloat16"),
    ],
    ids=" ".join,
)
def test_refusals(capsys, arguments, message):
    assert cli.run(["doctor", *arguments]) == 2
    assert f"unisono: error: {message}" in capsys.readouterr().err


def test_a_rank_count_the_model_cannot_have_is_refused(capsys, tmp_path):
    model = write_checkpoint(tmp_path / "model")
    assert cli.run(["doctor", str(model), "--tp", "10"]) == 2
    assert "tp=10: 9 query heads in 3 groups" in capsys.readouterr().err


def test_doctor_of_this_machine(tmp_path):
    model = write_checkpoint(tmp_path / "model")
    start = time.monotonic()
    out, _ = command.run("doctor", str(model), "--tp", "3", "--json")
    assert time.monotonic() - start < 30
    report = json.loads(out)
    measured = report["probes"]["measured"]
    assert report["usable"]
    assert report["model"]["legal_rank_counts"] == list(range(1, 10))
    assert measured["bytes_per_s"] > 1e8
    assert all(speed["flops_per_s"] > 1e7 for speed in measured["matrix"])
    assert [time["ranks"] for time in measured["collectives"]] == [2, 2, 3, 3]
    assert all(0 < time["seconds"] < 1 for time in measured["collectives"])
    assert [proof["shape"]["name"] for proof in measured["linear"]] == [
        "qkv",
        "o_proj",
        "gate and up",
        "down_proj",
        "head",
    ]
    assert all(proof["exact"] for proof in measured["linear"])
    assert all(0 < trip["seconds"] < 1 for trip in report["probes"]["round_trips"])


def test_a_machine_whose_ranks_cannot_meet():
    env = {"GLOO_SOCKET_IFNAME": "nowhere0"}
    out, err = command.run("doctor", "--tp", "2", env=env, code=1)
    assert re.search(r"^problem: GLOO_SOCKET_IFNAME=nowhere0 is no network interface", out, re.M)
    assert "failed in phase 'meet the other ranks'" in " ".join(out.split())
    assert out.endswith("unisono cannot run here\n")
    assert err.splitlines()[-1].startswith("unisono: unusable: GLOO_SOCKET_IFNAME=nowhere0")
