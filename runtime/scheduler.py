"""Which rows the next step computes. Plain numbers; pure given the ledger and the results.

Continuous batching by rank (priority, then arrival): a request is admitted when a slot is free and
the tokens it has so far fit. Decode rows go first, then prompts within the token budget; a prompt
that does not fit is cut at a block border. If a running request finds no block, the one of the
last rank is pre-empted: it loses its slot and blocks, waits at its place, and is computed again
as a prompt of all its tokens. So the request of the first rank always gets on.

The next step is planned before the result of the last one is in. What that result will say is known
within bounds: a row in flight adds 1 to 1 + drafts tokens, and room is taken for the most. A
request that may have its last token in flight waits for it; one that has ended in an earlier step
has a row in vain, which answers nothing, and leaves its slot and blocks after that. Nobody is
pre-empted while steps are in flight: where blocks run short, nothing is planned until the results
are in.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from unisono.runtime.block_ledger import BlockLedger
from unisono.runtime.holdings import Holdings
from unisono.runtime.in_flight import Flight, PlannedRow
from unisono.runtime.logprobs import LogprobCutter
from unisono.runtime.plan_wire import step_plan
from unisono.runtime.protocol import RequestRejected, Reschedule
from unisono.runtime.request import Request, blocks_for
from unisono.runtime.speculation import DraftPolicy, FixedDrafts
from unisono.runtime.stopping import finish_reason
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, StepPlan

Records = tuple["array[int] | None", int | None]
"""Log-probabilities and checksum of one token, where they are wanted."""
_NO_RECORDS: Records = (None, None)
_CHUNK, _DECODE = Phase.CHUNK, Phase.DECODE  # looking them up takes half as long as making a row


@dataclass(slots=True)
class NewToken:
    """One token of a request; `reason` is set if the answer ends with it.

    Not frozen: there are many, and that costs.
    """

    request: Request
    token_id: int
    reason: str | None
    logprobs: array[int] | None = None
    """`logprob_width` items, if the request wants them."""
    checksum: int | None = None
    """Of the logits that it comes from, if the request wants it."""


class Scheduler:
    """Holds the requests from admission to their end."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_requests: int,
        max_model_len: int,
        max_step_tokens: int,
        eos_token_ids: Sequence[int],
        prefix_cache: bool = True,
        max_in_flight: int = 2,
        num_drafts: int = 0,
        num_states: int = 0,
        policy: DraftPolicy | None = None,
    ) -> None:
        """`max_in_flight` steps may be out, one running and the others planned ahead.

        `num_states`: recurrent states on every rank, at least `max_requests` for a hybrid model,
        0 for others. `num_drafts`: the most that one row may have; `policy` says how many it has,
        by default all.
        """
        self.num_preemptions = 0
        self._max_model_len = max_model_len
        self._max_step_tokens = max(max_step_tokens, BLOCK_SIZE)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_in_flight = max_in_flight
        self._num_drafts = num_drafts
        self._policy = policy or FixedDrafts(num_drafts)
        self._drafts_now = num_drafts
        self._holdings = Holdings(num_blocks, max_requests, num_states, prefix_cache)
        self._num_arrived = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []  # in order of rank, as those that wait
        self._flights: deque[Flight] = deque()
        self._step = 0

    @property
    def ledger(self) -> BlockLedger:
        return self._holdings.blocks

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute or a result is due."""
        return bool(self._waiting or self._running or self._flights)

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are due."""
        return len(self._flights)

    def check(self, request: Request) -> None:
        """Raise RequestRejected if `request` could never run, with the numbers."""
        length = request.num_prompt_tokens
        if length == 0:
            raise RequestRejected("the prompt has no tokens; it needs at least 1")
        if length >= self._max_model_len:
            raise RequestRejected(
                f"the prompt has {length} tokens; with at least 1 to answer, at most "
                f"{self._max_model_len - 1} fit into max_model_len={self._max_model_len}"
            )
        if request.max_blocks > self.ledger.num_blocks:
            raise RequestRejected(
                f"{length} prompt tokens and up to {request.max_tokens} to answer take "
                f"{request.max_blocks} KV blocks of {BLOCK_SIZE}; the cache has "
                f"{self.ledger.num_blocks}: lower max_tokens or raise --kv-tokens"
            )

    def add(self, request: Request) -> None:
        """Queue a checked request behind those of its priority."""
        self.check(request)
        self._num_arrived += 1
        request.order = self._num_arrived
        self._enqueue(request)

    def abort(self, client: str, request_id: int) -> None:
        """Forget a request; one that has ended already is no error."""
        for request in (*self._waiting, *self._running):
            if (request.client, request.request_id) == (client, request_id):
                if request in self._waiting:
                    self._waiting.remove(request)
                else:
                    self._close(request)
                return

    def restart(self) -> None:
        """Every slot, every block and all steps in flight are lost, or of no use any more: the
        ranks were started anew, have given their memory back, or have other weights.

        Running requests wait at their places, with the tokens they have.
        """
        self._flights.clear()
        for request in self._running:
            self._holdings.unseat(request)
            self._enqueue(request)
        self._running = []
        self._holdings = self._holdings.anew()
        for request in self._waiting:
            request.block_names = []  # of the old cache's salt

    def reschedule(self, limits: Reschedule) -> None:
        """Forget what is cached and go on within other limits; there must be no work."""
        assert not self.has_work, "requests are there"
        self._max_step_tokens = max(limits.max_step_tokens, BLOCK_SIZE)
        self._holdings = self._holdings.anew(limits.num_blocks, limits.prefix_cache)

    def drafts_for(self, request: Request) -> int:
        """Drafts to be checked behind the next token of `request`, as far as there are any."""
        return 0 if request.needs_host else min(self._drafts_now, request.num_proposed)

    def next_plan(self) -> StepPlan | None:
        """Admit what fits and return the next step.

        None: there is nothing to compute, or, if steps are in flight, nothing without a result.
        """
        if self.num_in_flight == self._max_in_flight:
            return None
        if self._num_drafts:
            deciding = sum(not request.in_prompt for request in self._running)
            self._drafts_now = self._policy.choose(deciding) if deciding else self._num_drafts
        num_preemptions = self.num_preemptions
        rows = self._plan_decodes()
        if rows is None:
            return None
        # Whoever was pre-empted just now would only take the blocks that were needed.
        opened = self._admit() if self.num_preemptions == num_preemptions else []
        rows += self._plan_prompts(self._max_step_tokens - sum([1 + r.drafts for r in rows]))
        if not rows:
            assert not opened, "requests were admitted and none runs"
            assert self._flights or not self.has_work, "requests wait and nothing runs"
            return None
        self._step += 1
        flight = Flight(
            step=self._step,
            rows=rows,
            reads=[request.restored for request in opened if request.restored],
            saves=self._holdings.begin_saves(rows),
        )
        for row in rows:
            request = row.request
            request.next_start += row.count
            request.num_drafts += row.drafts
            request.num_proposed = self._drafts_now
            request.last_step = self._step
        self._flights.append(flight)
        return step_plan(
            flight, opened, self._running, self._eos_token_ids, num_proposals=self._drafts_now
        )

    def apply(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] = (),
        logprobs: array[int] | None = None,
        checksums: Sequence[int] | None = None,
        seconds: float = 0.0,
    ) -> list[NewToken]:
        """Take the result of the oldest step in flight: the tokens of its sampling rows, in order.

        The i-th of these rows has counts[i] of them, or one each if `counts` is empty. `logprobs`
        and `checksums` are those of all rows. `seconds`: what the step took, if that is known.
        """
        flight = self._flights.popleft()
        if seconds and flight.num_drafts is not None:
            self._policy.note(len(flight.rows), flight.num_drafts, counts, seconds)
        self._land(flight)
        cutter = LogprobCutter(logprobs)
        sums = iter(checksums or ())
        for row in flight.rows:
            if row.request.params.prompt_logprobs is not None:
                cutter.give_prompt(row.request, row.start, row.count)
        due = iter(counts) if counts else repeat(1)
        news: list[NewToken] = []
        end = 0
        for row in flight.rows:
            request = row.request
            count = 0 if row.phase is _CHUNK else next(due)
            end += count
            records: Sequence[Records] = ()
            if request.is_watched:
                records = [
                    (cutter.cut(request), next(sums) if request.checksums else None)
                    for _ in range(count)
                ]
            # A request that has ended meanwhile had its row in vain.
            if request.slot:
                assert row.phase is _CHUNK or 1 <= count <= 1 + row.drafts, row
                news += self._settle(row, tokens[end - count : end], records)
        assert end == len(tokens), f"{len(tokens)} tokens where {end} were due"
        cutter.check_empty()
        return news

    def audit(self) -> None:
        """Everything held is held once; every running request has room for its steps in flight.

        Raises AssertionError.
        """
        self._holdings.audit(self._running, self._flights)
        ranks = [request.rank for request in self._waiting]
        assert ranks == sorted(set(ranks)), "the queue is out of order"
        for request in self._running:
            self._audit_running(request)
        for request in self._waiting:
            assert request.slot == request.state == request.next_start == 0, request
            assert not request.blocks, request

    def _audit_running(self, request: Request) -> None:
        rows = [row for flight in self._flights for row in flight.rows if row.request is request]
        assert request.num_ahead == sum(row.count for row in rows), request
        assert request.num_drafts == sum(row.drafts for row in rows), request
        assert request.next_start <= request.num_tokens + len(rows), request
        assert request.num_left >= 0, request
        at_least = blocks_for(max(request.most_computed, request.num_given))
        spare = self._max_in_flight * (1 + self._num_drafts)
        at_most = min(blocks_for(request.num_tokens - 1 + spare), request.max_blocks)
        assert at_least <= len(request.blocks) <= max(at_least, at_most), request

    def _land(self, flight: Flight) -> None:
        """Free what only waited for the result of `flight`, and let its snapshots be found."""
        for state in flight.reads:
            self._holdings.states.end_read(state)
        for save in flight.saves:
            self._holdings.states.end_save(save.name)
        for seat in flight.leaving:
            self._holdings.free(seat)

    def _plan_decodes(self) -> list[PlannedRow] | None:
        """Rows of the requests that decode, in order of rank, each with room for its tokens.

        None: only the results of the steps in flight can make room.
        """
        planned: list[PlannedRow] = []
        budget = self._max_step_tokens
        for request in [request for request in self._running if not request.in_prompt]:
            # Victims have the last rank, so none of them is planned already.
            if not request.slot or not self._may_decode(request):
                continue
            if not budget:
                break
            if drafts := self.drafts_for(request) if self._drafts_now else 0:
                drafts = min(drafts, request.num_left - 1, budget - 1)
                if not self.ledger.can_take(self._holdings.missing(request, 1 + drafts)):
                    drafts = 0
            room = len(request.blocks) * BLOCK_SIZE
            if request.most_computed + drafts < room or self._make_room(request, 1 + drafts):
                planned.append(PlannedRow(request, request.next_start, 1, _DECODE, drafts))
                budget -= 1 + drafts
            elif self._flights:
                return None
        return planned

    def _may_decode(self, request: Request) -> bool:
        """Not behind its last token, wherever that may be, nor before the host has seen it."""
        return request.num_left > 0 and not (request.needs_host and request.num_ahead)

    def _plan_prompts(self, budget: int) -> list[PlannedRow]:
        planned: list[PlannedRow] = []
        for request in [request for request in self._running if request.in_prompt]:
            count, phase = _prompt_row(request, budget)
            if count:
                planned.append(PlannedRow(request, request.next_start, count, phase, 0))
                budget -= count
        return planned

    def _make_room(self, request: Request, count: int) -> bool:
        """Take the blocks that `count` more tokens need, pre-empting for them if nothing is due.

        False: there are none, or it was pre-empted itself. Blocks for drafts that were not
        accepted stay with the request, whose next tokens need them: it never has more than the
        steps in flight could fill, and the ranks need not be told.
        """
        missing = self._holdings.missing(request, count)
        if not missing:
            return True
        while not self.ledger.can_take(missing):
            if self._flights:
                return False
            victim = self._running[-1]
            self._pre_empt(victim)
            if victim is request:
                return False
        request.blocks += self.ledger.take(missing)
        return True

    def _pre_empt(self, request: Request) -> None:
        self._close(request)
        self._enqueue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self) -> list[Request]:
        """Open slots in order of rank, as long as all tokens of the next request find room."""
        opened = []
        while self._waiting and self._holdings.admit(self._waiting[0]):
            request = self._waiting.pop(0)
            if not request.last_step:
                request.num_cached_tokens = request.num_computed
            insort(self._running, request, key=_rank)
            opened.append(request)
        return opened

    def _settle(
        self,
        row: PlannedRow,
        tokens: Sequence[int],
        records: Sequence[Records],
    ) -> list[NewToken]:
        """Take what a row in flight has answered, up to the first token that ends the answer.

        `records`: the log-probabilities and the checksum of each token, where they are wanted.
        """
        request = row.request
        gained = row.count
        if row.drafts:
            request.count_drafts(row.drafts, len(tokens) - 1)
            request.num_drafts -= row.drafts
            request.next_start += len(tokens) - 1
            gained = len(tokens)
        request.num_computed += gained
        news: list[NewToken] = []
        for place, token_id in enumerate(tokens):
            logprobs, checksum = records[place] if records else _NO_RECORDS
            request.answer_ids.append(token_id)
            reason = finish_reason(request, token_id, self._eos_token_ids)
            news.append(NewToken(request, token_id, reason, logprobs, checksum))
            if reason is not None:
                break
        if request.num_computed % BLOCK_SIZE < gained:  # it has filled a block
            self._holdings.publish(request)
        if news and news[-1].reason is not None:
            self._close(request)
        return news

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_rank)

    def _close(self, request: Request) -> None:
        """Take `request` off the ranks. What it held is free after the last step that names it."""
        self._running.remove(request)
        seat = self._holdings.unseat(request)
        for flight in self._flights:
            if flight.step == request.last_step:
                flight.leaving.append(seat)
                return
        self._holdings.free(seat)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _prompt_row(request: Request, budget: int) -> tuple[int, Phase]:
    """Tokens that `request` computes of its prompt within `budget`, and their phase."""
    left = request.num_given - request.next_start
    if left <= budget:
        return left, Phase.PROMPT
    end = (request.next_start + budget) // BLOCK_SIZE * BLOCK_SIZE
    return max(end - request.next_start, 0), Phase.CHUNK
