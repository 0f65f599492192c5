"""Sleep, wake and reload on one GPU: graphs are captured again, and the card gets its memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]

GPU = torch.device("cuda")
SHAPE = "shape:qwen3-0.6b"
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=3)
PROMPTS = [random_ids(length, seed=length) for length in (1, 7, 64, 66, 300)]
KV_TOKENS = 65_536
KV_BYTES = KV_TOKENS * 28 * 2 * 8 * 128 * 2
WEIGHT_BYTES = 1_190_000_000
"""Of the shape in bf16, a little less."""
ONE_TENSOR = 320_000_000
"""The embedding, the largest of it."""


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.cuda.mem_get_info()  # this process's own context comes first
    with LLM(
        SHAPE, device="cuda", dtype="bfloat16", kv_tokens=KV_TOKENS, max_requests=8
    ) as running:
        yield running


def digests(llm: LLM) -> list[str]:
    answers = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, SEEDED)
    return [answer.digest for answer in answers]


def test_the_card_gets_its_memory_and_answers_stay(llm: LLM) -> None:
    want = digests(llm)
    assert digests(llm) == want
    awake = used()
    for level, freed in ((1, KV_BYTES), (2, KV_BYTES + WEIGHT_BYTES), (1, KV_BYTES)):
        llm.sleep(level)
        assert awake - used() > freed, f"level {level}"
        llm.wake()
        assert digests(llm) == want
        assert used() < awake + (64 << 20)


def test_in_the_middle_of_graphs_in_flight(llm: LLM) -> None:
    want = digests(llm)
    for level in (1, 2):
        got: list[str] = []
        thread = threading.Thread(target=lambda into=got: into.extend(digests(llm)))
        with llm.stream(PROMPTS[1], GREEDY) as stream:
            thread.start()
            next(stream)
            llm.sleep(level)
            llm.wake()
            llm.reload_weights(SHAPE)
            list(stream)
        thread.join()
        assert got == want
        assert stream.answer is not None
        assert stream.answer.digest == want[1]


def test_a_reload_never_holds_the_weights_twice(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    before, most, done = used(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, used())

    thread = threading.Thread(target=watch)
    thread.start()
    llm.reload_weights(SHAPE)
    done.set()
    thread.join()
    assert 0 < most < before + ONE_TENSOR + (256 << 20)


def test_graphs_of_the_start_are_there_before_the_first_answer_and_after_each_sleep(
    llm: LLM,
) -> None:
    """No step of decoding is ever eager, and the answers are those of graphs that came later. Steps
    with short prompts are, the first time."""
    want = digests(llm)
    options = {"device": "cuda", "dtype": "bfloat16", "kv_tokens": KV_TOKENS, "max_requests": 8}
    with LLM(SHAPE, capture="start", graph_buckets=(1, 2, 4, 8), **options) as started:
        for _ in range(2):
            answers = started.generate(PROMPTS, GREEDY)
            assert [answer.digest for answer in answers] == want[: len(PROMPTS)]
            last = max(answers, key=lambda answer: answer.num_replays)
            assert last.num_replays > 40
            assert {reason for reason, _ in last.eager} - {"first run"} == {"prompt tokens"}
            started.sleep(2)
            started.wake()
        # What was reloaded is captured where it is wanted, without another eager run.
        started.reload_weights(SHAPE)
        answers = started.generate(PROMPTS, GREEDY)
        assert [answer.digest for answer in answers] == want[: len(PROMPTS)]
        assert {reason for reason, _ in answers[-1].eager} - {"first run"} == {"prompt tokens"}


def test_graphs_of_former_weights_are_dropped_and_captured_again(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    engine = LocalEngine(tmp_path, dtype="bfloat16", device=GPU, graphs=True, max_requests=5)
    prompts = [random_ids(5 + i, seed=i) for i in range(5)]
    want = engine.generate(prompts, 30)
    [rank] = engine.ranks
    captures = rank.pool.num_captures
    rank.pool.drop()
    got = engine.generate(prompts, 30)
    assert rank.pool.num_captures > captures
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
