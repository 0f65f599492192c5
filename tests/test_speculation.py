"""Drafting changes how fast an answer comes, never the answer.

Bits of logits are compared beside tokens, so that a state that is a little off shows at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import talks
from tests.chances import LIMIT, chi_square_deviation
from tests.closeness import assert_same_bits
from tests.copying import Copying, write_copying_mtp
from tests.models.draft_rig import DraftingRank, on_ranks
from tests.rig import Answer, LocalEngine
from tests.runtime.fakes import Scripted
from tests.tiny import DRAFTING, random_ids, write_checkpoint
from unisono.launcher.model_source import resolve_model
from unisono.ops.reference.filters import filter_logits
from unisono.ops.reference.penalties import penalize
from unisono.ops.table import Ops
from unisono.runtime.protocol import SamplingParams
from unisono.workers.protocol import StepPlan

LENGTHS = (*range(1, 13), 63, 64, 65, 66)
VOCABULARY = 199
RECIPES = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=30, seed=3, min_tokens=7, logit_bias=((5, 1.0),)),
    SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01, seed=2, repetition_penalty=1.3),
    SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, stop_token_ids=(50, 60)),
)


def changing(most: int, seed: int = 0) -> Callable[[], Scripted]:
    def script() -> Iterator[int]:
        rng = random.Random(seed)
        while True:
            yield rng.randint(0, most)

    return lambda: Scripted(script())


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [random_ids(length, VOCABULARY, seed=length) for length in lengths]


def same(answers: Sequence[Answer], plain: Sequence[Answer]) -> None:
    for number, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
        assert answer.token_ids == wanted.token_ids, f"request {number}"
        assert answer.reason == wanted.reason
        logits = torch.stack(answer.logits), torch.stack(wanted.logits)
        assert_same_bits(f"logits of request {number}", *logits)


@pytest.fixture(scope="module")
def erring(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Copying]:
    """A model of which a third of the drafts is wrong."""
    directory = tmp_path_factory.mktemp("erring")
    wrong = random.Random(0).sample(range(3, VOCABULARY), VOCABULARY // 3)
    return directory, write_copying_mtp("qwen3-next", directory, wrong=wrong)


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_whose_drafts_are_mostly_wrong(
    name: str, dtype: str, tmp_path: Path
) -> None:
    write_checkpoint(name, tmp_path, mtp=True)
    asked = prompts((1, 2, 3, 12, 64, 66))
    plain = LocalEngine(tmp_path, dtype=dtype).generate(asked, max_tokens=12)
    engine = LocalEngine(tmp_path, dtype=dtype, num_drafts=3)
    same(engine.generate(asked, max_tokens=12), plain)
    assert sum(map(sum, engine.drafted)) > 2 * sum(map(sum, engine.accepted))


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_every_number_of_drafts_alone_and_in_company(
    erring: tuple[Path, Copying], num_drafts: int
) -> None:
    drafts_change_nothing(*erring, num_drafts, (1, 2, 9, 63, 65), (3, 10))


@pytest.mark.soak
@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_every_number_of_drafts_with_every_length(
    erring: tuple[Path, Copying], num_drafts: int
) -> None:
    drafts_change_nothing(*erring, num_drafts, LENGTHS, LENGTHS)


def drafts_change_nothing(
    path: Path, model: Copying, num_drafts: int, whole: Sequence[int], last: Sequence[int]
) -> None:
    """B42, B71: greedy and drawn, with ends of text and limits; prompts of `whole` tokens all at a
    time, and some alone, then prompts whose last chunk has `last` tokens."""
    asked = prompts([*whole, *(64 + length for length in last)])
    ends = [model.answer(p[-1], 9)[-1] for p in prompts((1, 9))]
    params = [RECIPES[i % len(RECIPES)] for i in range(len(asked))]
    options: dict[str, Any] = {"max_tokens": 12, "eos_token_ids": ends}
    plain = LocalEngine(path, max_model_len=150).generate(asked, params=params, **options)
    assert {answer.reason for answer in plain} == {"stop", "length"}
    drafting = LocalEngine(path, max_model_len=150, num_drafts=num_drafts, max_step_tokens=100)
    together = len(whole)
    answers = drafting.generate(asked[:together], params=params[:together], **options)
    same(answers, plain[:together])
    accepted = [sum(each) for each in drafting.accepted]
    drafted = [sum(each) for each in drafting.drafted]
    assert 0 < sum(accepted) < sum(drafted)
    for number in (0, 1, together - 1):
        one = drafting.generate([asked[number]], params=params[number : number + 1], **options)
        same(one, plain[number : number + 1])
    # A step of 64 tokens holds no more of a prompt than its first block.
    options["scheduling"] = {"max_step_tokens": 64}
    same(drafting.generate(asked[together:], params=params[together:], **options), plain[together:])


def test_only_ids_of_the_vocabulary_are_embedded(erring: tuple[Path, Copying]) -> None:
    """B42: with each number of drafts, also where fewer were made than may be; what was never
    drafted is no id, and counts as no draft."""
    path, _ = erring
    engines = [
        (LocalEngine(path, num_drafts=most, ops_of=strict_embedding, **options), most)
        for most in range(1, 9)
        for options in ({"policy_of": changing(most)} if most % 3 else {"accept": "rejection"},)
    ]
    free, ends = SamplingParams(temperature=1.0), [50, 60]
    for engine, most in engines:
        plans = noted_plans(engine)
        params = [SamplingParams(), free, SamplingParams(temperature=0.8, seed=1)]
        engine.generate(prompts((1, 63, 9)), 12, [0, 1, 4], ends, params=params)
        [rank] = engine.ranks
        assert int(rank.runner._slots.token_ids.min()) >= 0
        checked = sum(sum(plan.rows.drafts) for plan in plans)
        # Rows in vain, of answers that have ended, are counted for nobody.
        assert checked - 2 * most * len(params) <= sum(map(sum, engine.drafted)) <= checked
        assert sum(map(sum, engine.accepted)) > 0


def strict_embedding(rank: int, ops: Ops) -> Ops:
    """Refuses ids that are none."""

    def embed_shard(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
        assert 0 <= int(token_ids.min()) <= int(token_ids.max()) < VOCABULARY, token_ids
        return ops.embed_shard(token_ids, table, first_id)

    return replace(ops, embed_shard=embed_shard)


def noted_plans(engine: LocalEngine) -> list[StepPlan]:
    """What the engine runs from now on."""
    plans: list[StepPlan] = []
    step = engine.step

    def noted(plan: StepPlan) -> Any:
        plans.append(plan)
        return step(plan)

    engine.step = noted  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_draft_alike(erring: tuple[Path, Copying], tp: int) -> None:
    """B16; the config has 2 KV heads (B20). Drafts are of a step's result, which ranks compare."""
    path, _ = erring
    asked = prompts((1, 12, 64, 66))
    plain = LocalEngine(path, tp=tp).generate(asked, max_tokens=12)
    same(LocalEngine(path, tp=tp, num_drafts=3).generate(asked, max_tokens=12), plain)


def test_drafts_are_as_right_once_everything_was_given_back_and_loaded_again(
    erring: tuple[Path, Copying],
) -> None:
    """B24: a draft layer that came back as zeros would cost acceptance, and no token."""
    path, _ = erring
    asked = prompts((1, 12, 64, 66))
    engine = LocalEngine(path, tp=2, num_drafts=3)
    plain = engine.generate(asked, max_tokens=12)
    drafted, accepted = engine.drafted, engine.accepted
    assert sum(map(sum, accepted)) > 0
    engine.sleep()
    engine.wake()
    engine.reload()
    same(engine.generate(asked, max_tokens=12), plain)
    assert (engine.drafted, engine.accepted) == (drafted, accepted)


def test_ranks_whose_logits_differ_choose_and_accept_alike(erring: tuple[Path, Copying]) -> None:
    """B13: noise on rank 1. Ids are chosen among all ranks' keys, so none can go its own way."""
    path, _ = erring
    noise = torch.Generator().manual_seed(0)

    def ops_of(rank: int, ops: Ops) -> Ops:
        def pack_head(*args: Any) -> Any:
            head = ops.pack_head(*args)

            def noisy(x: Tensor) -> Tensor:
                logits = head(x)
                return logits + 1e-3 * torch.randn(logits.shape, generator=noise)

            return noisy if rank == 1 else head

        return replace(ops, pack_head=pack_head)

    asked = prompts((1, 12, 64, 66))
    engine = LocalEngine(path, tp=2, num_drafts=3, ops_of=ops_of)
    # `LocalEngine.step` compares tokens, counts and digests of the ranks after every step.
    answers = engine.generate(asked, max_tokens=40)
    assert all(len(answer.token_ids) == 40 for answer in answers)
    assert 0 < sum(map(sum, engine.accepted)) < sum(map(sum, engine.drafted))


UP_TO_64: dict[str, Any] = {"tp": 2, "max_model_len": 64}
NEAR_64 = (*range(57, 64), 3)


@pytest.fixture(scope="module")
def to_the_end(erring: tuple[Path, Copying]) -> dict[int, Answer]:
    """Answers without drafts that end at the limit, by their prompts' lengths."""
    answers = LocalEngine(erring[0], **UP_TO_64).generate(prompts(NEAR_64), max_tokens=100)
    return dict(zip(NEAR_64, answers, strict=True))


@pytest.mark.parametrize("prompt_length", range(57, 64))
def test_drafts_stop_at_the_longest_request(
    erring: tuple[Path, Copying], to_the_end: dict[int, Answer], prompt_length: int
) -> None:
    """B14: near the limit every rank drafts as many, or none; 64 is a block's border, too."""
    path, _ = erring
    asked = prompts((prompt_length, 3))
    answers = LocalEngine(path, num_drafts=4, **UP_TO_64).generate(asked, max_tokens=100)
    same(answers, [to_the_end[prompt_length], to_the_end[3]])
    assert [answer.reason for answer in answers] == ["length"] * 2
    assert len(answers[0].token_ids) == 64 - prompt_length


@pytest.mark.parametrize(
    ("max_in_flight", "state_dtype"), [(1, "bfloat16"), (2, "float32"), (3, "bfloat16")]
)
def test_the_number_changes_from_step_to_step(
    erring: tuple[Path, Copying], max_in_flight: int, state_dtype: str
) -> None:
    """B38, B44: some steps without drafts, some with fewer than were made, planned ahead of
    results."""
    path, _ = erring
    asked = prompts((1, 2, 9, 64, 65))
    options: dict[str, Any] = {"state_dtype": state_dtype, "max_model_len": 120}
    plain = LocalEngine(path, **options).generate(asked, max_tokens=24)
    engine = LocalEngine(
        path, num_drafts=5, policy_of=changing(5), max_in_flight=max_in_flight, **options
    )
    same(engine.generate(asked, max_tokens=24, arrivals=[0, 0, 2, 5, 9]), plain)


def test_batches_that_merge_and_split_for_hundreds_of_steps(erring: tuple[Path, Copying]) -> None:
    """B44: requests come at any time and leave after 1 to 30 tokens, with prompts in chunks among
    the decoding rows and numbers of drafts that change: each answers as it does alone."""
    path, _ = erring
    rng = random.Random(44)
    asked = [random_ids(rng.choice((1, 2, 5, 30, 64, 70)), VOCABULARY, seed=i) for i in range(44)]
    ends = rng.sample(range(3, VOCABULARY), 12)
    arrivals = sorted(rng.randint(0, 300) for _ in asked)
    plain = LocalEngine(path, prefix_cache=False)
    alone = [plain.generate([each], 30, eos_token_ids=ends)[0] for each in asked]
    assert len({len(answer.token_ids) for answer in alone}) > 10
    engine = LocalEngine(
        path, num_drafts=4, policy_of=changing(4), max_requests=6, max_step_tokens=70
    )
    plans = noted_plans(engine)
    same(engine.generate(asked, 30, arrivals, ends), alone)
    assert len(plans) > 200
    assert {len(plan.rows) for plan in plans} >= {1, 2, 3, 4}
    mixed = [plan for plan in plans if any(plan.rows.drafts) and not plan.rows.decode_only]
    assert len(mixed) > 10


def test_pre_emption_prefix_hits_and_leavers(erring: tuple[Path, Copying]) -> None:
    path, _ = erring
    stem = random_ids(140, VOCABULARY, seed=1)
    asked = [stem[:120], stem[:128], stem[:70] + random_ids(50, VOCABULARY, seed=2), stem]
    options = {"max_model_len": 200, "tp": 2}
    plain = LocalEngine(path, prefix_cache=False, **options).generate(asked, max_tokens=30)
    crowded = LocalEngine(path, num_blocks=6, max_step_tokens=100, num_drafts=3, **options)
    answers = crowded.generate(asked, max_tokens=30, arrivals=[0, 3, 5, 9])
    assert crowded.num_preemptions > 0
    assert any(crowded.num_cached_tokens)
    same(answers, plain)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_anything_at_any_time(erring: tuple[Path, Copying], seed: int) -> None:
    """Requests of all kinds come and leave at any step, are pre-empted and find prefixes, with
    numbers of drafts that change: each answers as alone and without drafts, as far as it got."""
    path, _ = erring
    rng = random.Random(seed)
    stem = random_ids(130, VOCABULARY, seed=seed)
    lengths = [rng.choice((1, 2, 5, 12, 63, 64, 66, 128, 130)) for _ in range(6)]
    asked = [stem[:each] if rng.random() < 0.5 else prompts([each])[0] for each in lengths]
    params = [rng.choice(RECIPES) for _ in asked]
    ends, most = rng.sample(range(3, VOCABULARY), 4), rng.randint(1, 8)
    options: dict[str, Any] = {"tp": rng.choice((1, 1, 2)) if seed else 1, "max_model_len": 200}
    plain = LocalEngine(path, prefix_cache=False, **options)
    alone = [
        plain.generate([prompt], 16, eos_token_ids=ends, params=[recipe])[0]
        for prompt, recipe in zip(asked, params, strict=True)
    ]
    engine = LocalEngine(
        path,
        num_blocks=4,
        max_requests=rng.choice((2, 4)),
        max_step_tokens=rng.choice((64, 100, 200)),
        max_in_flight=rng.choice((1, 2, 3)),
        num_drafts=most,
        policy_of=changing(most, seed),
        **options,
    )
    aborts = {number: rng.randint(0, 30) for number in rng.sample(range(len(asked)), 2)}
    arrivals = [rng.randint(0, 20) for _ in asked]
    answers = engine.generate(asked, 16, arrivals, ends, params=params, aborts=aborts)
    for number, (answer, wanted) in enumerate(zip(answers, alone, strict=True)):
        count = len(answer.token_ids)
        if number in aborts and not answer.reason:
            begun = wanted.token_ids[:count], wanted.logits[:count]
            wanted = replace(wanted, token_ids=begun[0], logits=begun[1], reason="")
        else:
            assert count
        if count:
            same([answer], [wanted])


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_a_row_in_vain_touches_no_other_state(
    erring: tuple[Path, Copying], max_in_flight: int
) -> None:
    """B40: an answer ends among accepted drafts, with steps in flight that name its slot and state,
    which the next request takes at once."""
    path, model = erring
    asked = prompts((1, 2, 9, 12, 63, 65, 66))
    ends = [model.answer(prompt[-1], 3 + i)[-1] for i, prompt in enumerate(asked)]
    plain = LocalEngine(path).generate(asked, max_tokens=12, eos_token_ids=ends)
    assert all(answer.reason == "stop" for answer in plain)
    engine = LocalEngine(
        path, num_drafts=3, max_requests=2, num_states=2, max_in_flight=max_in_flight
    )
    same(engine.generate(asked, max_tokens=12, eos_token_ids=ends), plain)


def test_what_is_sampled_does_not_depend_on_drafts(erring: tuple[Path, Copying]) -> None:
    """B71: noise, filters, penalties, biases and late ids at every place of a chain."""
    path, _ = erring
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.2, top_p=0.9, seed=2, repetition_penalty=1.3),
        SamplingParams(frequency_penalty=1.0, presence_penalty=0.5),
        SamplingParams(temperature=0.8, top_k=30, seed=3, min_tokens=12, logit_bias=((5, 1.0),)),
        SamplingParams(temperature=0.7, min_p=0.05, seed=4, stop_token_ids=(50, 60, 70)),
        SamplingParams(),
    ]
    asked = prompts((1, 5, 9, 12, 64, 66))
    plain = LocalEngine(path, max_model_len=150).generate(asked, max_tokens=24, params=params)
    engine = LocalEngine(path, max_model_len=150, num_drafts=4)
    same(engine.generate(asked, max_tokens=24, params=params), plain)
    assert sum(map(sum, engine.accepted)) > 0


def test_log_probabilities_are_those_of_accepted_tokens(erring: tuple[Path, Copying]) -> None:
    """B72: with drafts as without, by bits."""
    path, _ = erring
    params = [
        SamplingParams(logprobs=2, prompt_logprobs=1),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=0.9, seed=7),
    ]
    asked = prompts((7, 12, 66))
    plain = LocalEngine(path).generate(asked, max_tokens=16, params=params)
    drafting = LocalEngine(path, num_drafts=3).generate(asked, max_tokens=16, params=params)
    same(drafting, plain)
    for answer, wanted in zip(drafting, plain, strict=True):
        assert answer.logprobs == wanted.logprobs
        assert answer.prompt_logprobs == wanted.prompt_logprobs


ATTENTION_ALONE = {"layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("name", "fields", "temperature", "num_drafts", "tp"),
    [
        *((DRAFTING[0], {}, 0.7, 1, 1), (DRAFTING[1], {}, 0.0, 2, 1), (DRAFTING[2], {}, 0.7, 3, 1)),
        *((DRAFTING[0], {}, 0.0, 4, 1), (DRAFTING[1], {}, 0.7, 8, 1), (DRAFTING[2], {}, 0.0, 8, 1)),
        *((DRAFTING[0], ATTENTION_ALONE, 0.7, 8, 1), (DRAFTING[1], ATTENTION_ALONE, 0.0, 1, 2)),
    ],
)
def test_a_layer_that_is_always_right_is_always_accepted(
    name: str,
    fields: dict[str, Any],
    temperature: float,
    num_drafts: int,
    tp: int,
    tmp_path: Path,
) -> None:
    """B48, B54, B55: at every place of a chain, and of drawn tokens too: drafts are drawn with the
    noise of their place. Also behind layers that are all attention."""
    write_copying_mtp(name, tmp_path, silent=True, **fields)
    params = [SamplingParams(temperature=temperature, seed=1)] * 3
    engine = LocalEngine(tmp_path, num_drafts=num_drafts, tp=tp)
    plain = LocalEngine(tmp_path, tp=tp).generate(prompts((1, 9, 65)), max_tokens=25, params=params)
    same(engine.generate(prompts((1, 9, 65)), max_tokens=25, params=params), plain)
    assert engine.accepted == engine.drafted
    # The first token comes with the prompt, then one more a step than drafts.
    assert [each[0] for each in engine.drafted] == [-(-24 // (num_drafts + 1))] * 3


def test_steps_leave_the_drafts_that_the_layer_makes_of_all_tokens() -> None:
    """Behind a prompt in chunks, and behind steps of which some drafts were right: those of the
    whole text in one go, whose chains are transformers' (tests/models/test_tiny_mtp.py). Keys that
    rejected drafts left behind, or lie at another place, would show."""
    path = resolve_model("tiny-mtp").path
    prompt = talks.ids_of("class Reader:\n    def read(self, size):\n" * 5)
    engine = LocalEngine(path, num_drafts=8, max_in_flight=1)
    slots = engine.ranks[0].runner._slots
    left: dict[int, list[int]] = {}

    def note(step: int) -> None:
        known = int(slots.lengths[1])
        if known > len(prompt):
            left[known] = slots.token_ids[1, : known + 8].tolist()

    limits = {"max_step_tokens": 64}
    engine.generate([prompt], 24, before_step=note, scheduling=limits)
    assert sum(engine.drafted[0]) > sum(engine.accepted[0]) > 3
    assert len(prompt) > 64

    def drafted(rank: DraftingRank) -> dict[int, list[int]]:
        text = left[max(left)][:-8]
        hidden = torch.cat((rank.forward(prompt), rank.forward(text[len(prompt) :], len(prompt))))
        return {
            known: text[:known] + rank.chain(text[:known], hidden[: known - 1], 8)[0]
            for known in left
        }

    assert on_ranks(path, 1, drafted) == [left]


def test_a_talk_of_twelve_turns(tmp_path: Path) -> None:
    """B43: each turn starts from snapshots of the turns before, and to the last no answer changes
    and no draft is wrong."""
    model = write_copying_mtp("qwen3-next", tmp_path)
    talk: list[int] = []
    asked, answers = [], []
    for turn in range(12):
        asked.append(talk + random_ids(20, VOCABULARY, seed=turn))
        answers.append(model.answer(asked[-1][-1], 12))
        talk = asked[-1] + answers[-1]
    arrivals = [20 * turn for turn in range(12)]
    plain = LocalEngine(tmp_path, max_model_len=400).generate(asked, 12, arrivals)
    assert [answer.token_ids for answer in plain] == answers
    engine = LocalEngine(tmp_path, max_model_len=400, num_drafts=3)
    same(engine.generate(asked, 12, arrivals), plain)
    assert engine.num_cached_tokens[-1] > 64
    assert engine.accepted == engine.drafted
    assert all(map(sum, engine.drafted))


def test_a_long_chain_is_as_often_right_at_its_first_place_as_a_short_one(
    erring: tuple[Path, Copying],
) -> None:
    """B55: with 8 drafts as with 1, within 3 points; numbers above 8 are refused at the start
    (tests/launcher/test_resolve.py)."""
    path, model = erring
    asked = [[token] for token in model.answer(3, VOCABULARY - 3)]
    shares = []
    for num_drafts in (1, 8):
        engine = LocalEngine(path, num_drafts=num_drafts, max_requests=64, num_blocks=64)
        engine.generate(asked, max_tokens=12)
        accepted, drafted = (
            sum(each[0] for each in numbers) for numbers in (engine.accepted, engine.drafted)
        )
        shares.append(accepted / drafted)
    assert abs(shares[0] - shares[1]) < 0.03, shares
    assert 0.5 < shares[0] < 0.8


def test_a_talk_with_trained_drafts() -> None:
    """B43: turns of 16 tokens here; tests/gpu/test_speculation.py has the whole 8,000."""
    options = {"max_model_len": 1024, "max_requests": 8, "num_blocks": 128}
    talks.assert_drafts_change_no_turn(16, options)
    lengths = talks.lengths_by_turn(4, 16, options)
    assert sum(lengths[-3:]) > 0.85 * sum(lengths[:3]), lengths


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
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=["top-k", "top-p and penalties"],
)
def test_drafted_tokens_are_drawn_from_the_exact_distribution(
    recipe: dict[str, Any], num_draws: int, tmp_path: Path
) -> None:
    """B43, B54: three tokens, of which two were drafted: chi-square over what can come of them
    together."""
    write_copying_mtp("qwen3.5", tmp_path, silent=True)
    prompt = random_ids(9, VOCABULARY, seed=9)
    exact = {(): 1.0}
    engine = LocalEngine(tmp_path, max_requests=256, num_blocks=256, num_drafts=3)
    for _ in range(3):
        exact = {
            (*said, token): odds * share
            for said, odds in exact.items()
            for token, share in distribution(engine, prompt, said, recipe).items()
        }
    params = [SamplingParams(seed=seed, ignore_eos=True, **recipe) for seed in range(num_draws)]
    seen: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for start in range(0, num_draws, 256):
        part = params[start : start + 256]
        answers = engine.generate([prompt] * len(part), max_tokens=4, params=part)
        seen.update(tuple(answer.token_ids[:3]) for answer in answers)
        drafted += sum(map(sum, engine.drafted))
        accepted += sum(map(sum, engine.accepted))
    assert accepted > 0.8 * drafted
    assert chi_square_deviation(seen, exact, num_draws) < LIMIT


def distribution(
    engine: LocalEngine, prompt: Sequence[int], said: Sequence[int], recipe: dict[str, Any]
) -> dict[int, float]:
    """Of the token behind `prompt` and `said`, by the formulas that are tested by themselves."""
    params = SamplingParams(**recipe)
    ids = torch.tensor([[*prompt, *said]])
    logits = engine.prompt_logits(ids[0].tolist())[-1:].float().cpu()

    def one(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype)

    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    lengths = (one(len(prompt), torch.int64), one(ids.shape[1], torch.int64))
    logits = penalize(logits, ids, *lengths, *map(one, penalties), 0)
    for token, bias in params.logit_bias:
        logits[:, token] += bias
    temperature, top_k = one(params.temperature), one(params.top_k, torch.int64)
    left = filter_logits(logits, temperature, top_k, one(params.top_p), one(params.min_p))
    odds = (left[0].double() / params.temperature).softmax(0)
    return {int(token): float(odds[token]) for token in odds.nonzero().flatten()}
