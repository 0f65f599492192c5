"""An engine that has nothing to do: it costs nothing, and the next request is served at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.tiny import write_checkpoint
from tests.tiny_tokenizers import byte_level_tokenizer
from unisono import LLM, SamplingParams

IDLE_S = 3.0
MOST_OF_A_CORE = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("long", directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def busy_s(processes: list[psutil.Process]) -> dict[int, float]:
    """CPU seconds that each process has used so far."""
    return {p.pid: p.cpu_times().user + p.cpu_times().system for p in processes}


def test_idle_ranks_sleep_and_wake(model: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(str(model), tp=2, max_model_len=256) as llm:
        first = llm.generate("hello", params)[0]
        processes = psutil.Process(os.getpid()).children()
        assert len(processes) == 3, "a runtime and two ranks"
        before = busy_s(processes)
        time.sleep(IDLE_S)
        for pid, seconds in busy_s(processes).items():
            share = (seconds - before[pid]) / IDLE_S
            assert share <= MOST_OF_A_CORE, f"process {pid} used {share:.0%} of a core"
        again = llm.generate("hello", params)[0]
    assert again.token_ids == first.token_ids
    assert again.first_token_s < first.first_token_s + 1.0
