"""What the ranks are told about choosing tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace

from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.runtime.sampling_wire import is_rejecting, open_sampling, with_seed
from unisono.workers.protocol import SlotSampling, unpack_sampling

DRAWN = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=42)


def request(params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(
        client="test",
        request_id=1,
        prompt_ids=array("i", prompt),
        params=params,
        max_tokens=4,
        arrived_s=0.0,
    )


def seed_of(params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)) -> int:
    return unpack_sampling(open_sampling([request(params, prompt)], [2]))[0].seed


def test_every_parameter_arrives() -> None:
    greedy, drawn = unpack_sampling(open_sampling([request(SamplingParams()), request(DRAWN)], [2]))
    assert greedy == SlotSampling(num_prompt_tokens=3, max_length=7, stop_ids=(2,))
    assert drawn == replace(
        greedy, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=seed_of(DRAWN)
    )


def test_seed_and_prompt_choose_the_noise() -> None:
    other_seed = SamplingParams(temperature=0.7, seed=43)
    assert seed_of(DRAWN) == seed_of(DRAWN) == seed_of(SamplingParams(temperature=2.0, seed=42))
    assert len({seed_of(DRAWN), seed_of(other_seed), seed_of(DRAWN, (1, 2, 4))}) == 3
    for seed in (0, 2**63 - 1):
        assert 0 <= seed_of(SamplingParams(temperature=1.0, seed=seed)) < 2**63


def test_only_a_drawn_answer_without_a_seed_is_given_one() -> None:
    assert with_seed(DRAWN) is DRAWN
    greedy = SamplingParams()
    assert with_seed(greedy) is greedy
    seeds = {with_seed(SamplingParams(temperature=1.0)).seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


def test_drafts_are_rejected_only_of_what_has_no_seed_and_is_drawn() -> None:
    free = SamplingParams(temperature=0.7)
    assert is_rejecting(free, "rejection")
    for params in (DRAWN, SamplingParams(temperature=0.7, seed=0), SamplingParams()):
        assert not is_rejecting(params, "rejection")
    assert not is_rejecting(free, "coupled")
    asked = request(with_seed(free))
    assert [unpack_sampling(open_sampling([asked], [2]))[0].rejects] == [0]
    asked.rejects = True
    assert [unpack_sampling(open_sampling([asked], [2]))[0].rejects] == [1]


def test_penalties_biases_and_late_ids_arrive_for_greedy_answers_too() -> None:
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((7, -100.0), (1, 2.5)),
        min_tokens=3,
        stop_token_ids=(9, 2),
    )
    [slot] = unpack_sampling(open_sampling([request(params)], [2, 4]))
    assert slot == SlotSampling(
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        num_prompt_tokens=3,
        min_tokens=3,
        max_length=7,
        bias=((7, -100.0), (1, 2.5)),
        stop_ids=(2, 4, 9),
    )
    assert slot.late_ids == slot.stop_ids


def test_only_what_would_end_the_answer_is_late() -> None:
    ignoring = SamplingParams(ignore_eos=True, min_tokens=2, stop_token_ids=(9,))
    [slot] = unpack_sampling(open_sampling([request(ignoring)], [2, 4]))
    assert slot.late_ids == slot.stop_ids == (9,)
    [slot] = unpack_sampling(open_sampling([request(SamplingParams(stop_token_ids=(9,)))], {4, 2}))
    assert (slot.late_ids, slot.stop_ids) == ((), (2, 4, 9)), "the model's own come first"
    assert not slot.is_biased


def test_a_greedy_request_that_wants_log_probabilities_says_so() -> None:
    asked = [SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=20), SamplingParams()]
    own, prompts, none = unpack_sampling(open_sampling([request(each) for each in asked], [2]))
    assert (own.logprobs, own.prompt_logprobs) == (0, -1)
    assert (prompts.logprobs, prompts.prompt_logprobs, prompts.num_prompt_tokens) == (-1, 20, 3)
    assert (none.logprobs, none.prompt_logprobs) == (-1, -1)


def test_a_wish_for_checksums_arrives() -> None:
    wish = request(SamplingParams())
    wish.checksums = True
    slots = unpack_sampling(open_sampling([request(SamplingParams()), wish], [2]))
    assert [slot.checksums for slot in slots] == [0, 1]
