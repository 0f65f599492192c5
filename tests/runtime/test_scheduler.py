"""The scheduler against a fake worker whose next token is a hash of the prefix it was told of.

Any lost, doubled or stale token, block or slot shows at once in the answer.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.fakes import FakeWorker, drain, expected, request, scheduler
from unisono.runtime.protocol import RequestRejected
from unisono.workers.protocol import Phase, int32s


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


def test_a_pre_empted_request_is_resumed_with_its_tokens() -> None:
    """Two that fit alone but not together: the later one gives way and both answers are whole."""
    plans, worker = scheduler(num_blocks=5, prefix_cache=False), FakeWorker(4)
    asked = [request(i, 100, 120) for i in range(2)]
    for item in asked:
        plans.add(item)
    answers = drain(plans, worker)
    assert plans.num_preemptions > 0
    assert [item.num_preemptions for item in asked] == [0, plans.num_preemptions]
    for item in asked:
        assert answers[item.request_id] == expected(item)[0]
        assert item.num_prompt_tokens == 100


def test_the_last_rank_is_pre_empted_and_the_first_served() -> None:
    plans, worker = scheduler(num_blocks=6, max_requests=3, prefix_cache=False), FakeWorker(3)
    late = request(2, 100, 120, priority=-1)
    asked = [request(0, 100, 120, priority=1), request(1, 100, 120), late]
    ends = []
    for item in asked:
        plans.add(item)
    while plans.has_work:
        plan = plans.next_plan()
        assert plan is not None
        ends += [n.request.request_id for n in plans.apply(worker.step(plan)) if n.reason]
    assert ends == [2, 1, 0]
    assert late.num_preemptions == 0
    assert asked[0].num_preemptions > 0


def test_a_prompt_that_was_computed_before_is_not_computed_again() -> None:
    plans, worker = scheduler(), FakeWorker(4)
    first, second = request(0, 200, 5, family=9), request(1, 300, 5, family=9)
    for asked in (first, second):
        plans.add(asked)
        assert drain(plans, worker)[asked.request_id] == expected(asked)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)


def test_the_last_prompt_token_is_computed_even_if_all_are_cached() -> None:
    plans, worker = scheduler(), FakeWorker(4)
    for number in range(2):
        plans.add(request(number, 128, 3, family=9))
        plan = plans.next_plan()
        assert plan is not None
        assert (plan.rows.start[0], plan.num_shared[0]) == ((0, 0), (64, 1))[number]
        plans.apply(worker.step(plan))
        drain(plans, worker)


def test_running_requests_share_their_prompt() -> None:
    plans, worker = scheduler(num_blocks=6), FakeWorker(4)
    plans.add(request(0, 130, 60, family=9))
    for _ in range(2):
        plan = plans.next_plan()
        assert plan is not None
        plans.apply(worker.step(plan))
    for number in (1, 2):
        plans.add(request(number, 130, 60, family=9))
    drain(plans, worker)
    assert plans.num_preemptions == 0, "three times 3 blocks fit into 6 because 2 are shared"


def test_answers_are_found_too() -> None:
    plans, worker = scheduler(), FakeWorker(4)
    first, second = request(0, 130, 70), request(1, 1, 5)
    plans.add(first)
    answer = drain(plans, worker)[0]
    second.prompt_ids = first.prompt_ids + int32s(answer)
    plans.add(second)
    assert drain(plans, worker)[1] == expected(second)[0]
    assert second.num_cached_tokens == 192


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    plans, worker = scheduler(prefix_cache=False), FakeWorker(4)
    asked = [request(number, 200, 5, family=9) for number in range(2)]
    for item in asked:
        plans.add(item)
        drain(plans, worker)
    assert [item.num_cached_tokens for item in asked] == [0, 0]


def test_restart_loses_no_token() -> None:
    plans, worker = scheduler(num_blocks=8), FakeWorker(4)
    asked = [request(i, 90, 50, family=i % 2) for i in range(3)]
    for item in asked:
        plans.add(item)
    answers: dict[int, list[int]] = {i: [] for i in range(3)}
    for step in range(400):
        plan = plans.next_plan()
        if plan is None:
            break
        if step in (3, 20, 21):  # the step in flight is lost with the ranks
            plans.restart()
            plans.audit()
            worker = FakeWorker(4)
            continue
        for news in plans.apply(worker.step(plan)):
            answers[news.request.request_id].append(news.token_id)
    assert answers == {i: expected(item)[0] for i, item in enumerate(asked)}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_states_are_saved_where_somebody_may_look_for_them(prefix_cache: bool) -> None:
    plans = scheduler(num_states=8, prefix_cache=prefix_cache, max_step_tokens=1000)
    plans.add(request(0, 200, 5))
    plan = plans.next_plan()
    assert plan is not None
    assert list(plan.save_length) == ([192] if prefix_cache else [])
