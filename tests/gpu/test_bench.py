"""`unisono bench step` on GPUs: graphs are replayed, and a profile says what a step is made of."""

from __future__ import annotations

import json

import pytest
import torch

from tests.end_to_end import command
from unisono.ops.kernel_names import MOST

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(500)]
RANKS = [1, pytest.param(2, marks=pytest.mark.two_gpus)]
LAYERS = 30
"""Of smollm2-135m; a layer is five kernels at the very least."""


def bench(ranks, *options):
    """Run the command and return its JSON."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} CUDA devices")
    sizes = ("--context", "64", "--steps", "16", "--rounds", "2")
    arguments = ("bench", "step", "shape:smollm2-135m", *options, *sizes, "--tp", str(ranks))
    process = command.start(*arguments, "--json", "--device", "cuda")
    out, err = process.communicate(timeout=450)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out)


def check_kernels(device, busy_share=0.95):
    """Kinds of kernels, the longest first, make up the busy time and the launches of a step."""
    kernels = device["kernels"]
    times = [kernel["busy_ns"] for kernel in kernels]
    assert times == sorted(times, reverse=True)
    assert busy_share < sum(times) / device["busy_ns"] < 2 - busy_share
    launches = sum(kernel["num_launches"] for kernel in kernels)
    assert launches == pytest.approx(device["num_kernels"] + device["num_copies"], abs=2)
    assert all(len(kernel["name"]) <= MOST for kernel in kernels)
    assert not any("::" in kernel["name"] for kernel in kernels)
    # Triton puts nothing behind the names of ours.
    assert any(kernel["name"].endswith("_kernel") for kernel in kernels)


@pytest.mark.parametrize("temperature", ["0", "0.7"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_step_is_taken_apart(ranks, temperature):
    found = bench(ranks, "--batch", "1,8", "--temperature", temperature)
    for line in found["lines"]:
        assert line["same_answers"] is True
        assert (line["replays_per_step"], line["captures"], line["eager"]) == (2.0, 0, [])
        assert sum(line["parts_ms"].values()) == pytest.approx(line["ms_per_step"])
        for rank in line["ranks"]:
            device = rank["device"]
            assert device["num_steps"] == 15
            assert device["num_kernels"] > 5 * LAYERS
            assert device["num_copies"] >= 1
            # Two sums a layer on more than one rank, each of them one kernel or two.
            assert (device["num_collectives"] >= 2 * LAYERS) is (ranks > 1)
            # Sums wait in their kernel for the other rank, whose host a trace holds up.
            at_most = 1.2 if ranks == 1 else 2
            assert 0 < device["busy_ns"] < 1e6 * line["ms_per_step"] * at_most
            assert rank["memory_bytes"] > 2**27 // ranks
            check_kernels(device)


@pytest.mark.parametrize(
    ("tokens", "replays", "eager"),
    [(256, 1.0, {"tail"}), (2048, 0.0, {"forward", "tail"})],
)
@pytest.mark.parametrize("ranks", RANKS)
def test_steps_of_prompts_are_taken_apart(ranks, tokens, replays, eager):
    """Short ones replay their forward pass; tokens are chosen eagerly, as the rest of long ones."""
    found = bench(ranks, "--prompt-tokens", str(tokens))
    [line] = found["lines"]
    assert (line["name"], line["batch"]) == (f"{tokens} prompt tokens", tokens // 64)
    assert line["same_answers"] is True
    assert (line["keys_per_row"], line["tokens_per_step"]) == (64, tokens)
    assert (line["replays_per_step"], line["captures"]) == (replays, 0)
    assert {(piece, reason) for piece, reason, _ in line["eager"]} == {
        (piece, "prompt tokens") for piece in eager
    }
    assert sum(line["parts_ms"].values()) == pytest.approx(line["ms_per_step"])
    assert line["floor_ms"] == max(line["memory_floor_ms"], line["products_floor_ms"])
    assert 0 < line["of_floor"] < 1
    for rank in line["ranks"]:
        assert rank["device"]["num_steps"] == 15
        assert (rank["device"]["num_collectives"] >= 2 * LAYERS) is (ranks > 1)
        check_kernels(rank["device"])
