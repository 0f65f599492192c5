"""Collectives over symmetric memory on two GPUs: between processes, in graphs, and in an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from tests.gpu import symmetric_stress
from tests.paths import ROOT, python_path
from tests.tiny import random_ids
from unisono import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.alone,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

SHAPE = "shape:smollm2-135m"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [random_ids(length, seed=length) for length in (1, 7, 40, 64, 66, 90)]


def run_ranks(part: str, ranks: int, timeout_s: float) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank; all are killed when the time is up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", symmetric_stress.__name__, part],
            cwd=ROOT,
            env={
                **os.environ,
                **{name: str(value) for name, value in shared.items()},
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": python_path(),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends = time.monotonic() + timeout_s
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(ends - time.monotonic(), 1))
            results.append((process.returncode, out, err[-3000:]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


@pytest.mark.parametrize("part", ["replays", "late"])
def test_graphs_and_eager_calls_give_the_bits_of_the_definition(part: str) -> None:
    for code, out, err in run_ranks(part, 2, 200):
        assert code == 0, out + err


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_more_ranks(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} CUDA devices")
    for code, out, err in run_ranks("late", ranks, 300):
        assert code == 0, out + err


def test_a_dead_peer_is_named_in_bounded_time() -> None:
    began = time.monotonic()
    (lost, out, err), (dead, _, _) = run_ranks("dies", 2, 150)
    assert time.monotonic() - began < 120
    assert dead == 0
    assert lost == 3, out + err
    assert "rank 1 did not come to a collective of rank 0 within 2 s" in out


def tokens(collectives: str, dtype: str) -> list[tuple[int, ...]]:
    """Of all prompts, in one batch and alone, which must be the same."""
    with LLM(
        SHAPE, device="cuda", tp=2, dtype=dtype, max_model_len=128, collectives=collectives
    ) as llm:
        together = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    assert together == alone
    return alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_answers_alike_over_symmetric_memory_and_nccl(dtype: str) -> None:
    assert tokens("symmetric", dtype) == tokens("nccl", dtype)
