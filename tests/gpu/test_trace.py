"""`--trace` on a GPU: captures and replays, and the device's own track beside the host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_llm import PROMPTS, ids_only
from tests.launcher.timelines import by_step, check_form, read, spans
from tests.tiny import write_checkpoint
from unisono import LLM, SamplingParams
from unisono.launcher.timeline_file import DEVICE, FIRST_RANK, RUNTIME

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]

GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3)
CLOCK_US = 300.0
"""How far the device's time may be from the host's: reading both takes time, and they drift."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    return ids_only(write_checkpoint("qwen3", tmp_path_factory.mktemp("whole")), directory)


def traced(model: str, file: Path, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    options |= {"load_format": "random", "device": "cuda", "dtype": "bfloat16"}
    with LLM(model, **options) as llm:
        plain = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    with LLM(model, trace=str(file), **options) as llm:
        answers = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        llm.generate(PROMPTS[:2], DRAWN)
    assert answers == plain
    trace = read(file)
    check_form(trace)
    return answers, trace


def test_captures_replays_and_the_device_are_told(tiny: str, tmp_path: Path) -> None:
    _, trace = traced(tiny, tmp_path / "trace.json")
    captures, replays, eager = (
        spans(trace, FIRST_RANK, name) for name in ("capture", "replay", "eager")
    )
    assert {event["args"]["piece"] for event in captures} == {"forward", "tail"}
    assert len(replays) > 60
    reasons = {event["args"]["reason"] for event in eager}
    assert {"first run", "prompt tokens", "sampling"} <= reasons
    assert spans(trace, FIRST_RANK, "wait for device")
    forwards, tails = (spans(trace, FIRST_RANK, name, DEVICE) for name in ("forward", "tail"))
    captured_forwards = [event for event in captures if event["args"]["piece"] == "forward"]
    steps = list(by_step(trace, FIRST_RANK, "launch"))
    assert len(forwards) == len(steps) - len(captured_forwards)
    assert len(tails) <= len(forwards) + len(captures)
    assert all(event["dur"] > 0 for event in forwards + tails)


def test_the_device_runs_a_step_between_its_launch_and_its_answer(
    tiny: str, tmp_path: Path
) -> None:
    _, trace = traced(tiny, tmp_path / "trace.json")
    launched = by_step(trace, FIRST_RANK, "launch")
    answered = by_step(trace, FIRST_RANK, "send result")
    results = by_step(trace, RUNTIME, "result")
    found = spans(trace, FIRST_RANK, "forward", DEVICE) + spans(trace, FIRST_RANK, "tail", DEVICE)
    assert len(found) > 100
    for event in found:
        step, begin, end = event["args"]["step"], event["ts"], event["ts"] + event["dur"]
        assert launched[step][0] - CLOCK_US <= begin
        # A step of prompts alone is answered while the device still computes it.
        if step in results and event["name"] == "tail":
            assert end <= answered[step][1] + CLOCK_US
