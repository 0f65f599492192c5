"""What chooses tokens is recorded for the marked request, whoever else is sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import write_checkpoint
from tests.verify_rig import opener
from unisono.launcher.trace import read_trace
from unisono.launcher.verify.bisect import Watch
from unisono.launcher.verify.run import ask
from unisono.runtime.protocol import Reschedule, SamplingParams

ALWAYS = {"argmax_keys", "settle_drafts"}
KINDS = {
    "greedy": (SamplingParams(), ALWAYS),
    "drawn": (SamplingParams(temperature=0.8, seed=1), {*ALWAYS, "noisy_argmax_keys"}),
    "all": (
        SamplingParams(
            temperature=0.8, seed=2, top_k=9, repetition_penalty=1.3, logit_bias=((3, 1.5),)
        ),
        {*ALWAYS, "penalize", "add_bias", "filter_logits", "add_noise"},
    ),
    "penalized": (SamplingParams(repetition_penalty=1.3), {*ALWAYS, "penalize"}),
}
OPTIONS = {
    "tp": 1,
    "dtype": "float32",
    "max_model_len": 64,
    "max_requests": 8,
    "max_step_tokens": 512,
    "kv_tokens": 512,
    "no_graphs": True,
    "speculate": "off",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", path)
    return path


def recorded(checkpoint: Path, place: Path, kinds: list[str]) -> dict[tuple[str, int], list[int]]:
    """Checksums by op and position of the last of `kinds`, asked together with the others."""
    watch = Watch(trace_dir=str(place))
    with opener(checkpoint)(OPTIONS, watch) as engine:
        engine.reschedule(Reschedule(num_blocks=8, max_step_tokens=512, prefix_cache=False))
        asked = [
            (at, [*range(len(kind), 20)], replace(KINDS[kind][0], max_tokens=6))
            for at, kind in enumerate(kinds)
        ]
        ask(engine, asked, len(kinds) - 1)
    [trace] = read_trace(place, 1)
    sums: dict[tuple[str, int], list[int]] = {}
    for record in trace.records:
        scope, _, op = record.name.rpartition(" ")
        if scope == "sampler":
            sums.setdefault((op, record.position), []).append(record.checksum)
    return sums


@pytest.mark.parametrize("kind", KINDS)
def test_ops_that_choose_are_recorded_whatever_the_company(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    places = [tmp_path / "alone", tmp_path / "together"]
    for place in places:
        place.mkdir()
    alone = recorded(checkpoint, places[0], [kind])
    together = recorded(checkpoint, places[1], [*KINDS, *KINDS, kind][-8:])
    assert {op for op, _ in alone} == KINDS[kind][1]
    assert alone == together
