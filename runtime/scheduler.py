"""Which rows the next step computes. Plain numbers; pure given the ledger and the results.

Continuous batching, first come first served: a request is admitted when a slot is free and its
worst case fits, so none is ever interrupted. Decode rows go first, then prompts in order of
arrival within the token budget; a prompt that does not fit is cut at a block border.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.runtime.block_ledger import BlockLedger
from unisono.runtime.protocol import RequestRejected
from unisono.runtime.request import Request, blocks_for
from unisono.runtime.sampling_wire import open_sampling
from unisono.runtime.stopping import finish_reason
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token of a request; `reason` is set if the answer ends with it."""

    request: Request
    token_id: int
    reason: str | None


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
    ) -> None:
        self.ledger = BlockLedger(num_blocks)
        self._max_model_len = max_model_len
        self._max_step_tokens = max(max_step_tokens, BLOCK_SIZE)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._free_slots = deque(range(1, max_requests + 1))
        self._num_slots = max_requests
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_flight: list[Request] = []
        self._phases = int32s()
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

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
        """Queue a checked request."""
        self.check(request)
        self._waiting.append(request)

    def abort(self, client: str, request_id: int) -> None:
        """Forget a request; one that has ended already is no error."""
        for request in (*self._waiting, *self._running):
            if (request.client, request.request_id) == (client, request_id):
                if request in self._waiting:
                    self._waiting.remove(request)
                else:
                    self._close(request)
                return

    def next_plan(self) -> StepPlan | None:
        """Admit what fits and return the next step; None if there is nothing to compute."""
        assert not self._in_flight, "the result of the last step is still due"
        opened = self._admit()
        slot, start, count, phase = int32s(), int32s(), int32s(), int32s()
        block_slot, block_id = int32s(), int32s()
        budget = self._max_step_tokens
        for request in self._by_urgency():
            num_tokens, row_phase = self._row_of(request, budget)
            if num_tokens == 0:
                continue
            budget -= num_tokens
            for block in self._grow(request, request.num_computed + num_tokens):
                block_slot.append(request.slot)
                block_id.append(block)
            slot.append(request.slot)
            start.append(request.num_computed)
            count.append(num_tokens)
            phase.append(row_phase)
            request.num_computed += num_tokens
            self._in_flight.append(request)
        if not self._in_flight:
            return None
        self._step += 1
        open_tokens = int32s()
        for request in opened:
            open_tokens.extend(request.prompt_ids)
        self._phases = phase
        return StepPlan(
            step=self._step,
            rows=Rows(slot=slot, start=start, count=count, phase=phase),
            open_slot=int32s(request.slot for request in opened),
            open_length=int32s(request.num_prompt_tokens for request in opened),
            open_tokens=open_tokens,
            open_sampling=open_sampling(opened, self._eos_token_ids),
            block_slot=block_slot,
            block_id=block_id,
        )

    def apply(self, tokens: Sequence[int]) -> list[NewToken]:
        """Take the tokens of the step's sampling rows, in row order."""
        rows = zip(self._in_flight, self._phases, strict=True)
        sampling = [request for request, phase in rows if phase != Phase.CHUNK]
        self._in_flight = []
        news = []
        for request, token_id in zip(sampling, tokens, strict=True):
            if request.slot == 0:  # aborted while the step ran
                continue
            request.num_answered += 1
            reason = finish_reason(request, token_id, self._eos_token_ids)
            news.append(NewToken(request, token_id, reason))
            if reason is not None:
                self._close(request)
        return news

    def audit(self) -> None:
        """Blocks and slots add up; every running request has room for what it computed."""
        self.ledger.audit()
        slots = [request.slot for request in self._running]
        assert sorted([*slots, *self._free_slots]) == list(range(1, self._num_slots + 1))
        for request in self._running:
            assert len(request.blocks) == blocks_for(request.num_computed), request
            assert len(request.blocks) + request.num_reserved == request.max_blocks, request
        assert all(request.slot == 0 and not request.blocks for request in self._waiting)

    def _admit(self) -> list[Request]:
        opened = []
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            if not self.ledger.reserve(request.max_blocks):
                break
            self._waiting.popleft()
            request.num_reserved = request.max_blocks
            request.slot = self._free_slots.popleft()
            self._running.append(request)
            opened.append(request)
        return opened

    def _by_urgency(self) -> list[Request]:
        return sorted(self._running, key=lambda request: request.in_prompt)

    def _row_of(self, request: Request, budget: int) -> tuple[int, Phase]:
        """Tokens that `request` computes in this step within `budget`, and their phase."""
        if not request.in_prompt:
            return min(1, budget), Phase.DECODE
        left = request.num_prompt_tokens - request.num_computed
        if left <= budget:
            return left, Phase.PROMPT
        end = (request.num_computed + budget) // BLOCK_SIZE * BLOCK_SIZE
        return max(end - request.num_computed, 0), Phase.CHUNK

    def _grow(self, request: Request, num_tokens: int) -> list[int]:
        """Take the blocks that `request` lacks to hold `num_tokens`."""
        blocks = self.ledger.take(blocks_for(num_tokens) - len(request.blocks))
        request.num_reserved -= len(blocks)
        request.blocks += blocks
        return blocks

    def _close(self, request: Request) -> None:
        self._running.remove(request)
        self.ledger.give_back(request.blocks, request.num_reserved)
        self._free_slots.append(request.slot)
        request.blocks, request.num_reserved, request.slot = [], 0, 0
