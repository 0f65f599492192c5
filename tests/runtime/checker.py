"""A state machine that drives a scheduler against the fake worker and checks all that comes."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass
from itertools import cycle

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.runtime.fakes import (
    FakeWorker,
    Scripted,
    expected,
    next_token,
    request,
    scheduler,
)
from unisono.runtime.protocol import RequestRejected
from unisono.runtime.request import Request, blocks_for
from unisono.runtime.scheduler import Scheduler
from unisono.workers.protocol import Phase, StepPlan, unpack_sampling

EOS = 7
STOPS = tuple(range(100, 1000, 25))
MAX_MOVES_TO_THE_END = 20_000


@dataclass(frozen=True, slots=True)
class Due:
    """A step that ran and whose result the scheduler does not have yet."""

    plan: StepPlan
    tokens: list[int]
    counts: list[int]
    owners: dict[int, int]
    """Which request has which slot, as the scheduler saw it."""
    slots: set[int]
    blocks: set[int]
    states: set[int]
    """What the step names: nobody else may be given it before its result is in."""


class Checker(RuleBasedStateMachine):
    """Arrivals, aborts, restarts, naps, other weights, steps and late results in any order; every
    answer its prompt's.

    Few blocks make pre-emptions and evictions frequent; prompts are laid of three bricks of a
    block each, so that they share beginnings, and have equal blocks behind different ones.
    """

    def __init__(self, kind: type[Scheduler] = Scheduler, seen: Counter[str] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.seen = Counter() if seen is None else seen
        self.asked: list[Request] = []
        self.answers: list[list[int]] = []
        self.weights_of: list[list[int]] = []
        """Which weights each token of an answer is from."""
        self.weights = 0
        self.ended: dict[int, str] = {}
        self.due: deque[Due] = deque()
        self.accepts = cycle([1])
        self.sound = False

    @initialize(
        num_blocks=st.integers(3, 7),
        max_requests=st.sampled_from([1, 2, 3, 6]),
        max_step_tokens=st.sampled_from([64, 100, 130, 1000]),
        max_in_flight=st.sampled_from([2, 1, 2, 3]),
        num_drafts=st.sampled_from([0, 0, 1, 2, 5, 8]),
        num_snapshots=st.sampled_from([None, 1, 0, 1, 4]),
        script=st.sampled_from([(), (8, 0, 3), (), (0, 8, 8, 1), (2, 5)]),
    )
    def start(
        self,
        num_blocks: int,
        max_requests: int,
        max_step_tokens: int,
        max_in_flight: int,
        num_drafts: int,
        num_snapshots: int | None,
        script: tuple[int, ...],
    ) -> None:
        """`script`: how many drafts steps have in turn, as far as they may; empty: all they may."""
        self.num_blocks, self.max_step_tokens = num_blocks, max_step_tokens
        self.num_slots, self.num_drafts = max_requests, num_drafts
        numbers = [min(number, num_drafts) for number in script]
        self.num_states = 0 if num_snapshots is None else max_requests + num_snapshots
        self.plans = scheduler(
            num_blocks,
            max_requests,
            max_step_tokens,
            EOS,
            kind=self.kind,
            max_in_flight=max_in_flight,
            num_drafts=num_drafts,
            num_states=self.num_states,
            policy=Scripted(cycle(numbers)) if numbers else None,
        )
        self._start_worker()
        self.sound = True

    @rule(
        jobs=st.lists(
            st.tuples(
                st.lists(st.integers(0, 1), min_size=1, max_size=3),
                st.sampled_from([0, 0, 1, 2, 30, 63]),
                st.sampled_from([1, 2, 20, 70, 130]),
                st.sampled_from([0, 0, 0, -1, 1]),
                st.sampled_from(["", "", "turn", "stops", "needs_host"]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, jobs: list[tuple[list[int], int, int, int, str]]) -> None:
        for bricks, cut, max_tokens, priority, kind in jobs:
            number = len(self.asked)
            prompt = array("i", [100 * brick + i for brick in bricks for i in range(64)])
            prompt = prompt[: len(prompt) - cut]
            if kind == "turn" and self.asked:  # the next turn of a talk
                prompt = (self.asked[-1].prompt_ids + array("i", self.answers[-1]))[: 192 - cut]
            stops = STOPS if kind == "stops" else ()
            asked = request(
                number, len(prompt), max_tokens, priority=priority, stop_token_ids=stops
            )
            asked.prompt_ids = prompt
            asked.needs_host = kind == "needs_host"
            fits = blocks_for(len(prompt) + max_tokens - 1) <= self.num_blocks
            try:
                self.plans.add(asked)
            except RequestRejected:
                assert not fits
                continue
            assert fits
            self.asked.append(asked)
            self.answers.append([])
            self.weights_of.append([])

    @rule(
        count=st.integers(1, 60),
        lateness=st.lists(st.booleans(), min_size=1, max_size=5),
        accepts=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    )
    def steps(self, count: int, lateness: list[bool], accepts: list[int]) -> None:
        """Plans and results in some order; of the drafts `accepts` says how many are right."""
        self.accepts = cycle(accepts)
        for _, late in zip(range(count), cycle(lateness), strict=False):
            if not self._advance(late):
                break

    @precondition(lambda self: len(self.ended) < len(self.asked))
    @rule(which=st.integers(0, 20), in_flight=st.booleans())
    def abort(self, which: int, in_flight: bool) -> None:
        if in_flight:
            self._plan()
        going = [i for i in range(len(self.asked)) if i not in self.ended]
        number = going[which % len(going)]
        self.sound = False
        self.plans.abort("c", number)
        self.plans.audit()
        self.sound = True
        self.ended[number] = "abort"
        self.seen["aborts"] += 1

    @rule(
        in_flight=st.booleans(),
        chance=st.integers(0, 3),
        kind=st.sampled_from(["lost", "lost", "lost", "nap", "other weights"]),
    )
    def restart(self, in_flight: bool, chance: int, kind: str) -> None:
        """The ranks are lost; or, with the results in flight in, nap or take weights."""
        if chance:
            return
        if in_flight:
            self._plan()
        while kind != "lost" and self._apply():
            pass
        self.sound = False
        self.seen["restarts"] += 1
        self.seen["results lost"] += len(self.due)
        self.plans.restart()
        self.due.clear()
        old = self.worker
        if kind == "other weights":
            self.seen[kind] += 1
            self.weights += 1
        self._start_worker()
        if kind == "other weights":  # what the old ones made still lies there
            self.worker.memory, self.worker.states = old.memory, old.states
        self.plans.audit()
        self.sound = True

    def teardown(self) -> None:
        """Run to the end: all that was asked is answered and all that was held is free again."""
        if not self.sound:
            return
        for _ in range(MAX_MOVES_TO_THE_END):
            if not self._advance(late=True):
                break
        assert not self.plans.has_work, "no progress"
        assert self.plans.ledger.num_free == self.num_blocks
        for asked, answer, weights in zip(self.asked, self.answers, self.weights_of, strict=True):
            reason = self.ended[asked.request_id]
            if reason != "abort":
                assert (answer, reason) == expected(asked, EOS, weights)
        self.seen["pre-emptions"] += self.plans.num_preemptions
        self.seen["hits"] += sum(asked.num_cached_tokens > 0 for asked in self.asked)

    def _advance(self, late: bool) -> bool:
        """Plan a step or take a result, a `late` one only where nothing can be planned."""
        if (late and self._plan()) or self._apply() or self._plan():
            return True
        assert not self.plans.has_work, "no progress"
        return False

    def _plan(self) -> bool:
        """Run the next step, if there is one before the next result."""
        self.sound = False
        plan = self.plans.next_plan()
        self.plans.audit()
        if plan is not None:
            owners = {asked.slot: i for i, asked in enumerate(self.asked) if asked.slot}
            self._check_rows(plan, owners)
            self._check_names(plan)
            tokens, counts = self.worker.run(plan, self.accepts)
            self._note(plan, owners, tokens, counts)
        self.sound = True
        return plan is not None

    def _apply(self) -> bool:
        """Take the oldest result, if one is due."""
        if not self.due:
            return False
        self.sound = False
        late = self.due.popleft()
        assert self.plans.num_in_flight == len(self.due) + 1
        counts = late.counts if self.num_drafts or 0 in late.counts else ()
        for news in self.plans.apply(late.tokens, counts):
            self._take(news.request.request_id, news.token_id, news.reason)
        self.plans.audit()
        if self.num_states:
            name_of = self.plans.ledger.cache.name_of
            assert not any(map(name_of, self.generated)), "a generated block can be found"
        self.seen["steps"] += 1
        self.num_applied = late.plan.step
        self.sound = True
        return True

    def _check_rows(self, plan: StepPlan, owners: dict[int, int]) -> None:
        rows = plan.rows
        drafts = rows.drafts or [0] * len(rows)
        assert len(rows) > 0
        assert sum(rows.count) + sum(drafts) <= self.max_step_tokens
        for slot, start, count, phase, num_drafts in zip(
            rows.slot, rows.start, rows.count, rows.phase, drafts, strict=True
        ):
            asked = self.asked[owners[slot]]
            assert phase != Phase.CHUNK or (start + count) % 64 == 0, "a chunk off the grid"
            if phase == Phase.DECODE:
                last = asked.num_prompt_tokens + asked.max_tokens - 1
                assert start + num_drafts < last, "a row behind the last token"
                newest = len(self.worker.tokens[slot]) - 1
                ahead = start > newest and self.worker.has_ended(slot)  # in vain
                assert start == newest or (self.num_drafts and start < newest) or ahead
                if asked.needs_host:
                    self.seen["host rows"] += 1
                    assert not any(slot in late.plan.rows.slot for late in self.due), "too soon"
            else:
                assert num_drafts == 0
                assert start % 64 == 0, "a row begins off the grid"
                self.seen["resumed chunks"] += phase == Phase.CHUNK and asked.num_preemptions > 0

    def _check_names(self, plan: StepPlan) -> None:
        """A step gets nothing that one in flight names, nor finds what one in flight makes."""
        shared, fresh = self._blocks(plan)
        for block in shared:
            assert self.worker.written[block] <= self.num_applied, "found before it is known"
        made = [*plan.open_state, *plan.save_state]
        assert len(set(made)) == len(made), "a state is given out twice"
        assert not {*made} & {*plan.open_restore}, "a snapshot is written while it is read"
        for late in self.due:
            assert not late.slots & {*plan.open_slot}, "a slot changes hands in flight"
            assert not late.blocks & {*fresh}, "a block changes hands in flight"
            assert not late.states & {*made}, "a state changes hands in flight"
            assert not {*late.plan.save_state} & {*plan.open_restore}, "a snapshot too soon"
        self.generated.difference_update(fresh)

    def _note(
        self, plan: StepPlan, owners: dict[int, int], tokens: list[int], counts: list[int]
    ) -> None:
        worker, slots = self.worker, {*plan.rows.slot, *plan.open_slot, *plan.block_slot}
        if self.num_states and plan.open_slot:
            prompts = [item.num_prompt_tokens for item in unpack_sampling(plan.open_sampling)]
            opened = [self.asked[owners[slot]].num_prompt_tokens for slot in plan.open_slot]
            assert prompts == opened, "the ranks do not know where the prompts end"
        for slot, length in zip(plan.save_slot, plan.save_length, strict=True):
            assert length <= self.asked[owners[slot]].num_prompt_tokens, "not of the prompt alone"
        for slot in plan.rows.slot:
            asked, table = self.asked[owners[slot]], worker.tables[slot]
            assert len(worker.tokens[slot]) <= asked.num_prompt_tokens + asked.max_tokens
            self.generated.update(table[asked.num_prompt_tokens // 64 :])
        late = Due(
            plan,
            tokens,
            counts,
            owners,
            slots,
            {block for slot in slots for block in worker.tables[slot]},
            {*plan.open_restore, *plan.save_state, *(worker.state_of[slot] for slot in slots)},
        )
        self.seen["ahead"] += bool(self.due)
        drafts = max(plan.rows.drafts, default=0)
        self.seen["fewer than made"] += 0 < drafts < plan.num_proposals
        self.seen["accepted"] += sum(max(count - 1, 0) for count in counts)
        self.seen["in vain"] += counts.count(0)
        self.seen["restored"] += sum(map(bool, plan.open_restore))
        self.due.append(late)

    def _blocks(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Blocks that slots get with their content, and without."""
        left = dict(zip(plan.open_slot, plan.num_shared, strict=True))
        shared, fresh = [], []
        for slot, block in zip(plan.block_slot, plan.block_id, strict=True):
            (shared if left.get(slot, 0) else fresh).append(block)
            left[slot] = max(left.get(slot, 0) - 1, 0)
        return shared, fresh

    def _take(self, number: int, token_id: int, reason: str | None) -> None:
        assert number not in self.ended, "a token after the end"
        answer = self.answers[number]
        assert token_id == next_token([*self.asked[number].prompt_ids, *answer], self.weights)
        answer.append(token_id)
        self.weights_of[number].append(self.weights)
        assert len(answer) <= self.asked[number].max_tokens, "too long an answer"
        if reason is not None:
            self.ended[number] = reason

    def _start_worker(self) -> None:
        self.worker = FakeWorker(self.num_slots, self.num_states, self.weights)
        self.generated: set[int] = set()
        self.num_applied = 0
