"""Rejection sampling of drafts: odds stay as they are, and who is promised an answer gets it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chances import LIMIT, chi_square_deviation
from tests.copying import write_copying_mtp
from tests.rig import LocalEngine
from tests.test_logprobs import of_tokens, reals
from tests.test_speculation import VOCABULARY, changing, distribution, prompts, same
from tests.tiny import random_ids, write_checkpoint
from unisono.ops.kernels import filters, gumbel, judge_drafts, penalties, sampling
from unisono.ops.table import Ops
from unisono.runtime import sampling_wire
from unisono.runtime.protocol import SamplingParams
from unisono.workers import speculator

REJECTING: dict[str, Any] = {"num_drafts": 3, "accept": "rejection"}
FEW_IDS = tuple((token, 100.0) for token in (10, 20, 30, 40))
"""A bias that leaves four tokens: model and drafter weigh them differently."""
DRAWN = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def erring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a third of the drafts is wrong."""
    directory = tmp_path_factory.mktemp("erring")
    wrong = random.Random(0).sample(range(3, VOCABULARY), VOCABULARY // 3)
    write_copying_mtp("qwen3-next", directory, wrong=wrong)
    return directory


@pytest.fixture(autouse=True)
def known_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system gives requests without a seed is another number for each, but always so."""
    give_luck(monkeypatch, random.Random(0).randbytes)


@pytest.fixture
def same_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number for all of them, every time."""
    give_luck(monkeypatch, always_the_same)


def always_the_same(count: int) -> bytes:
    return bytes(range(count))


def give_luck(monkeypatch: pytest.MonkeyPatch, urandom: Callable[[int], bytes]) -> None:
    monkeypatch.setattr(sampling_wire, "os", SimpleNamespace(urandom=urandom))


@pytest.mark.parametrize(
    "num_draws",
    [
        pytest.param(1000, id="some"),
        pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
@pytest.mark.parametrize(
    "recipe",
    [
        {"temperature": 2.0, "logit_bias": FEW_IDS},
        {"temperature": 2.5, "top_p": 0.8, "repetition_penalty": 1.3, "logit_bias": FEW_IDS},
    ],
    ids=["all", "top-p and penalties"],
)
def test_tokens_are_drawn_from_the_exact_distribution(
    recipe: dict[str, Any], num_draws: int, tmp_path: Path
) -> None:
    """Three tokens, of which two or three were drafted: chi-square over what can come of them
    together. The drafts come from other odds than the model's."""
    write_checkpoint("qwen3.5", tmp_path, mtp=True)
    engine = LocalEngine(tmp_path, max_requests=256, num_blocks=256, **REJECTING)
    assert_odds_are_kept(engine, recipe, num_draws)


def assert_odds_are_kept(engine: LocalEngine, recipe: dict[str, Any], num_draws: int) -> None:
    prompt = random_ids(9, VOCABULARY, seed=9)
    exact = {(): 1.0}
    for _ in range(3):
        exact = {
            (*said, token): odds * share
            for said, odds in exact.items()
            for token, share in distribution(engine, prompt, said, recipe).items()
            if share > 1e-9
        }
    seen: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for start in range(0, num_draws, 256):
        count = min(256, num_draws - start)
        params = [SamplingParams(ignore_eos=True, **recipe)] * count
        answers = engine.generate([prompt] * count, max_tokens=5, params=params)
        seen.update(tuple(answer.token_ids[:3]) for answer in answers)
        drafted += sum(map(sum, engine.drafted))
        accepted += sum(map(sum, engine.accepted))
    assert 0.2 * drafted < accepted < 0.9 * drafted
    assert chi_square_deviation(seen, exact, num_draws) < LIMIT


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_what_is_promised_an_answer_has_it_beside_what_is_not(
    erring: Path, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded rows among rows whose drafts may be rejected: bits of logits, too."""
    monkeypatch.setattr(speculator, "PIECE_PLACES", 5)
    promised = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=0),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.3),
        SamplingParams(frequency_penalty=1.0),
    ]
    free = [
        DRAWN,
        SamplingParams(temperature=0.8, top_k=20, min_tokens=9, stop_token_ids=(50, 60)),
        SamplingParams(temperature=1.2, min_p=0.05, presence_penalty=0.5),
    ]
    asked = prompts((1, 5, 9, 63, 64, 12, 66))
    params = [*promised, *free]
    options: dict[str, Any] = {"tp": tp, "max_model_len": 150}
    plain = LocalEngine(erring, **options).generate(asked, max_tokens=20, params=params)
    engine = LocalEngine(erring, **options, **REJECTING)
    # `LocalEngine.step` compares tokens, counts and digests of the ranks after every step.
    answers = engine.generate(asked, max_tokens=20, params=params, arrivals=[0, 0, 2, 0, 3, 1, 0])
    same(answers[:4], plain[:4])
    for accepted, drafted in zip(engine.accepted, engine.drafted, strict=True):
        assert 0 < sum(accepted) <= sum(drafted)
    assert all(len(answer.token_ids) == 20 or answer.reason == "stop" for answer in answers)
    assert len(answers[5].token_ids) > 9


@pytest.mark.usefixtures("same_luck")
def test_the_number_of_ranks_decides_nothing(erring: Path) -> None:
    """With the same luck on 1 to 3 ranks, in float32, the tokens are the same."""
    asked = prompts((1, 12, 64, 66))
    params = [DRAWN, SamplingParams(temperature=0.7, top_p=0.9)] * 2
    one, *others = (
        LocalEngine(erring, tp=tp, **REJECTING).generate(asked, max_tokens=16, params=params)
        for tp in (1, 2, 3)
    )
    for answers in others:
        assert [each.token_ids for each in answers] == [each.token_ids for each in one]


@pytest.mark.usefixtures("same_luck")
def test_the_kernels_of_a_gpu_draw_the_same(erring: Path) -> None:
    """In the interpreter: they take the numbers of a step as it has them."""

    def kernels(rank: int, ops: Ops) -> Ops:
        return replace(
            ops,
            argmax_keys=sampling.argmax_keys,
            add_noise=gumbel.add_noise,
            noisy_argmax_keys=gumbel.noisy_argmax_keys,
            filter_logits=filters.filter_logits,
            penalize=penalties.penalize,
            add_bias=penalties.add_bias,
            judge_drafts=judge_drafts.judge_drafts,
        )

    asked = prompts((1, 12))
    adjusted = {"repetition_penalty": 1.2, "logit_bias": ((5, 1.0),)}
    params = [DRAWN, SamplingParams(temperature=0.9, top_p=0.9, **adjusted)]
    want, got = (
        LocalEngine(erring, ops_of=ops_of, **REJECTING).generate(asked, 6, params=params)
        for ops_of in (lambda rank, ops: ops, kernels)
    )
    assert [each.token_ids for each in got] == [each.token_ids for each in want]


@pytest.mark.usefixtures("same_luck")
def test_more_drafts_are_taken_than_when_noise_must_agree(tmp_path: Path) -> None:
    write_checkpoint("qwen3.5", tmp_path, mtp=True)
    params = [SamplingParams(temperature=2.0, logit_bias=FEW_IDS, ignore_eos=True)] * 64
    asked = [random_ids(9, VOCABULARY, seed=seed) for seed in range(64)]
    shares = []
    for accept in ("coupled", "rejection"):
        engine = LocalEngine(tmp_path, max_requests=64, num_blocks=128, num_drafts=1, accept=accept)
        engine.generate(asked, max_tokens=20, params=params)
        shares.append(sum(map(sum, engine.accepted)) / sum(map(sum, engine.drafted)))
    assert shares[0] + 0.03 < shares[1] < 0.95, shares


def test_a_layer_that_has_the_odds_of_the_model_is_always_right(tmp_path: Path) -> None:
    """p = q: nothing is rejected, at any place of a chain."""
    write_copying_mtp("qwen3.5", tmp_path, silent=True)
    engine = LocalEngine(tmp_path, num_drafts=8, accept="rejection")
    asked = prompts((1, 9, 65))
    answers = engine.generate(asked, max_tokens=25, params=[DRAWN] * 3)
    assert engine.accepted == engine.drafted
    assert [len(answer.token_ids) for answer in answers] == [25] * 3


def test_pre_emption_limits_and_numbers_that_change(erring: Path) -> None:
    """As many tokens as were asked for, each with the model's own log-probability at its place."""
    stem = random_ids(140, VOCABULARY, seed=1)
    asked = [stem[:120], stem[:128], stem[:70] + random_ids(50, VOCABULARY, seed=2), stem]
    params = [SamplingParams(temperature=0.9, logprobs=1, ignore_eos=True), DRAWN, DRAWN, DRAWN]
    engine = LocalEngine(
        erring,
        tp=2,
        max_model_len=170,
        num_blocks=6,
        max_step_tokens=100,
        policy_of=changing(3),
        max_in_flight=3,
        **REJECTING,
    )
    answers = engine.generate(asked, max_tokens=40, params=params, arrivals=[0, 3, 5, 9])
    assert engine.num_preemptions > 0
    assert [len(answer.token_ids) for answer in answers] == [40, 40, 40, 30]
    assert sum(map(sum, engine.accepted)) > 0
    said = answers[0].token_ids
    logits = engine.prompt_logits([*asked[0], *said])[len(asked[0]) - 1 : -1]
    want = logits.double().log_softmax(1)[torch.arange(40), torch.tensor(said)]
    own = reals(of_tokens(answers[0], num_top=1)[:, 0])
    assert float((own - want).abs().max()) < 1e-4
