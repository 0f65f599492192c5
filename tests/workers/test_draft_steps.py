"""Steps with drafts as graphs hold them, run without a GPU: the bits of eager ones, and no others.

Kernels that lay a step out and settle it run in Triton's interpreter, the model's arithmetic is
that of the CPU; one test has all kernels of the GPU. Both engines end with the same caches, states
and slot table, byte for byte.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_same_bits
from tests.copying import write_copying_mtp
from tests.device_plans import with_device_plans, with_kernels
from tests.ops import kernel_rig
from tests.rig import Answer, LocalEngine
from tests.test_rejection import always_the_same, give_luck
from tests.tiny import random_ids, write_checkpoint
from unisono.ops.kernels import draft_plan
from unisono.runtime.protocol import SamplingParams
from unisono.runtime.speculation import DraftPolicy
from unisono.workers import draft_steps, speculator
from unisono.workers.draft_steps import used_places, width_of
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s
from unisono.workers.speculator import is_forced

T = TypeVar("T")
VOCABULARY = 199
LENGTHS = (1, 2, 9, 63, 64)
CAPTURED = "cpu has no graphs"
"""Reason that is counted of what a GPU would replay."""


class Scripted:
    """A policy that says what it was told to, over and over."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script, self._step = script, 0

    def choose(self, num_rows: int) -> int:
        self._step += 1
        return self._script[self._step % len(self._script)]

    def note(self, num_rows: int, drafts: int, counts: Sequence[int], seconds: float) -> None:
        pass


def scripted(*script: int) -> Callable[[], DraftPolicy]:
    return lambda: Scripted(script)


def wrong(share: float) -> list[int]:
    return random.Random(0).sample(range(3, VOCABULARY), int(VOCABULARY * share))


@pytest.fixture(scope="module")
def erring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a third of the drafts is wrong."""
    directory = tmp_path_factory.mktemp("erring")
    write_copying_mtp("qwen3-next", directory, wrong=wrong(1 / 3))
    return directory


class Both:
    """Two engines, whose buffers start as zeros: one runs the bodies of graphs."""

    @torch.inference_mode()
    def __init__(self, path: Path, ops_of: Any = with_device_plans, **options: Any) -> None:
        eager_ops = options.pop("eager_ops", lambda rank, ops: ops)
        prompts = options.pop("prompt_graphs", False)
        self.eager = LocalEngine(path, ops_of=eager_ops, **options)
        options |= {"graphs": True, "prompt_graphs": prompts}
        self.bodies = LocalEngine(path, ops_of=ops_of, **options)
        self.plans: list[StepPlan] = []
        for rank in (*self.eager.ranks, *self.bodies.ranks):
            for buffer in memory_of(rank):
                buffer.zero_()
        _note_plans(self.bodies, self.plans)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """Have both answer; compare all that there is."""
        want = self.eager.generate(prompts, **options)
        got = self.bodies.generate(prompts, **options)
        same(got, want)
        assert self.bodies.accepted == self.eager.accepted
        for mine, theirs in zip(self.bodies.ranks, self.eager.ranks, strict=True):
            pairs = zip(buffers_of(mine), buffers_of(theirs), strict=True)
            for number, (one, other) in enumerate(pairs):
                # Row 0 of each, block, state or slot, is scratch.
                assert_same_bits(f"buffer {number}", one[1:], other[1:])
        return got

    def reasons(self, piece: str) -> set[str]:
        """Why `piece` was not replayed."""
        eager_runs = self.bodies.ranks[0].pool.eager_runs
        return {reason for name, reason in eager_runs if name == piece}


def buffers_of(rank: Any) -> Iterator[Tensor]:
    """Caches, states and slot table, each with what it is of in the first dimension."""
    yield from (*memory_of(rank), *rank.runner._slots.tensors)


def memory_of(rank: Any) -> Iterator[Tensor]:
    for layer in rank.cache.layers:
        yield from (layer.k, layer.v)
    for state in rank.states.layers:
        yield from (state.conv, state.state)
        if state.pending is not None:
            yield from (getattr(state.pending, name) for name in state.pending.__slots__)


def same(got: Sequence[Answer], want: Sequence[Answer]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.token_ids == other.token_ids, f"request {number}"
        assert one.reason == other.reason
        assert one.logprobs == other.logprobs
        logits = torch.stack(one.logits), torch.stack(other.logits)
        assert_same_bits(f"logits of request {number}", *logits)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [random_ids(length, VOCABULARY, seed=length) for length in lengths]


def _note_plans(engine: LocalEngine, plans: list[StepPlan]) -> None:
    step = engine.step

    def noted(plan: StepPlan) -> Any:
        plans.append(plan)
        return step(plan)

    engine.step = noted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3-next", "float32"),
        ("qwen3.5-moe", "bfloat16"),
        pytest.param("qwen3.5", "bfloat16", marks=pytest.mark.soak),
    ],
)
def test_numbers_of_drafts_that_change_from_step_to_step(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Requests come and end; heights with padding; rows without drafts among rows with some."""
    write_copying_mtp(name, tmp_path, wrong=wrong(1 / 3))
    both = Both(
        tmp_path,
        dtype=dtype,
        state_dtype=dtype,
        num_drafts=4,
        max_requests=4,
        policy_of=scripted(4, 4, 2, 0, 3, 3, 1),
    )
    both.generate(prompts(), max_tokens=15, arrivals=[0, 0, 3, 5, 9], eos_token_ids=[50])
    assert both.reasons("forward") == both.reasons("tail") == {CAPTURED}
    counted = both.bodies.ranks[0].pool.eager_runs
    assert counted["tail", CAPTURED] == len(both.plans)
    decoding = [plan for plan in both.plans if plan.rows.decode_only]
    drafts = [list(plan.rows.drafts) for plan in decoding]
    assert {max(each, default=0) for each in drafts} >= {0, 1, 2, 3}
    assert any(len(plan.rows) == 3 for plan in decoding)
    assert any(0 < max(plan.rows.drafts, default=0) < plan.num_proposals for plan in decoding)
    if name == "qwen3-next":
        assert any(0 in each and any(each) for each in drafts)


@pytest.mark.parametrize("right", ["all", "none", "every other"])
def test_acceptance(right: str, tmp_path: Path) -> None:
    asked: list[list[int]] = [[7], [12, 40], [9, 8, 100]]
    if right == "none":
        write_checkpoint("qwen3-next", tmp_path, mtp=True)
        asked = prompts((1, 2, 3))
    else:
        model = write_copying_mtp("qwen3-next", tmp_path)
        if right == "every other":
            circle = model.answer(3, VOCABULARY - 3)
            write_copying_mtp("qwen3-next", tmp_path, wrong=circle[::2])
    both = Both(tmp_path, num_drafts=3, max_requests=4)
    both.generate(asked, max_tokens=9)
    accepted, drafted = (
        sum(map(sum, numbers)) for numbers in (both.bodies.accepted, both.bodies.drafted)
    )
    match right:
        case "all":
            assert accepted == drafted > 0
        case "none":
            assert accepted < drafted / 8
        case _:
            first, second = (sum(each[place] for each in both.bodies.accepted) for place in (0, 1))
            assert first > 0
            assert second == 0


@pytest.mark.parametrize("num_drafts", range(9))
def test_nothing_comes_from_behind_the_end_of_an_answer(num_drafts: int, tmp_path: Path) -> None:
    """Stop ids within runs of right drafts, limits, prompts among rows of what has ended, and slots
    that the next requests take: each token that ranks answer is of an answer, and rows in vain
    change nothing that steps of the other kind do not."""
    model = write_copying_mtp("qwen3-next", tmp_path)
    asked = [[7], [12, 40], [9, 8, 100], random_ids(65, VOCABULARY, seed=1), [30], [50, 2]]
    ends = [model.answer(tokens[-1], 3 + 2 * i)[-1] for i, tokens in enumerate(asked[:4])]
    both = Both(tmp_path, num_drafts=num_drafts, max_in_flight=3, max_requests=3)
    counts: list[list[int]] = []
    _note_counts(both.bodies, counts)
    for engine in (both.eager, both.bodies):
        _check_rows_in_vain(engine)
    params = [SamplingParams(max_tokens=12), *[SamplingParams()] * 4, SamplingParams(logprobs=1)]
    how: dict[str, Any] = {"params": params, "arrivals": [0, 0, 0, 1, 3, 4]}
    answers = both.generate(asked, max_tokens=12, eos_token_ids=ends, **how)
    assert {answer.reason for answer in answers} == {"stop", "length"}
    assert sum(map(sum, counts)) == sum(len(answer.token_ids) for answer in answers)
    assert any(0 in each for each in counts), "rows in vain"


def _check_rows_in_vain(engine: LocalEngine) -> None:
    """What has ended keeps its tokens, keys and values, and its state, in steps that name it."""
    [rank] = engine.ranks
    step, table = engine.step, rank.runner._slots
    assert rank.states is not None

    def belongings(slots: list[int]) -> list[Tensor]:
        blocks, states = table.block_table[slots].flatten().unique(), table.states[slots]
        parts = [part[slots] for part in table.tensors if part is not table.block_table]
        parts += [
            part[blocks[blocks > 0]] for layer in rank.cache.layers for part in (layer.k, layer.v)
        ]
        return [*parts, *(part[:, states] for part in rank.states._tensors)]

    def checked(plan: StepPlan) -> Any:
        going_on = table.going_on().tolist()
        ended = [slot for slot in plan.rows.slot if not going_on[slot]]
        in_vain = sorted({*ended} - {*plan.open_slot} - {*plan.block_slot})
        before = belongings(in_vain)
        output = step(plan)
        for number, (old, new) in enumerate(zip(before, belongings(in_vain), strict=True)):
            assert_same_bits(f"part {number} of what has ended", new, old)
        return output

    engine.step = checked  # type: ignore[method-assign]


def _note_counts(engine: LocalEngine, counts: list[list[int]]) -> None:
    """How many tokens each row of each step answers."""
    step = engine.step

    def noted(plan: StepPlan) -> Any:
        output, logits = step(plan)
        counts.append([*output.counts] or [1] * len(output.tokens))
        return output, logits

    engine.step = noted  # type: ignore[method-assign]


@pytest.mark.parametrize(("tp", "max_in_flight"), [(1, 1), (2, 3)])
def test_ranks_and_steps_planned_ahead(
    erring: Path, tp: int, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks are threads here, and the interpreter runs one kernel at a time.
    lock = threading.Lock()
    for name in ("expand_drafts", "settle_drafts", "place_drafts"):
        monkeypatch.setattr(draft_plan, name, _locked(getattr(draft_plan, name), lock))
    both = Both(erring, tp=tp, num_drafts=2, max_in_flight=max_in_flight, max_requests=3)
    both.generate(prompts((1, 12, 65, 3)), max_tokens=7)


def _locked(kernel: Callable[..., T], lock: threading.Lock) -> Callable[..., T]:
    def locked(*args: Any) -> T:
        with lock:
            return kernel(*args)

    return locked


def test_pre_emption_and_prefix_hits(erring: Path) -> None:
    stem = random_ids(140, VOCABULARY, seed=1)
    asked = [stem[:120], stem[:128], stem[:70] + random_ids(50, VOCABULARY, seed=2), stem]
    both = Both(erring, num_blocks=4, max_step_tokens=100, max_model_len=200, num_drafts=3)
    both.generate(asked, max_tokens=12, arrivals=[0, 3, 4, 5])
    assert both.bodies.num_preemptions > 0
    assert any(both.bodies.num_cached_tokens)


def test_tokens_drawn_from_all_ids_are_chosen_in_the_graph(
    erring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside greedy ones, in slots that others have left; logits are taken in pieces."""
    monkeypatch.setattr(draft_steps, "PIECE_ROWS", 5)
    both = Both(erring, num_drafts=3, max_requests=2)
    drawn = [SamplingParams(temperature=0.9, seed=seed) for seed in (1, 2)]
    greedy = [SamplingParams(), SamplingParams(top_k=3, temperature=0.0)]
    both.generate(prompts((1, 5, 9, 12)), max_tokens=9, params=[*drawn, *greedy])
    assert both.reasons("tail") == {CAPTURED}


def test_what_needs_the_host_is_counted(erring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its steps; and the model's part of them is replayed all the same."""
    both = Both(erring, num_drafts=3)
    _count_as_replays(both, monkeypatch)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.3),
        SamplingParams(logprobs=1),
    ]
    both.generate(prompts((1, 9, 5)), max_tokens=8, params=params, arrivals=[0, 2, 5])
    whys = {"sampling", "log-probabilities"}
    assert both.reasons("tail") == {"replay", "prompt tokens", *whys}
    assert both.reasons("forward") == {"replay", "prompt tokens"}


def test_drafts_that_may_be_rejected_are_judged_in_the_graph(
    erring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside drawn ones that have a seed, and greedy ones, with fewer drafts than others, none, or
    made in steps with prompts or for a filter on the host: tokens, drafts, states and caches are
    those of eager steps, byte for byte. Filters alone need the host."""
    give_luck(monkeypatch, always_the_same)
    monkeypatch.setattr(draft_steps, "PIECE_ROWS", 10)
    monkeypatch.setattr(draft_steps, "PIECE_PLACES", 4)
    monkeypatch.setattr(speculator, "PIECE_PLACES", 3)
    free, seeded = SamplingParams(temperature=0.9), SamplingParams(temperature=0.9, seed=1)
    hot, filtered = SamplingParams(temperature=2.0), SamplingParams(temperature=1.5, top_k=50)
    for script, last, whys in (
        ((3,), hot, set()),
        ((3, 3, 1, 2, 0), seeded, set()),
        ((3, 2), filtered, {"sampling"}),
    ):
        options = {"accept": "rejection", "policy_of": scripted(*script), "max_requests": 5}
        both = Both(erring, num_drafts=3, **options)
        _count_as_replays(both, monkeypatch)
        params = [free, SamplingParams(), hot, seeded, free, last]
        arrivals = [0, 0, 0, 1, 4, 6]
        both.generate(prompts((5, 9, 63, 2, 1, 7)), max_tokens=14, params=params, arrivals=arrivals)
        assert both.reasons("tail") == {"replay", "prompt tokens", *whys}
        assert both.reasons("forward") == {"replay", "prompt tokens"}
        rejecting = [sum(map(sum, counts)) for counts in zip(*_of(both, (0, 2, 4)), strict=True)]
        assert 0 < rejecting[1] < rejecting[0]


def _of(both: Both, requests: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """How many drafts of these requests were checked and right, by place."""
    for number in requests:
        yield both.bodies.drafted[number], both.bodies.accepted[number]


def test_a_nan_in_what_drafts_were_made_from_is_reported(
    erring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the row whose draft it is, by graphs as by eager steps; not of rows that reject none."""
    give_luck(monkeypatch, always_the_same)
    params = [SamplingParams(temperature=0.9, seed=1), SamplingParams(temperature=0.9)]
    for graphs in (False, True):
        options = {"graphs": graphs, "num_drafts": 2, "accept": "rejection"}
        engine = LocalEngine(erring, ops_of=with_device_plans, **options)
        [rank] = engine.ranks
        made = rank.runner._speculator.drafted_from

        @torch.inference_mode()
        def spoil(step: int, made: Any = made) -> None:
            if step == 2:
                made(torch.empty(1, 1)).fill_(float("nan"))

        with pytest.raises(FloatingPointError, match=r"sampling rows \[1\] hold NaN"):
            engine.generate(prompts((1, 9)), max_tokens=9, before_step=spoil, params=params)


def test_what_drafts_were_made_from_before_a_sleep_is_never_judged(erring: Path) -> None:
    """It stays where it is, for graphs; whoever runs afterwards has drafted anew."""
    params = [SamplingParams(temperature=0.9, seed=seed) for seed in (1, 2, 3)]
    asked = {"prompts": prompts((1, 9, 63)), "max_tokens": 9, "params": params}
    for graphs in (False, True):
        options = {"graphs": graphs, "num_drafts": 2, "accept": "rejection"}
        engine = LocalEngine(erring, ops_of=with_device_plans, **options)
        [rank] = engine.ranks
        before, judged = engine.generate(**asked), engine.drafted
        made = rank.runner._speculator.drafted_from(torch.empty(1, 1))
        engine.sleep()
        with torch.inference_mode():
            made.fill_(float("nan"))
        engine.wake()
        engine.reload()
        after = engine.generate(**asked)
        assert [each.token_ids for each in after] == [each.token_ids for each in before]
        assert rank.runner._speculator.drafted_from(torch.empty(1, 1)) is made
        assert engine.drafted == judged
        assert sum(map(sum, judged)) > 0


def _count_as_replays(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pool run what it would replay, under that name, and keep reasons of the others."""
    pool = both.bodies.ranks[0].pool
    monkeypatch.setattr(pool, "off", "")
    run = pool.run
    monkeypatch.setattr(
        pool,
        "run",
        lambda piece, key, body, eager="": run(piece, key, body, eager or "replay"),
    )


def test_a_nan_is_reported(erring: Path) -> None:
    """Of the model's logits, or those of drafts, as eager steps do."""
    for name in ("logits", "draft_logits"):
        engine = LocalEngine(erring, graphs=True, ops_of=with_device_plans, num_drafts=2)
        [rank] = engine.ranks

        def spoil(step: int, rank: Any = rank, name: str = name) -> None:
            if step == 2:
                whole = getattr(rank.model, name)
                setattr(rank.model, name, lambda hidden: whole(hidden).fill_(float("nan")))

        with pytest.raises(FloatingPointError, match=r"sampling rows \[0, 1\] hold NaN"):
            engine.generate(prompts((1, 9)), max_tokens=9, before_step=spoil)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.timeout(300)
def test_with_the_kernels_of_a_gpu(erring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and the recurrent layers in the interpreter too; what is not written is NaN."""
    kernel_rig.make_products_hide_their_shape(monkeypatch)

    options = {"num_drafts": 2, "max_requests": 3, "policy_of": scripted(2, 2, 1)}
    both = Both(erring, ops_of=with_kernels, eager_ops=with_kernels, **options)
    both.generate(prompts((1, 3)), max_tokens=6)
    assert 0 < sum(map(sum, both.bodies.accepted)) < sum(map(sum, both.bodies.drafted))


@pytest.mark.parametrize(
    ("drafts", "num_proposals", "width", "used"),
    [
        ([], 3, 1, [0, 1]),
        ([0, 0], 0, 1, [0, 1]),
        ([3, 0], 3, 4, [0, 1, 2, 3, 4]),
        ([1, 2], 4, 5, [0, 1, 5, 6, 7]),
        ([2, 1], 0, 3, [0, 1, 2, 3, 4]),
    ],
)
def test_the_places_of_a_step(
    drafts: list[int], num_proposals: int, width: int, used: list[int]
) -> None:
    rows = Rows(
        slot=int32s([1, 2]),
        start=int32s([5, 6]),
        count=int32s([1, 1]),
        phase=int32s([Phase.DECODE] * 2),
        drafts=int32s(drafts),
    )
    plan = StepPlan(step=1, rows=rows, num_proposals=num_proposals)
    assert width_of(plan) == width
    assert used_places(plan) == used


def test_forced_drafts_are_accepted_as_often_as_is_asked_on_both_ways(erring: Path) -> None:
    """Synthetic: whatever the model says; of the others some are right all the same."""
    prompts = [random_ids(n, VOCABULARY, seed=n) for n in (5, 9, 63, 64)]
    shares = []
    for forced in (0.6, 1.0):
        both = Both(erring, num_drafts=2, forced=forced, max_requests=4)
        both.generate(prompts, max_tokens=31)
        assert both.reasons("tail") >= {CAPTURED}
        drafted, accepted = both.bodies.drafted, both.bodies.accepted
        shares.append(sum(each[0] for each in accepted) / sum(each[0] for each in drafted))
    assert 0.6 < shares[0] < 0.95
    assert shares[1] > 0.97, "but for what lies beyond the end of an answer"


def test_a_hash_takes_its_share_whatever_the_slot_and_position() -> None:
    slots, positions = (
        x.flatten() for x in torch.meshgrid(torch.arange(64), torch.arange(2048), indexing="ij")
    )
    for share in (0.1, 0.5, 0.9):
        hits = is_forced(share, slots, positions).view(64, 2048)
        assert abs(float(hits.double().mean()) - share) < 0.005
        assert float((hits.double().mean(0) - share).abs().max()) < 0.35
        pairs = (hits[:, 1:] & hits[:, :-1]).double().mean()
        assert abs(float(pairs) - share**2) < 0.01, "neighbours are independent"
    assert bool(is_forced(1.0, slots, positions).all())
