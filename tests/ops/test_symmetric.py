"""Symmetric memory between processes that run at the same time, how a rank is told of it, and what
a group makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops import symmetric_child
from tests.paths import ROOT, python_path
from unisono.ops import symmetric
from unisono.ops.comm import Group
from unisono.ops.direct import Direct
from unisono.ops.symmetric import open_direct
from unisono.ops.symmetric_layout import Layout

CPU = torch.device("cpu")


def run_processes(directory: Path, roles: Sequence[str]) -> list[tuple[int, str]]:
    """Exit code and output of a rank for each of `roles`, all at once and without a GPU."""
    layout = Layout(len(roles), one_shot_bytes=8 << 10, two_shot_bytes=64 << 10)
    for rank in range(len(roles)):
        (directory / f"memory-{rank}").write_bytes(bytes(layout.nbytes))
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    hidden["PYTHONPATH"] = python_path()
    module = (sys.executable, "-m", symmetric_child.__name__)
    ranks = [
        subprocess.Popen(
            [*module, directory, str(rank), str(len(roles)), role],
            cwd=ROOT,
            env={**os.environ, **hidden},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, role in enumerate(roles)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.timeout(120)
def test_processes_meet_whoever_is_late(tmp_path: Path) -> None:
    assert run_processes(tmp_path, ("plain", "late", "plain")) == [(0, "")] * 3


@pytest.mark.timeout(120)
def test_a_dead_process_is_named(tmp_path: Path) -> None:
    (lost, text), (dead, _) = run_processes(tmp_path, ("waits", "dies"))
    assert dead == 0
    assert lost == 3, text
    assert text.startswith("rank 1 did not come to a collective of rank 0 within 0.001 s")


def on_every_rank(size: int, body: Callable[[int, dist.Store], str]) -> list[str]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(rank, store), range(size)))


def test_ranks_agree_on_the_first_fault() -> None:
    faults = ["", "no memory left", "no memory left, either"]

    def body(rank: int, store: dist.Store) -> str:
        agree = symmetric.Agreement(store, rank, 3)
        assert agree.exchange(f"host{rank}") == ["host0", "host1", "host2"]
        assert agree.on("") == ""
        return agree.on(faults[rank])

    assert on_every_rank(3, body) == ["rank 1: no memory left"] * 3


@pytest.mark.parametrize(
    ("facts", "reachable", "reason"),
    [
        (["a g0", "a g1", "a g2"], True, ""),
        (["a g0", "b g1"], True, "the ranks are on 2 hosts: a, b"),
        (["a g0", "a g0"], True, "several ranks share a GPU"),
        (["a g0", "a g1"], False, "cuda:0 has no peer access to cuda:1"),
        # A rank that sees its own GPU alone cannot ask; it will try.
        (["a g0", "a g9"], False, ""),
    ],
)
def test_which_gpus_are_in_reach(
    monkeypatch: pytest.MonkeyPatch, facts: list[str], reachable: bool, reason: str
) -> None:
    monkeypatch.setattr(symmetric, "_uuid", lambda device: f"g{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: reachable)
    assert symmetric._unreachable(torch.device("cuda", 0), facts) == reason


def test_a_survey_asks_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "why_not", lambda size, device: "")
    monkeypatch.setattr(symmetric, "_uuid", lambda device: f"g{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    reach = {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)}
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) in reach
    )
    assert symmetric.survey(3) == "cuda:2 has no peer access to cuda:1"
    reach.add((2, 1))
    assert symmetric.survey(3) == ""


def test_what_one_rank_knows_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert symmetric.why_not(9, CPU) == "there are 9 ranks, and it serves up to 8"
    memory = pytest.importorskip("torch.distributed._symmetric_memory")
    monkeypatch.setattr(memory, "get_backend", lambda device: "NVSHMEM")
    assert "names the backend NVSHMEM; only CUDA" in symmetric.why_not(2, CPU)
    monkeypatch.setattr(memory, "get_backend", lambda device: "CUDA")
    assert symmetric.why_not(2, CPU) == ""


def test_what_collectives_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "open_symmetric", lambda *_: (None, "rank 1: no peer access"))
    store, group = dist.HashStore(), dist.ProcessGroup(0, 2)
    for collectives in ("nccl", "auto"):
        assert type(open_direct(collectives, 0, 2, CPU, store, group)) is Direct
    with pytest.raises(RuntimeError, match="symmetric: rank 1: no peer access; choose auto or"):
        open_direct("symmetric", 0, 2, CPU, store, group)


class Half(Direct):
    """Serves an even number of elements."""

    def all_reduce(self, x: Tensor) -> Tensor | None:
        return None if x.numel() % 2 else x + 1

    def all_reduce_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        return None if x.numel() % 2 else (x + 2, x + 3)

    def max(self, x: Tensor) -> Tensor | None:
        return None if x.numel() % 2 else x + 4


class Gathered(Group):
    def _gather(self, x: Tensor) -> Tensor:
        return torch.stack((x, x))


def test_a_group_asks_first_and_gathers_otherwise() -> None:
    group = Gathered(0, 2, None, direct=Half())
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert group.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    assert group.max(torch.ones(4)).tolist() == [5] * 4
    assert group.max(torch.ones(1)).tolist() == [1]
    assert group.num_met == 2


def test_fused_or_not_the_digest_is_the_same() -> None:
    x, odd = torch.ones(1, 2), torch.ones(1, 3)
    groups = [Gathered(0, 2, None, direct=direct) for direct in (Half(), None, None)]
    digests = []
    for group in groups[:2]:
        fused = group.all_reduce_add_rms_norm(x, None, x, x[0], 1e-6)
        assert (fused is None) == (group is groups[1])
        if fused is None:
            group.all_reduce(x)
        assert group.all_reduce_add_rms_norm(odd, None, odd, odd[0], 1e-6) is None
        group.max(x)
        digests.append(group.digest)
    assert digests[0] == digests[1]
    groups[2].max(x)
    assert groups[2].digest != digests[0]
