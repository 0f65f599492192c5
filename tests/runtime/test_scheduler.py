"""The scheduler against a fake worker whose next token is a hash of the prefix it was told of.

Any lost, doubled or stale token, block or slot shows at once in the answer.
"""

from __future__ import annotations

from array import array
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.protocol import RequestRejected, SamplingParams
from unisono.runtime.request import Request
from unisono.runtime.scheduler import Scheduler
from unisono.workers.protocol import Phase, StepPlan

MAX_LEN = 400
VOCABULARY = 1000


def next_token(prefix: list[int]) -> int:
    return crc32(array("i", prefix).tobytes()) % VOCABULARY


class FakeWorker:
    """Keeps tokens where a real one keeps KV: in blocks, by the slot's table."""

    def __init__(self, num_slots: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.tables: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.memory: dict[int, int] = {}

    def step(self, plan: StepPlan) -> list[int]:
        start = 0
        for slot, length in zip(plan.open_slot, plan.open_length, strict=True):
            self.tokens[slot] = list(plan.open_tokens[start : start + length])
            self.tables[slot] = []
            start += length
        for slot, block in zip(plan.block_slot, plan.block_id, strict=True):
            self.tables[slot].append(block)
        rows = plan.rows
        assert len(set(rows.slot)) == len(rows.slot), "a slot is in a step twice"
        return [
            token
            for row in zip(rows.slot, rows.start, rows.count, rows.phase, strict=True)
            for token in self._row(*row)
        ]

    def _row(self, slot: int, start: int, count: int, phase: int) -> list[int]:
        assert slot > 0
        assert count > 0
        for at in range(start, start + count):
            self.memory[self._place(slot, at)] = self.tokens[slot][at]
        if phase == Phase.CHUNK:
            return []
        prefix = [self.memory[self._place(slot, at)] for at in range(start + count)]
        token = next_token(prefix)
        assert len(self.tokens[slot]) == start + count
        self.tokens[slot].append(token)
        return [token]

    def _place(self, slot: int, position: int) -> int:
        block = self.tables[slot][position // 64]
        assert block > 0, "block 0 is scratch"
        return block * 64 + position % 64


def request(number: int, length: int, max_tokens: int, **params: object) -> Request:
    return Request(
        client="c",
        request_id=number,
        prompt_ids=array("i", [(number * 31 + i * 7) % VOCABULARY for i in range(length)]),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        max_tokens=min(max_tokens, MAX_LEN - length),
        arrived_s=0.0,
    )


def scheduler(
    num_blocks: int = 20, max_requests: int = 4, max_step_tokens: int = 128, eos: int = -1
) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_model_len=MAX_LEN,
        max_step_tokens=max_step_tokens,
        eos_token_ids=[eos],
    )


def expected(asked: Request, eos: int = -1) -> tuple[list[int], str]:
    """The answer of the model alone, by the definition of stopping."""
    prefix, answer = list(asked.prompt_ids), []
    while True:
        answer.append(next_token(prefix + answer))
        if answer[-1] == eos and not asked.params.ignore_eos:
            return answer, "stop"
        if answer[-1] in asked.params.stop_token_ids:
            return answer, "stop"
        if len(answer) == asked.max_tokens:
            return answer, "length"


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 399), st.integers(1, 80), st.integers(0, 30)), max_size=12
    ),
    aborts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 40)), max_size=4),
    max_requests=st.integers(1, 6),
    num_blocks=st.integers(7, 30),
    max_step_tokens=st.sampled_from([64, 65, 100, 128, 1000]),
    eos=st.integers(0, 40),
)
def test_every_answer_is_the_answer_of_its_prompt_alone(
    jobs: list[tuple[int, int, int]],
    aborts: list[tuple[int, int]],
    max_requests: int,
    num_blocks: int,
    max_step_tokens: int,
    eos: int,
) -> None:
    # Ids below 41 of 1000: about one answer in three meets its eos.
    plans = scheduler(num_blocks, max_requests, max_step_tokens, eos)
    worker = FakeWorker(max_requests)
    asked = [request(i, length, tokens) for i, (length, tokens, _) in enumerate(jobs)]
    arrival = {i: at for i, (_, _, at) in enumerate(jobs)}
    answers: dict[int, list[int]] = {i: [] for i in range(len(jobs))}
    reasons: dict[int, str] = {}
    aborted: set[int] = set()
    step = 0
    while plans.has_work or any(at >= step for at in arrival.values()):
        for i, at in arrival.items():
            if at == step:
                plans.add(asked[i])
        plan = plans.next_plan()
        plans.audit()
        tokens = [] if plan is None else worker.step(plan)
        if plan is not None:
            assert sum(plan.rows.count) <= max(max_step_tokens, 64)
        for number, at in aborts:
            if at == step and number < len(jobs):
                plans.abort("c", number)
                if number not in reasons and arrival[number] <= step:
                    aborted.add(number)
        for news in plans.apply(tokens) if plan is not None else []:
            assert news.request.request_id not in aborted
            answers[news.request.request_id].append(news.token_id)
            if news.reason:
                reasons[news.request.request_id] = news.reason
        plans.audit()
        step += 1
        assert step < 5000, "no progress"
    assert plans.ledger.num_free == num_blocks
    for i, wanted in enumerate(asked):
        tokens, reason = expected(wanted, eos)
        if i in aborted:
            assert answers[i] == tokens[: len(answers[i])]
        else:
            assert (answers[i], reasons[i]) == (tokens, reason)


def test_a_long_prompt_is_cut_at_block_borders_and_decoding_goes_on() -> None:
    plans, worker = scheduler(max_step_tokens=100), FakeWorker(4)
    plans.add(request(0, 3, 50))
    plan = plans.next_plan()
    assert plan is not None
    plans.apply(worker.step(plan))
    plans.add(request(1, 300, 5))
    shapes = []
    for _ in range(6):
        plan = plans.next_plan()
        assert plan is not None
        shapes.append(list(zip(plan.rows.count, plan.rows.phase, strict=True)))
        plans.apply(worker.step(plan))
    decode = (1, Phase.DECODE)
    assert shapes[:5] == [[decode, (64, Phase.CHUNK)]] * 4 + [[decode, (44, Phase.PROMPT)]]
    assert shapes[5] == [decode, decode]


def test_first_come_first_served() -> None:
    """A small request behind a large one waits: nobody overtakes, nobody starves."""
    plans, worker = scheduler(num_blocks=6, max_requests=4), FakeWorker(4)
    for i, length in enumerate((200, 300, 10)):
        plans.add(request(i, length, 20))
    first_tokens: list[int] = []
    while plans.has_work:
        plan = plans.next_plan()
        assert plan is not None
        for news in plans.apply(worker.step(plan)):
            if news.request.num_answered == 1:
                first_tokens.append(news.request.request_id)
    assert first_tokens == [0, 1, 2]


@pytest.mark.parametrize(
    ("length", "max_tokens", "text"),
    [
        (0, 5, "no tokens"),
        (400, 5, "400 tokens.*at most 399.*max_model_len=400"),
        (390, 10, "7 KV blocks of 64; the cache has 6"),
    ],
)
def test_what_can_never_run_is_rejected_with_the_numbers(
    length: int, max_tokens: int, text: str
) -> None:
    plans = scheduler(num_blocks=6)
    with pytest.raises(RequestRejected, match=text):
        plans.add(request(0, length, max_tokens))
    assert not plans.has_work
    plans.audit()


def test_stop_ids_and_ignore_eos() -> None:
    plain = request(0, 5, 30)
    answer, _ = expected(plain)
    eos, stop = answer[10], answer[4]
    cases = {
        0: (request(0, 5, 30), 11, "stop"),
        1: (request(0, 5, 30, ignore_eos=True), 30, "length"),
        2: (request(0, 5, 30, stop_token_ids=(stop,)), 5, "stop"),
        3: (request(0, 5, 30, ignore_eos=True, stop_token_ids=(eos,)), 11, "stop"),
    }
    for asked, count, reason in cases.values():
        plans, worker = scheduler(eos=eos), FakeWorker(4)
        plans.add(asked)
        tokens = []
        while plans.has_work:
            plan = plans.next_plan()
            assert plan is not None
            news = plans.apply(worker.step(plan))
            tokens += [item.token_id for item in news]
        assert (tokens, news[-1].reason) == (answer[:count], reason)
