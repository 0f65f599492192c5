"""Two ranks on two GPUs over NCCL, through real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import CONFIGS, random_ids, write_checkpoint
from unisono import LLM, SamplingParams
from unisono.launcher.answering import Answer
from unisono.launcher.demo_model import cache_directory
from unisono.launcher.resolve import prepare
from unisono.launcher.verify.bounds import Entry, closeness, oracle_bound
from unisono.runtime.protocol import WorkerLost

psutil = pytest.importorskip("psutil")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

SHAPE = "shape:smollm2-135m"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
TEXT = SamplingParams(max_tokens=32)
JUDGED = SamplingParams(max_tokens=1, prompt_logprobs=20)
DRAWN = {"temperature": 0.8, "seed": 11}
PROMPTS = [random_ids(length, seed=length) for length in (1, 7, 40, 64, 66, 71)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint("llama", tmp_path_factory.mktemp("whole")).config.save_pretrained(directory)
    return str(directory)


def tokens(model: str, device: str, tp: int, dtype: str = "float32") -> list[tuple[int, ...]]:
    """Of all prompts, alone and in one batch, which must be the same."""
    with LLM(
        model, load_format="random", device=device, tp=tp, dtype=dtype, max_model_len=96
    ) as llm:
        together = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    assert together == alone
    assert {len(ids) for ids in alone} == {24}
    return alone


def entries_of(answer: Answer) -> list[Entry]:
    """Of its prompt, whose first token nothing predicts."""
    assert answer.prompt_logprobs is not None
    found = [each for each in answer.prompt_logprobs if each is not None]
    assert len(found) == answer.num_prompt_tokens - 1
    return [(each.logprob, {top.token_id: top.logprob for top in each.top}) for each in found]


def test_float32_tokens_equal_the_cpus_and_one_ranks(tiny: str) -> None:
    want = tokens(tiny, "cpu", 1)
    assert tokens(tiny, "cuda", 1) == want
    assert tokens(tiny, "cuda", 2) == want


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"llama"}))
def test_other_tiny_models_have_the_tokens_of_a_cpu(name: str, tmp_path: Path) -> None:
    """Biases, windows, scaled rope, odd heads and vocabularies: the shards of these differ."""
    write_checkpoint(name, tmp_path / "whole").config.save_pretrained(tmp_path)
    assert tokens(str(tmp_path), "cuda", 2) == tokens(str(tmp_path), "cpu", 1)


@pytest.mark.skipif(not list(cache_directory().glob("*.gguf")), reason="no demo model in the cache")
def test_the_demo_model_has_the_tokens_of_a_cpu() -> None:
    """In float32. In bfloat16 it finds the CPU's answers as likely, within the bound for another
    program's float32."""
    prompts = ["The capital of France is", "def read_lines(path):", "Once upon a time", "2 + 2 ="]
    bound = oracle_bound(prepare("demo", {}, os.environ).worker.model, "bfloat16")
    want, texts, judged = [], [], []
    for device, tp, dtype in (
        ("cpu", 1, "float32"),
        ("cuda", 1, "float32"),
        ("cuda", 2, "float32"),
        ("cuda", 1, "bfloat16"),
        ("cuda", 2, "bfloat16"),
    ):
        name = f"{device} tp={tp} {dtype}"
        with LLM("demo", device=device, tp=tp, dtype=dtype, max_model_len=256) as llm:
            answers = llm.generate(prompts, TEXT)
            alone = [llm.generate([prompt], TEXT)[0].token_ids for prompt in prompts]
            if device == "cpu":
                pairs = zip(prompts, answers, strict=True)
                want, texts = alone, [prompt + answer.text for prompt, answer in pairs]
            found = [entries_of(answer) for answer in llm.generate(texts, JUDGED)]
        assert [answer.token_ids for answer in answers] == alone, name
        if device == "cpu":
            judged = found
        elif dtype == "float32":
            assert alone == want, name
        else:
            off = closeness(zip(found, judged, strict=True)).relative_rms
            assert off <= bound, name


@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_drafts_change_nothing(how: str) -> None:
    """Of the trained model, in graphs, on both ranks, and as on a CPU."""
    prompts = ["class Reader:", "def read_lines(path):", "The module defines"]
    params = SamplingParams(max_tokens=60, **({} if how == "greedy" else DRAWN))
    answers = {}
    for device, tp, drafts in (("cpu", 1, 0), ("cuda", 2, 0), ("cuda", 2, 1), ("cuda", 2, 3)):
        options = {"device": device, "tp": tp, "dtype": "float32", "max_model_len": 256}
        with LLM("tiny-mtp", speculate=str(drafts), **options) as llm:
            found = llm.generate(prompts, params)
        answers[device, drafts] = [answer.token_ids for answer in found]
    assert all(answer == answers["cpu", 0] for answer in answers.values())


def test_a_published_shape_on_one_and_two_ranks() -> None:
    assert tokens(SHAPE, "cuda", 2) == tokens(SHAPE, "cuda", 1)


def test_bf16_answers_are_the_same_alone_and_in_company() -> None:
    tokens(SHAPE, "cuda", 2, "bfloat16")


def test_graphs_of_the_start_meet_on_both_ranks() -> None:
    """All ranks capture in one order: else the collectives inside would wait for ever, or mix."""
    options = {"device": "cuda", "tp": 2, "dtype": "bfloat16", "max_requests": 8}
    with LLM(SHAPE, **options) as llm:
        want = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    with LLM(SHAPE, capture="start", **options) as llm:
        for _ in range(2):
            answers = llm.generate(PROMPTS, GREEDY)
            assert [answer.token_ids for answer in answers] == want
            assert {reason for reason, _ in answers[-1].eager} - {"first run"} == {"prompt tokens"}
            llm.sleep()
            llm.wake()


def test_ranks_agree_over_ten_thousand_steps(tmp_path: Path) -> None:
    """The engine compares their rolling hashes, tokens and logits' sums after every step; requests
    come and go meanwhile, and prompts run eagerly between replays."""
    write_checkpoint("long", tmp_path)
    options = {"device": "cuda", "tp": 2, "dtype": "bfloat16", "max_requests": 4}
    options |= {"load_format": "random", "max_model_len": 12_000}
    long = SamplingParams(max_tokens=10_000, ignore_eos=True)
    prompts = [random_ids(1 + 37 * i % 150, 300, seed=i) for i in range(40)]
    with LLM(str(tmp_path), **options) as llm:
        with llm.stream(PROMPTS[0], long) as stream:
            next(stream)
            for prompt in prompts:
                assert len(llm.generate([prompt] * 2, GREEDY)[0].token_ids) == 24
            for _ in stream:
                pass
        assert stream.answer is not None
        assert len(stream.answer.token_ids) == 10_000
        assert stream.answer.num_replays > 15_000


def ranks_below() -> dict[int, Any]:
    """The rank processes of this test by their number."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        rank = process.environ().get("RANK", "")
        if rank:
            found[int(rank)] = process
    return found


def test_a_killed_rank_ends_the_engine_with_its_name() -> None:
    with LLM(SHAPE, device="cuda", tp=2, dtype="bfloat16") as llm:
        with llm.stream([5, 6, 7], SamplingParams(max_tokens=4000, ignore_eos=True)) as stream:
            next(stream)
            ranks = ranks_below()
            assert sorted(ranks) == [0, 1]
            os.kill(ranks[1].pid, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(WorkerLost, match="rank 1") as caught:
                for _ in stream:
                    pass
            assert time.monotonic() - killed < 10
            assert "SIGKILL" in str(caught.value)
        # The other rank waits in a kernel of NCCL: the grace passes before it is killed, and then
        # the driver takes its context down.
        _, alive = psutil.wait_procs(list(ranks.values()), timeout=40)
        assert alive == [], "ranks that outlive the engine"
