"""Recurrent states on the real scheduler and workers: one answer, however a request is run.

The model hashes its tokens (tests/recurrent.py), so that equal tokens mean that no state was lost,
stale, doubled or another's. The arithmetic of real ones is tested in tests/test_one_answer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.recurrent import CONFIG, RecurrentEngine
from tests.rig import Answer
from tests.tiny import random_ids
from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import WorkerConfig
from unisono.workers.profile_run import rehearse
from unisono.workers.protocol import Phase, Rows, SlotSampling, StepPlan, int32s, pack_sampling

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 150, 200)
NUM_TOKENS = 70
"""Of each answer: more than a block."""
MOST = {"max_model_len": 400, "num_blocks": 64}


def prompts() -> list[list[int]]:
    return [random_ids(length, CONFIG.vocab_size, seed=length) for length in LENGTHS]


def alone(asked: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Each prompt by itself, whole, on memory that nobody used."""
    answers = []
    for prompt in asked:
        engine = RecurrentEngine(max_requests=1, prefix_cache=False, max_in_flight=1, **MOST)
        answers += engine.generate([prompt], max_tokens)
    return tokens_of(answers)


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    answers = alone(prompts())
    assert len({tuple(answer) for answer in answers}) == len(LENGTHS), "every answer is its own"
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 64},
        {"max_step_tokens": 100, "max_requests": 3},
        {"max_step_tokens": 300, "tp": 2},
        {"prefix_cache": False, "max_requests": 2, "num_states": 2},
    ],
    ids=["together", "chunked", "cut", "two ranks", "no snapshots"],
)
def test_company_and_chunks_change_no_token(
    plain: list[list[int]], options: dict[str, Any]
) -> None:
    engine = RecurrentEngine(**{**MOST, **options})
    arrivals = [3 * index for index in range(len(LENGTHS))]
    assert tokens_of(engine.generate(prompts(), NUM_TOKENS, arrivals)) == plain
    assert engine.num_preemptions == 0
    # Slots and states that others used.
    assert tokens_of(engine.generate(prompts()[::-1], NUM_TOKENS)) == plain[::-1]


@pytest.mark.parametrize(
    ("max_step_tokens", "prefix_cache"), [(64, True), (130, True), (130, False), (2048, False)]
)
def test_a_resumed_request_goes_on_as_if_nothing_had_been(
    plain: list[list[int]], max_step_tokens: int, prefix_cache: bool
) -> None:
    options = {"max_step_tokens": max_step_tokens, "prefix_cache": prefix_cache}
    engine = RecurrentEngine(**{**MOST, "num_blocks": 6}, max_requests=4, **options)
    assert tokens_of(engine.generate(prompts(), NUM_TOKENS)) == plain
    assert engine.num_preemptions > 2


@pytest.mark.parametrize(
    ("num_states", "max_step_tokens"), [(9, 64), (12, 2048), (40, 64), (9, 2048)]
)
def test_a_hit_starts_from_a_snapshot(num_states: int, max_step_tokens: int) -> None:
    family = random_ids(250, CONFIG.vocab_size)
    [said] = alone([family[:150]], 40)
    asked = [
        family[:150],
        family[:150],
        family[:129],
        family,
        family[:128] + family[:60],
        # The next turn of a talk: of the first answer nothing may be found.
        family[:150] + said + family[:30],
        family[:64],
        family[:65],
    ]
    engine = RecurrentEngine(
        **MOST, max_requests=8, num_states=num_states, max_step_tokens=max_step_tokens
    )
    got = engine.generate(asked, 40, arrivals=[60 * index for index in range(len(asked))])
    assert tokens_of(got) == alone(asked, 40)
    prompt_blocks = [(len(prompt) - 1) // 64 for prompt in asked]
    for cached, blocks in zip(engine.num_cached_tokens, prompt_blocks, strict=True):
        assert cached % 64 == 0
        assert cached <= 64 * min(blocks, 3)
    assert engine.num_cached_tokens[1] == 128
    assert engine.num_cached_tokens[5] in (64, 128)


@pytest.mark.parametrize("length", [191, 192, 193])
def test_the_same_prompt_again_hits_wherever_it_ends(length: int) -> None:
    """On a border, too: then from the one before, for its last token is always computed."""
    prompt = random_ids(length, CONFIG.vocab_size)
    engine = RecurrentEngine(**MOST, max_requests=2)
    first, again = tokens_of(engine.generate([prompt] * 2, 20, arrivals=[0, 30]))
    assert engine.num_cached_tokens == [0, (length - 1) // 64 * 64]
    assert first == again


@pytest.mark.parametrize(
    ("max_step_tokens", "num_states", "cached"),
    [(64, 8, [0, 192, 192]), (2048, 8, [0, 0, 192]), (64, 2, [0, 0, 0]), (2048, 2, [0, 0, 192])],
)
def test_whoever_begins_as_two_others_did_starts_from_there(
    max_step_tokens: int, num_states: int, cached: list[int]
) -> None:
    """A state is saved where the second prompt leaves what the first has, too, if there is room:
    where one snapshot is kept, every chunk replaces it."""
    stem = random_ids(200, CONFIG.vocab_size)
    asked = [stem + random_ids(120, CONFIG.vocab_size, seed=own) for own in (1, 2, 3)]
    limits = {"max_requests": 1, "max_in_flight": 1, "max_step_tokens": max_step_tokens}
    engine = RecurrentEngine(**MOST, **limits, num_states=num_states)
    got = engine.generate(asked, 20, arrivals=[0, 40, 80])
    assert engine.num_cached_tokens == cached
    assert tokens_of(got) == alone(asked, 20)


def test_sampled_answers_and_prompt_logprobs_too(plain: list[list[int]]) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=index, top_k=50)
        if index % 2
        else SamplingParams(logprobs=0, prompt_logprobs=1)
        for index in range(len(LENGTHS))
    ]
    asked = prompts()
    one = RecurrentEngine(**MOST, max_requests=1, prefix_cache=False)
    want = [one.generate([p], 30, params=[q])[0] for p, q in zip(asked, params, strict=True)]
    many = RecurrentEngine(**{**MOST, "num_blocks": 6}, max_requests=5, max_step_tokens=100)
    got = many.generate(asked, 30, params=params)
    assert tokens_of(got) == tokens_of(want)
    assert [a.prompt_logprobs for a in got] == [a.prompt_logprobs for a in want]
    assert many.num_preemptions > 0


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_the_aborted_leave_no_trace(plain: list[list[int]], max_in_flight: int) -> None:
    """B40: requests go in mid-prompt and mid-answer, and with a step in flight that names their
    state; others take their slots at once."""
    engine = RecurrentEngine(
        **MOST, max_requests=2, num_states=3, max_step_tokens=64, max_in_flight=max_in_flight
    )
    aborts = {8: 1, 7: 4, 0: 9, 5: 30}
    asked = prompts()
    order = [8, 7, 0, 5, 1, 2, 3, 4, 6]
    got = engine.generate(
        [asked[index] for index in order],
        NUM_TOKENS,
        aborts={order.index(index): step for index, step in aborts.items()},
    )
    for index, answer in zip(order, tokens_of(got), strict=True):
        if index in aborts:
            assert answer == plain[index][: len(answer)]
        else:
            assert answer == plain[index]


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_a_row_in_vain_touches_no_other_state(plain: list[list[int]], max_in_flight: int) -> None:
    """An answer ends in a step behind which others are planned that still name its state."""
    ends = {answer[7 + 5 * index] for index, answer in enumerate(plain)}
    want = [answer[: [token in ends for token in answer].index(True) + 1] for answer in plain]
    assert sum(len(answer) < NUM_TOKENS for answer in want) == len(want)
    engine = RecurrentEngine(**MOST, max_requests=2, num_states=2, max_in_flight=max_in_flight)
    got = engine.generate(prompts(), NUM_TOKENS, eos_token_ids=sorted(ends))
    assert tokens_of(got) == want
    assert all(answer.reason == "stop" for answer in got)


def opening(step: int, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> StepPlan:
    """Slot and state of one number, and its own two blocks, for each of `tokens`."""
    return StepPlan(
        step=step,
        rows=Rows(
            slot=int32s(slots),
            start=int32s([0] * len(slots)),
            count=int32s(map(len, tokens)),
            phase=int32s([Phase.PROMPT] * len(slots)),
        ),
        open_slot=int32s(slots),
        open_length=int32s(map(len, tokens)),
        open_tokens=int32s([token for prompt in tokens for token in prompt]),
        open_sampling=pack_sampling([SlotSampling(num_prompt_tokens=len(p)) for p in tokens]),
        num_shared=int32s([0] * len(slots)),
        block_slot=int32s([slot for slot in slots for _ in range(2)]),
        block_id=int32s([2 * slot + i for slot in slots for i in range(2)]),
        open_state=int32s(slots),
        open_restore=int32s([0] * len(slots)),
    )


def test_a_prompt_of_one_token_starts_empty_and_touches_no_neighbour() -> None:
    """B34, B47: it is no decode of whatever its slot held before, nor of another's."""
    engine = RecurrentEngine(**MOST, max_requests=3, num_states=3)
    engine.step(opening(1, [1, 2, 3], [random_ids(n, 300, seed=n) for n in (70, 80, 5)]))
    [rank] = engine.ranks
    assert rank.states is not None
    before = [x.clone() for layer in rank.states.layers for x in (layer.conv, layer.state)]
    first = engine.step(opening(2, [2], [[7]]))[0].tokens
    after = [x for layer in rank.states.layers for x in (layer.conv, layer.state)]
    for was, now in zip(before, after, strict=True):
        others = torch.tensor([1, 3])
        assert torch.equal(was[others].view(torch.int32), now[others].view(torch.int32))
        assert not torch.equal(was[2], now[2])
    fresh = RecurrentEngine(**MOST, max_requests=3)
    assert first == fresh.step(opening(1, [2], [[7]]))[0].tokens


def test_a_rehearsal_writes_to_scratch_only() -> None:
    engine = RecurrentEngine(**MOST, max_requests=5)
    want = engine.generate(prompts(), 8)
    config = WorkerConfig(model_path="m", model=CONFIG, max_model_len=400, max_requests=5)
    [rank] = engine.ranks
    assert rank.states is not None
    with torch.inference_mode():
        rank.states.clear([0])
    kept = [x[1:].clone() for layer in rank.states.layers for x in (layer.conv, layer.state)]
    rehearse(rank.runner, config, 150, rank.cache)
    now = [x[1:] for layer in rank.states.layers for x in (layer.conv, layer.state)]
    assert all(
        torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(kept, now, strict=True)
    )
    assert tokens_of(engine.generate(prompts(), 8)) == tokens_of(want)
