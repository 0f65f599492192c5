"""What an engine takes of a card: within its share, all of its share, and told where it fails."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.launcher.engine_client import Engine
from unisono.launcher.resolve import prepare
from unisono.runtime.protocol import Finished, SamplingParams, WorkerLost
from unisono.workers.config import WorkerConfig
from unisono.workers.profile_run import passing_bytes, rehearse

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]

SHAPE = "shape:qwen3-0.6b"
"""32 requests of all its 40,960 positions would take more than a card of 141 GB has."""
PARAMS = SamplingParams(
    max_tokens=16, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1, logprobs=5
)


def engine(**options: Any) -> Engine:
    prepared = prepare(SHAPE, {"device": "cuda", "dtype": "bfloat16", **options}, os.environ)
    return Engine(prepared.launch, records=False)


def taken() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("capture", ["lazy", "start"])
def test_an_engine_takes_its_share_of_the_card_and_no_more(
    utilization: float, capture: str
) -> None:
    """B10. With graphs of the start their memory is measured, and a part of the share."""
    total = torch.cuda.mem_get_info()[1]
    before = taken()
    with engine(memory_utilization=utilization, capture=capture) as running:
        ready = running.start()
        assert ready.num_blocks > 0
        assert (ready.graph_bytes > 0) == (capture == "start")
        assert ready.graph_bytes < 2 << 30
        assert ready.activation_bytes > 0
        assert ready.weight_bytes > 1 << 30
        started = taken() - before
        assert started <= utilization * total + total // 100
        assert started >= 0.8 * utilization * total, "most of the share is left unused"
        prompts = [random_ids(length, seed=length) for length in range(60, 92)]
        waiting = {running.submit(prompt, PARAMS) for prompt in prompts}
        while waiting:
            events = running.poll(1.0)
            waiting -= {event.request_id for event in events if isinstance(event, Finished)}
        assert taken() - before <= utilization * total + total // 100


def test_a_share_that_is_too_small_names_the_least_that_works() -> None:
    with engine(memory_utilization=0.001) as running, pytest.raises(WorkerLost) as caught:
        running.start()
    assert "OutOfMemory: one KV block of 64 tokens takes" in str(caught.value)
    found = re.search(r"raise it to at least ([0-9.]+)$", str(caught.value))
    assert found, str(caught.value)
    with engine(memory_utilization=float(found[1])) as running:
        assert running.start().num_blocks >= 1


def test_a_rehearsal_takes_memory_and_gives_it_back(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    local = LocalEngine(tmp_path, max_model_len=128, max_requests=8, device=torch.device("cuda"))
    prompts = [random_ids(length, seed=length) for length in (5, 70)]
    want = local.generate(prompts, max_tokens=8)
    config = WorkerConfig(
        model_path="m", model=local.config, max_model_len=128, max_requests=8, dtype="float32"
    )
    [rank] = local.ranks
    live = [part[1:].clone() for layer in rank.cache.layers for part in (layer.k, layer.v)]
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    assert passing_bytes(lambda: rehearse(rank.runner, config, 2048, rank.cache)) >= 0
    # The rig keeps the logits, in a segment at most.
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20
    now = [part[1:] for layer in rank.cache.layers for part in (layer.k, layer.v)]
    # Bits: what was never written may hold NaN.
    pairs = zip(now, live, strict=True)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
    got = local.generate(prompts, max_tokens=8)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
