"""The model checker finds nothing in the scheduler, and every fault that is planted in it."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.runtime.checker import Checker
from unisono.runtime.block_ledger import BlockLedger
from unisono.runtime.prefix_cache import PrefixCache
from unisono.runtime.request import Request, blocks_for
from unisono.runtime.scheduler import Scheduler
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
    seen = check(Scheduler, 100)
    assert seen["steps"] / (time.process_time() - start) >= LEAST_STEPS_PER_S
    assert seen["steps"] > 5000
    assert min(seen[what] for what in ("pre-emptions", "hits", "aborts", "restarts")) > 50, seen


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
        return opened


class HitsTheLastToken(Scheduler):
    """A prompt that is wholly cached leaves nothing to compute."""

    def _find_shared(self, request: Request) -> list[int]:
        count = request.num_tokens // BLOCK_SIZE
        self._name_blocks(request, count)
        return self.ledger.cache.find(request.block_names[:count])


class LosesABlock(Scheduler):
    """The last block of a request is not given back."""

    def _close(self, request: Request) -> None:
        del request.blocks[3:]
        super()._close(request)


class AnswersTheAborted(Scheduler):
    """A request that is aborted while its step runs still gets the token."""

    def abort(self, client: str, request_id: int) -> None:
        in_flight = list(self._in_flight)
        super().abort(client, request_id)
        for request in in_flight:
            if request.slot == 0:
                request.slot = -1


class PreemptsTheFirst(Scheduler):
    """The request of the first rank gives way."""

    def _make_room(self, request: Request) -> bool:
        missing = blocks_for(request.num_computed + 1) - len(request.blocks)
        if not self.ledger.can_take(missing):
            victim = min(self._running, key=lambda running: running.rank)
            self._close(victim)
            self._enqueue(victim)
            self.num_preemptions += 1
            return victim is not request and self._make_room(request)
        return super()._make_room(request)


class QueuesThePreemptedLast(Scheduler):
    """A pre-empted request waits behind those that came after it."""

    def _enqueue(self, request: Request) -> None:
        self._waiting.append(request)


class TakesTheBlockLate(Scheduler):
    """A decoded token that begins a block gets it one step too late."""

    def _make_room(self, request: Request) -> bool:
        if request.num_computed % BLOCK_SIZE == 0:
            return True
        return super()._make_room(request)


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
        super().restart()
        self.ledger = ledger
        for request, block_names in names:
            request.block_names = block_names


class PublishesTooSoon(Scheduler):
    """The blocks of a prompt can be found before it is computed."""

    def _admit(self) -> list[Request]:
        opened = super()._admit()
        for request in opened:
            num_computed = request.num_computed
            request.num_computed = request.num_given
            self._publish(request)
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


def with_ledger(ledger: type[BlockLedger], cache: type[PrefixCache]) -> type[Scheduler]:
    """A scheduler on other ledgers, until the first restart."""

    class OnOtherLedgers(Scheduler):
        def __init__(self, *, num_blocks: int, **rest: object) -> None:
            super().__init__(num_blocks=num_blocks, **rest)  # type: ignore[arg-type]
            self.ledger = ledger(num_blocks)
            self.ledger.cache = cache()

    return OnOtherLedgers


MUTANTS = {
    kind.__name__: kind
    for kind in (
        ResumesThePromptOnly,
        CountsTheAnswerAnew,
        WritesAHit,
        HitsTheLastToken,
        LosesABlock,
        AnswersTheAborted,
        PreemptsTheFirst,
        QueuesThePreemptedLast,
        TakesTheBlockLate,
        ClearsSharedBlocks,
        KeepsTheCacheOfDeadRanks,
        PublishesTooSoon,
    )
} | {
    "NamesWithoutTheirPrefix": with_ledger(BlockLedger, NamesWithoutTheirPrefix),
    "EvictsInSecret": with_ledger(BlockLedger, EvictsInSecret),
    "FreesWhatOthersUse": with_ledger(FreesWhatOthersUse, PrefixCache),
    "TakesWhatIsShared": with_ledger(TakesWhatIsShared, PrefixCache),
}


@pytest.mark.parametrize("kind", MUTANTS.values(), ids=MUTANTS.keys())
def test_planted_faults_are_found(kind: type[Scheduler]) -> None:
    with pytest.raises((AssertionError, LookupError)):
        check(kind, 200)
