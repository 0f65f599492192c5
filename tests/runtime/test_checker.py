"""The model checker finds nothing in the scheduler, and every fault that is planted in it."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.runtime.checker import Checker
from unisono.runtime.block_ledger import BlockLedger
from unisono.runtime.holdings import Holdings
from unisono.runtime.in_flight import PlannedRow, Save, Seat
from unisono.runtime.prefix_cache import PrefixCache
from unisono.runtime.request import Request
from unisono.runtime.scheduler import NewToken, Scheduler
from unisono.runtime.state_ledger import StateLedger
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import StepPlan, int32s

LEAST_STEPS_PER_S = 200


def check(kind: type[Scheduler], max_examples: int) -> Counter[str]:
    """Run the checker on `kind`; what it saw. Raises what it finds."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: Checker(kind, seen),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=25,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            deadline=None,
            database=None,
        ),
    )
    return seen


def test_the_scheduler_is_sound_and_checked_quickly() -> None:
    start = time.process_time()
    seen = check(Scheduler, 170)
    assert seen["steps"] / (time.process_time() - start) >= LEAST_STEPS_PER_S
    assert seen["steps"] > 5000
    often = ("ahead", "accepted", "host rows", "pre-emptions", "hits", "restored", "aborts")
    assert min(seen[what] for what in often) > 100, seen
    seldom = ("in vain", "restarts", "results lost", "resumed chunks", "other weights")
    seldom += ("fewer than made",)
    assert min(seen[what] for what in seldom) > 10, seen


class ResumesThePromptOnly(Scheduler):
    """A pre-empted request is opened without its answer so far."""

    def _admit(self) -> list[Request]:
        opened = super()._admit()
        for request in opened:
            request.num_given = request.num_prompt_tokens
        return opened


class CountsTheAnswerAnew(Scheduler):
    """max_tokens counts from the last admission."""

    def _admit(self) -> list[Request]:
        opened = super()._admit()
        for request in opened:
            request.max_tokens += request.num_answered
        return opened


class WritesAHit(Scheduler):
    """The last shared block is computed again, in place."""

    def _admit(self) -> list[Request]:
        opened = super()._admit()
        for request in opened:
            request.num_computed = max(request.num_computed - BLOCK_SIZE, 0)
            request.next_start = request.num_computed
        return opened


class HitsTheLastToken(Holdings):
    """A prompt that is wholly cached leaves nothing to compute."""

    def find_shared(self, request: Request) -> list[int]:
        count = request.num_tokens // BLOCK_SIZE
        return self.blocks.cache.find(self.name_blocks(request, count)[:count])


class LosesABlock(Scheduler):
    """The last block of a request is not given back."""

    def _close(self, request: Request) -> None:
        del request.blocks[3:]
        super()._close(request)


class AnswersTheAborted(Scheduler):
    """A request that is aborted while its step runs still gets the token."""

    def abort(self, client: str, request_id: int) -> None:
        in_flight = [row.request for flight in self._flights for row in flight.rows]
        super().abort(client, request_id)
        for request in in_flight:
            if request.slot == 0:
                request.slot = -1


class PreemptsTheFirst(Scheduler):
    """The request of the first rank gives way."""

    def _make_room(self, request: Request, count: int) -> bool:
        missing = self._holdings.missing(request, count)
        if not self._flights and not self.ledger.can_take(missing):
            victim = min(self._running, key=lambda running: running.rank)
            self._close(victim)
            self._enqueue(victim)
            self.num_preemptions += 1
            return victim is not request and self._make_room(request, count)
        return super()._make_room(request, count)


class QueuesThePreemptedLast(Scheduler):
    """A pre-empted request waits behind those that came after it."""

    def _enqueue(self, request: Request) -> None:
        self._waiting.append(request)


class TakesTheBlockLate(Scheduler):
    """A decoded token that begins a block gets it one step too late."""

    def _make_room(self, request: Request, count: int) -> bool:
        if request.most_computed % BLOCK_SIZE == 0:
            return True
        return super()._make_room(request, count)


class ClearsSharedBlocks(Scheduler):
    """Workers are not told which blocks are shared."""

    def next_plan(self) -> StepPlan | None:
        plan = super().next_plan()
        if plan is None:
            return None
        return dataclasses.replace(plan, num_shared=int32s([0] * len(plan.open_slot)))


class KeepsTheCacheOfDeadRanks(Scheduler):
    """After a restart blocks are found whose memory is gone."""

    def restart(self) -> None:
        ledger = self.ledger
        names = [(request, request.block_names) for request in self._waiting + self._running]
        while self._flights:
            self._land(self._flights.popleft())
        for request in list(self._running):
            self._close(request)
            self._enqueue(request)
        super().restart()
        self._holdings.blocks = ledger
        for request, block_names in names:
            request.block_names = block_names


class PublishesTooSoon(Scheduler):
    """The blocks of a prompt can be found before it is computed."""

    def _admit(self) -> list[Request]:
        opened = super()._admit()
        for request in opened:
            num_computed = request.num_computed
            request.num_computed = request.num_given
            self._holdings.publish(request)
            request.num_computed = num_computed
        return opened


class NamesWithoutTheirPrefix(PrefixCache):
    """Equal blocks behind different beginnings have one name."""

    def name(self, parent: bytes, tokens: array[int]) -> bytes:
        return super().name(b"", tokens)


class EvictsInSecret(PrefixCache):
    """An evicted block can still be found."""

    def evict(self) -> int:
        block = next(iter(self._resting))
        del self._resting[block]
        return block


class FreesWhatOthersUse(BlockLedger):
    """The first of several users to go frees the block."""

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._num_users[block] = 1
        super().give_back(blocks)


class TakesWhatIsShared(BlockLedger):
    """Resting blocks that a request will share count as free for it, too."""

    def can_take(self, count: int, shared: object = ()) -> bool:
        return super().can_take(count)


class FreesInFlight(Scheduler):
    """What a request held is free at once, though a step in flight writes to it."""

    def _close(self, request: Request) -> None:
        self._running.remove(request)
        self._holdings.free(self._holdings.unseat(request))


class AnswersTheEnded(Scheduler):
    """The token of a row that was planned ahead in vain is passed on."""

    def _settle(
        self, row: PlannedRow, tokens: Sequence[int], records: Sequence[array[int] | None]
    ) -> list[NewToken]:
        news = super()._settle(row, tokens, records)
        if any(later.request is row.request for flight in self._flights for later in flight.rows):
            row.request.slot = row.request.slot or -1
        return news


class PublishesWhatIsInFlight(Scheduler):
    """A block can be found before the result of the step that fills it is in."""

    def next_plan(self) -> StepPlan | None:
        plan = super().next_plan()
        for request in self._running:
            num_computed = request.num_computed
            request.num_computed = request.next_start
            self._holdings.publish(request)
            request.num_computed = num_computed
        return plan


class PreemptsInFlight(Scheduler):
    """A request gives way while steps in flight write to its blocks."""

    def _make_room(self, request: Request, count: int) -> bool:
        flights, self._flights = self._flights, deque()
        try:
            return super()._make_room(request, count)
        finally:
            self._flights = flights


class LetsTheHostWait(Scheduler):
    """A row that needs the host is planned ahead like any other."""

    def _may_decode(self, request: Request) -> bool:
        return request.num_left > 0


class TakesLateResults(Scheduler):
    """After a restart the results of the dead ranks are still waited for."""

    def restart(self) -> None:
        flights = list(self._flights)
        super().restart()
        self._flights.extend(flights)


class SplitsTheTokensAnew(Scheduler):
    """The tokens of a step go to its rows in another split than the ranks made."""

    def apply(self, tokens: Sequence[int], counts: Sequence[int] = ()) -> list[NewToken]:
        return super().apply(tokens, list(reversed(counts)))


class RunsPastAStop(Scheduler):
    """Accepted tokens behind the one that ends an answer are passed on."""

    def _settle(
        self, row: PlannedRow, tokens: Sequence[int], records: Sequence[array[int] | None]
    ) -> list[NewToken]:
        news = super()._settle(row, tokens, records)
        return news + [NewToken(row.request, token, None) for token in tokens[len(news) :]]


class ChecksWhatNobodyDrafted(Scheduler):
    """As many drafts are checked as are to be made next."""

    def drafts_for(self, request: Request) -> int:
        return 0 if request.needs_host else self._drafts_now


class LosesTheStateOfTheAborted(Scheduler):
    """The recurrent state of an aborted request is never free again."""

    def abort(self, client: str, request_id: int) -> None:
        for request in self._running:
            if request.request_id == request_id:
                request.state = 0
        super().abort(client, request_id)


class ReservesOneTooFew(Holdings):
    """The last draft of a row has no room."""

    def missing(self, request: Request, count: int) -> int:
        return super().missing(request, max(count - 1, 1))


class PublishesTheAnswer(Holdings):
    """Blocks of generated tokens can be found in a hybrid model, too."""

    def _num_publishable(self, request: Request) -> int:
        return request.num_tokens


class SavesOffTheBorder(Holdings):
    """A snapshot is taken where the row ends."""

    def begin_save(self, row: PlannedRow, most: int) -> Save | None:
        save = super().begin_save(row, most)
        return save and dataclasses.replace(save, length=row.start + row.count)


class RestoresAnother(StateLedger):
    """A state starts from the snapshot that was not read for longest."""

    def begin_read(self, name: bytes) -> int:
        return super().begin_read(next(iter(self._snapshots)))


class FreesTheStateInFlight(Holdings):
    """The state of a request that goes is free at once, though a step in flight writes to it."""

    def unseat(self, request: Request) -> Seat:
        seat = super().unseat(request)
        if seat.state:
            self.states.give_back(seat.state)
        return dataclasses.replace(seat, state=0)


class EvictsWhatIsRead(StateLedger):
    """A snapshot gives way though a step in flight reads it."""

    def _idle(self) -> list[tuple[bytes, int]]:
        return list(self._snapshots.items())


def with_holdings(
    holdings: type[Holdings] = Holdings,
    ledger: type[BlockLedger] = BlockLedger,
    cache: type[PrefixCache] = PrefixCache,
    states: type[StateLedger] = StateLedger,
) -> type[Scheduler]:
    """A scheduler on other ledgers, until the first restart."""

    class OnOtherLedgers(Scheduler):
        def __init__(self, **options: int) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            num_states = options["num_states"]
            kept = holdings(options["num_blocks"], options["max_requests"], num_states, True)
            kept.blocks = ledger(options["num_blocks"])
            kept.blocks.cache = cache()
            kept.states = states(num_states)
            self._holdings = kept

    return OnOtherLedgers


MUTANTS = {
    kind.__name__: kind
    for kind in (
        ResumesThePromptOnly,
        CountsTheAnswerAnew,
        WritesAHit,
        LosesABlock,
        AnswersTheAborted,
        PreemptsTheFirst,
        QueuesThePreemptedLast,
        TakesTheBlockLate,
        ClearsSharedBlocks,
        KeepsTheCacheOfDeadRanks,
        PublishesTooSoon,
        FreesInFlight,
        AnswersTheEnded,
        PublishesWhatIsInFlight,
        PreemptsInFlight,
        LetsTheHostWait,
        TakesLateResults,
        SplitsTheTokensAnew,
        RunsPastAStop,
        ChecksWhatNobodyDrafted,
        LosesTheStateOfTheAborted,
    )
} | {
    "HitsTheLastToken": with_holdings(HitsTheLastToken),
    "ReservesOneTooFew": with_holdings(ReservesOneTooFew),
    "PublishesTheAnswer": with_holdings(PublishesTheAnswer),
    "SavesOffTheBorder": with_holdings(SavesOffTheBorder),
    "NamesWithoutTheirPrefix": with_holdings(cache=NamesWithoutTheirPrefix),
    "EvictsInSecret": with_holdings(cache=EvictsInSecret),
    "FreesWhatOthersUse": with_holdings(ledger=FreesWhatOthersUse),
    "TakesWhatIsShared": with_holdings(ledger=TakesWhatIsShared),
    "RestoresAnother": with_holdings(states=RestoresAnother),
    "EvictsWhatIsRead": with_holdings(states=EvictsWhatIsRead),
    "FreesTheStateInFlight": with_holdings(FreesTheStateInFlight),
}


@pytest.mark.parametrize("kind", MUTANTS.values(), ids=MUTANTS.keys())
def test_planted_faults_are_found(kind: type[Scheduler]) -> None:
    with pytest.raises((AssertionError, LookupError, ValueError)):
        check(kind, 400)
