"""Drafts on a GPU: the answers without them, bit for bit, replayed from graphs or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import talks
from tests.closeness import assert_same_bits
from tests.copying import write_copying_mtp
from tests.rig import LocalEngine
from tests.test_rejection import (
    FEW_IDS,
    REJECTING,
    always_the_same,
    assert_odds_are_kept,
    give_luck,
)
from tests.tiny import DRAFTING, random_ids, write_checkpoint
from unisono.launcher.model_source import resolve_model
from unisono.launcher.text.tokenizer import Tokenizer
from unisono.runtime.protocol import SamplingParams
from unisono.workers.protocol import StepPlan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

GPU = torch.device("cuda")
VOCABULARY = 199


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_drafts_of_which_a_third_is_wrong_change_nothing(
    name: str, dtype: str, state_dtype: str, tmp_path: Path
) -> None:
    wrong = random.Random(0).sample(range(3, VOCABULARY), VOCABULARY // 3)
    write_copying_mtp(name, tmp_path, wrong=wrong)
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in (1, 2, 3, 12, 63, 65, 66)]
    options = {"dtype": dtype, "state_dtype": state_dtype, "device": GPU, "max_step_tokens": 100}
    plain = LocalEngine(tmp_path, **options).generate(prompts, 24)
    replayed = LocalEngine(tmp_path, graphs=True, **options).generate(prompts, 24)
    assert [each.token_ids for each in replayed] == [each.token_ids for each in plain]
    for num_drafts in (1, 3, 8):
        engine = LocalEngine(tmp_path, num_drafts=num_drafts, **options)
        for number, got in enumerate(engine.generate(prompts, 24)):
            assert got.token_ids == plain[number].token_ids, f"{num_drafts} drafts, {number}"
            logits = (torch.stack(each.logits) for each in (got, plain[number]))
            assert_same_bits(f"logits of request {number}", *logits)
        assert 0 < sum(map(sum, engine.accepted)) < sum(map(sum, engine.drafted))


@pytest.fixture(
    scope="module", params=[("qwen3-next", "float32"), ("qwen3.5-moe", "bfloat16")], ids=str
)
def erring(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A model of which a third of the drafts is wrong, and options of its engines."""
    name, dtype = request.param
    directory = tmp_path_factory.mktemp(name)
    wrong = random.Random(0).sample(range(3, VOCABULARY), VOCABULARY // 3)
    write_copying_mtp(name, directory, wrong=wrong)
    options = {"dtype": dtype, "state_dtype": dtype, "device": GPU, "max_step_tokens": 100}
    return directory, {**options, "max_requests": 6}


def prompts() -> list[list[int]]:
    return [random_ids(length, VOCABULARY, seed=length) for length in (1, 2, 3, 12, 63, 65, 66)]


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_drafts_in_graphs_answer_as_eager_ones(
    erring: tuple[Path, dict[str, Any]], num_drafts: int
) -> None:
    """B27: without any warm-up, graphs are captured as they are wanted. Heights padded and exact,
    requests that join and leave; then with the bits of logits."""
    path, options = erring
    asked, arrivals = prompts(), [0, 0, 0, 2, 4, 6, 8]
    drawn = [SamplingParams(temperature=0.8 * (i % 2), seed=i) for i in range(len(asked))]
    shown = [SamplingParams(logprobs=0) for _ in asked]
    plain = LocalEngine(path, **options)
    eager = LocalEngine(path, num_drafts=num_drafts, **options)
    replayed = LocalEngine(path, num_drafts=num_drafts, graphs=True, **options)
    pool = replayed.ranks[0].pool
    for params in ([], [], drawn, shown):
        want = plain.generate(asked, 24, arrivals, params=params)
        eager.generate(asked, 24, arrivals, params=params)
        got = replayed.generate(asked, 24, arrivals, params=params)
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert one.token_ids == other.token_ids, f"request {number}"
            pairs = zip(one.logits, other.logits, strict=True)
            for mine, theirs in ((a, b) for a, b in pairs if len(a)):
                assert_same_bits(f"logits of request {number}", mine, theirs)
        assert sum(map(sum, replayed.accepted)) > 0
        assert replayed.accepted == eager.accepted
    assert all(len(logits) for answer in got for logits in answer.logits)
    assert pool.num_captures > 4
    assert pool.num_replays > 20
    reasons = {reason for _, reason in pool.eager_runs}
    assert reasons <= {"first run", "prompt tokens", "log-probabilities"}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_answers_end_in_graphs(erring: tuple[Path, dict[str, Any]], num_drafts: int) -> None:
    """Each token that a step answers is of an answer, and rows in vain answer none."""
    path, options = erring
    asked, arrivals = prompts(), [0, 0, 0, 2, 4, 6, 8]
    plain = LocalEngine(path, **options)
    ends = [each.token_ids[5 + number] for number, each in enumerate(plain.generate(asked, 24)[:4])]
    want = plain.generate(asked, 24, arrivals, ends)
    engine = LocalEngine(path, num_drafts=num_drafts, graphs=True, max_in_flight=3, **options)
    step, counts = engine.step, list[int]()

    def counted(plan: StepPlan) -> Any:
        output, logits = step(plan)
        counts.extend(output.counts or [1] * len(output.tokens))
        return output, logits

    engine.step = counted  # type: ignore[method-assign]
    for _ in range(2):
        counts.clear()
        got = engine.generate(asked, 24, arrivals, ends)
        assert [each.token_ids for each in got] == [each.token_ids for each in want]
        assert sum(counts) == sum(len(each.token_ids) for each in want)
        assert 0 in counts
    assert engine.ranks[0].pool.num_replays > 10


def test_graphs_with_drafts_are_captured_again_in_the_middle_of_answers(
    erring: tuple[Path, dict[str, Any]],
) -> None:
    """Whatever lies in block 0 and state 0 reaches nobody."""
    path, options = erring
    want = LocalEngine(path, **options).generate(prompts(), 40)
    engine = LocalEngine(path, num_drafts=3, graphs=True, **options)
    for _ in range(2):  # the second time all is captured
        engine.generate(prompts(), 40)
    [rank] = engine.ranks
    captures = rank.pool.num_captures

    @torch.inference_mode()
    def disturb(step: int) -> None:
        if step == 8:
            rank.cache.generation += 1
            scratch = [tensor for layer in rank.cache.layers for tensor in (layer.k, layer.v)]
            assert rank.states is not None
            for state in rank.states.layers:
                assert state.pending is not None
                scratch += [state.conv, state.state]
                scratch += [getattr(state.pending, name) for name in state.pending.__slots__]
            for tensor in scratch:
                tensor[0] = float("nan")

    got = engine.generate(prompts(), 40, before_step=disturb)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert rank.pool.num_captures > captures


def test_a_captured_step_leaves_other_requests_alone(
    erring: tuple[Path, dict[str, Any]],
) -> None:
    """One request is answered; of the slots, blocks and states of others no byte changes."""
    path, options = erring
    engine = LocalEngine(path, num_drafts=3, graphs=True, prefix_cache=False, **options)
    [rank] = engine.ranks
    engine.generate(prompts(), 24)
    slots = rank.runner._slots
    assert rank.states is not None
    tensors = [slots.token_ids[2:], slots.lengths[2:], slots.num_pending[2:]]
    tensors += [state.state[2:] for state in rank.states.layers]
    tensors = [tensor.view(torch.uint8) for tensor in tensors]
    torch.cuda.synchronize()
    before = [tensor.clone() for tensor in tensors]
    for _ in range(2):
        engine.generate(prompts()[:1], 24)
    assert rank.pool.num_replays > 0
    torch.cuda.synchronize()
    for mine, theirs in zip(tensors, before, strict=True):
        assert torch.equal(mine, theirs)


def test_a_talk_of_eight_thousand_tokens() -> None:
    """B43: from graphs; greedy turns are the same with drafts, and drawn ones do not cost them."""
    options = {"dtype": "bfloat16", "device": GPU, "graphs": True, "max_requests": 8}
    whole = {**options, "max_model_len": 8192, "num_blocks": 400}
    talks.assert_drafts_change_no_turn(650, whole)
    # The model has learnt on 2,048 tokens: its drafts are not to be asked for more.
    lengths = talks.lengths_by_turn(8, 150, {**options, "max_model_len": 2048, "num_blocks": 300})
    assert sum(lengths[-3:]) > 0.85 * sum(lengths[:3]), lengths


def test_rejection_beside_graphs(
    erring: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same luck as eager steps; who is promised an answer has it. All is replayed, but for
    rows with a filter and those beside them."""
    give_luck(monkeypatch, always_the_same)
    path, options = erring
    asked, arrivals = prompts(), [0, 0, 0, 2, 4, 6, 8]
    recipes = ({}, {"seed": 3, "temperature": 0.8}, {"temperature": 0.8})
    params = [SamplingParams(**recipes[number % 3]) for number in range(len(asked))]
    want = LocalEngine(path, **options).generate(asked, 24, arrivals, params=params)
    rejecting = {"num_drafts": 3, "accept": "rejection", **options}
    eager, replayed = (LocalEngine(path, graphs=graphs, **rejecting) for graphs in (False, True))
    theirs = eager.generate(asked, 24, arrivals, params=params)
    pool = replayed.ranks[0].pool
    for _ in range(2):
        got = replayed.generate(asked, 24, arrivals, params=params)
        assert [each.token_ids for each in got] == [each.token_ids for each in theirs]
        assert replayed.accepted == eager.accepted
        for number, answer in enumerate(got):
            if number % 3 < 2:
                assert answer.token_ids == want[number].token_ids, f"request {number}"
    assert {reason for _, reason in pool.eager_runs} <= {"first run", "prompt tokens"}
    replays = pool.num_replays
    replayed.generate(asked, 24, arrivals, params=params)
    assert pool.num_replays > replays + 10
    filtered = [*params[:-1], SamplingParams(temperature=0.8, top_k=50)]
    theirs = eager.generate(asked, 24, arrivals, params=filtered)
    got = replayed.generate(asked, 24, arrivals, params=filtered)
    assert [each.token_ids for each in got] == [each.token_ids for each in theirs]
    assert ("tail", "sampling") in pool.eager_runs


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        ("float32", {"temperature": 2.5, "top_p": 0.8, "repetition_penalty": 1.3}),
        ("bfloat16", {"temperature": 2.0}),
    ],
    ids=str,
)
def test_rejection_leaves_the_odds_as_they_are(
    dtype: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 draws of three tokens, with the kernels of a GPU."""
    give_luck(monkeypatch, random.Random(0).randbytes)
    write_checkpoint("qwen3.5", tmp_path, mtp=True)
    options = {"dtype": dtype, "state_dtype": dtype, "device": GPU}
    engine = LocalEngine(tmp_path, max_requests=256, num_blocks=256, **REJECTING, **options)
    assert_odds_are_kept(engine, {**recipe, "logit_bias": FEW_IDS}, 20_000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_drafts_are_often_right_and_change_nothing(dtype: str) -> None:
    source = resolve_model("tiny-mtp")
    texts = ("def ", "class Reader:\n", "import os\n", "    def __init__(self, name):\n") * 8
    prompts = [Tokenizer.load(source).encode(text) for text in texts]
    options = {"dtype": dtype, "device": GPU, "max_model_len": 256, "max_step_tokens": 128}
    plain = LocalEngine(source.path, **options).generate(prompts, 100)
    engine = LocalEngine(source.path, num_drafts=3, **options)
    for number, got in enumerate(engine.generate(prompts, 100)):
        assert got.token_ids == plain[number].token_ids, f"request {number}"
        logits = (torch.stack(each.logits) for each in (got, plain[number]))
        assert_same_bits(f"logits of request {number}", *logits)
    right, made = sum(map(sum, engine.accepted)), sum(map(sum, engine.drafted))
    assert right > 0.4 * made, f"{right} of {made} drafts are right"
