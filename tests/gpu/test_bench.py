"""`unisono bench step` on GPUs: graphs are replayed, and a profile says what a step is made of."""

from __future__ import annotations

import json

import pytest
import torch

from tests.end_to_end import command

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
LAYERS = 30
"""Of smollm2-135m; a layer is five kernels at the very least."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_taken_apart(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} CUDA devices")
    sizes = ("--batch", "1,8", "--context", "64", "--steps", "16", "--rounds", "2")
    arguments = ("bench", "step", "shape:smollm2-135m", *sizes, "--tp", str(ranks), "--json")
    process = command.start(*arguments, "--device", "cuda")
    out, err = process.communicate(timeout=450)
    assert process.returncode == 0, err[-4000:]
    found = json.loads(out)
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
            assert 0 < device["busy_ns"] < 1e6 * line["ms_per_step"] * 1.2
            assert rank["memory_bytes"] > 2**27 // ranks
