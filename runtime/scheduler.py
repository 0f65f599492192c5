"""Which rows the next step computes. Plain numbers; pure given the ledger and the results.

Continuous batching by rank (priority, then arrival): a request is admitted when a slot is free and
the tokens it has so far fit. Decode rows go first, then prompts within the token budget; a prompt
that does not fit is cut at a block border. If a running request finds no block, the one of the
last rank is pre-empted: it loses its slot and blocks, waits at its place, and is computed again
as a prompt of all its tokens. So the request of the first rank always gets on.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unisono.runtime.block_ledger import BlockLedger
from unisono.runtime.logprobs import LogprobCutter
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
    ) -> None:
        self.ledger = BlockLedger(num_blocks)
        self.num_preemptions = 0
        self._max_model_len = max_model_len
        self._max_step_tokens = max(max_step_tokens, BLOCK_SIZE)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prefix_cache = prefix_cache
        self._free_slots = deque(range(1, max_requests + 1))
        self._num_slots = max_requests
        self._num_arrived = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._in_flight: list[Request] = []
        self._rows = Rows()
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
        """The ranks were started anew: every slot, every block and the step in flight are lost.

        Running requests wait at their places, with the tokens they have.
        """
        for request in list(self._running):
            self._close(request)
            self._enqueue(request)
        self.ledger = BlockLedger(self.ledger.num_blocks)
        for request in self._waiting:
            request.block_names = []  # of the old cache's salt
        self._in_flight = []

    def next_plan(self) -> StepPlan | None:
        """Admit what fits and return the next step; None if there is nothing to compute."""
        assert not self._in_flight, "the result of the last step is still due"
        num_preemptions = self.num_preemptions
        planned = self._plan_decodes()
        # Whoever was pre-empted just now would only take the blocks that were needed.
        opened = self._admit() if self.num_preemptions == num_preemptions else []
        planned += self._plan_prompts(self._max_step_tokens - len(planned))
        if not planned:
            assert not self.has_work, "requests wait and nothing runs"
            return None
        self._step += 1
        rows = Rows()
        for request, count, phase in planned:
            rows.slot.append(request.slot)
            rows.start.append(request.num_computed)
            rows.count.append(count)
            rows.phase.append(phase)
            request.num_computed += count
            self._in_flight.append(request)
        self._rows = rows
        return StepPlan(
            step=self._step,
            rows=rows,
            **_open_arrays(opened, self._eos_token_ids),
            **_block_arrays(self._running),
        )

    def apply(
        self,
        tokens: Sequence[int],
        logprobs: array[int] | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[NewToken]:
        """Take the tokens of the step's sampling rows, in row order, and what came with them."""
        rows = list(zip(self._in_flight, self._rows.phase, strict=True))
        cutter = LogprobCutter(logprobs)
        for row in zip(self._in_flight, self._rows.start, self._rows.count, strict=True):
            cutter.give_prompt(*row)
        self._in_flight = []
        for request, _ in rows:
            self._publish(request)
        sampling = [request for request, phase in rows if phase != Phase.CHUNK]
        sums = iter(checksums or ())
        news = []
        for request, token_id in zip(sampling, tokens, strict=True):
            record = cutter.cut(request)
            checksum = next(sums) if request.checksums else None
            if request.slot == 0:  # aborted while the step ran
                continue
            request.answer_ids.append(token_id)
            reason = finish_reason(request, token_id, self._eos_token_ids)
            news.append(NewToken(request, token_id, reason, record, checksum))
            if reason is not None:
                self._close(request)
        cutter.check_empty()
        return news

    def audit(self) -> None:
        """Blocks and slots add up; every running request has room, and writes to no shared block.

        Raises AssertionError.
        """
        self.ledger.audit()
        slots = [request.slot for request in self._running]
        assert sorted([*slots, *self._free_slots]) == list(range(1, self._num_slots + 1))
        ranks = [request.rank for request in self._waiting]
        assert ranks == sorted(set(ranks)), "the queue is out of order"
        users = Counter(block for request in self._running for block in request.blocks)
        assert users.total() == sum(map(self.ledger.num_users, users)), "a block has a lost user"
        assert self.ledger.num_free + len(users) == self.ledger.num_blocks, "a block has no user"
        writes_from = dict(zip(self._in_flight, self._rows.start, strict=False))
        for request in self._running:
            self._audit_running(request, writes_from.get(request, request.num_computed))
        for request in self._waiting:
            assert request.slot == 0, request
            assert not request.blocks, request
            assert request.num_computed == 0, request

    def _audit_running(self, request: Request, writes_from: int) -> None:
        num_needed = max(request.num_computed, request.num_given)
        assert len(request.blocks) == blocks_for(num_needed), request
        assert request.num_computed <= request.num_tokens, request
        assert request.num_sent_blocks <= len(request.blocks), request
        for i, block in enumerate(request.blocks):
            name = self.ledger.cache.name_of(block)
            if name is not None or self.ledger.num_users(block) > 1:
                assert (i + 1) * BLOCK_SIZE <= writes_from, "a shared block is written"
                assert name == request.block_names[i], "a block has another's name"

    def _plan_decodes(self) -> list[_Row]:
        """Rows of the requests that decode, in order of rank, each with room for its token."""
        planned: list[_Row] = []
        decoding = [request for request in self._running if not request.in_prompt]
        for request in sorted(decoding, key=_rank):
            if len(planned) == self._max_step_tokens:
                break
            # Victims have the last rank, so none of them is planned already.
            if request.slot and self._make_room(request):
                planned.append((request, 1, Phase.DECODE))
        return planned

    def _plan_prompts(self, budget: int) -> list[_Row]:
        planned: list[_Row] = []
        prompts = [request for request in self._running if request.in_prompt]
        for request in sorted(prompts, key=_rank):
            count, phase = _prompt_row(request, budget)
            if count:
                planned.append((request, count, phase))
                budget -= count
        return planned

    def _make_room(self, request: Request) -> bool:
        """Take the block that the next token needs, pre-empting for it; False: it was itself."""
        missing = blocks_for(request.num_computed + 1) - len(request.blocks)
        if missing == 0:  # for 63 of 64 tokens
            return True
        while not self.ledger.can_take(missing):
            victim = max(self._running, key=_rank)
            self._close(victim)
            self._enqueue(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        request.blocks += self.ledger.take(missing)
        return True

    def _admit(self) -> list[Request]:
        """Open slots in order of rank, as long as all tokens of the next request find blocks."""
        opened = []
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            shared = self._find_shared(request)
            missing = blocks_for(request.num_tokens) - len(shared)
            if not self.ledger.can_take(missing, shared):
                break
            self._waiting.pop(0)
            self.ledger.share(shared)
            request.blocks = shared + self.ledger.take(missing)
            request.slot = self._free_slots.popleft()
            request.num_given = request.num_tokens
            request.num_published = len(shared)
            request.num_computed = len(shared) * BLOCK_SIZE
            if request.num_admissions == 0:
                request.num_cached_tokens = request.num_computed
            request.num_admissions += 1
            self._running.append(request)
            opened.append(request)
        return opened

    def _find_shared(self, request: Request) -> list[int]:
        """Published blocks that hold its first tokens; the last is always left to compute."""
        if not self._prefix_cache or request.lacks_prompt_logprobs:
            return []
        count = (request.num_tokens - 1) // BLOCK_SIZE
        self._name_blocks(request, count)
        return self.ledger.cache.find(request.block_names[:count])

    def _publish(self, request: Request) -> None:
        """Let others find the blocks that `request` has filled with computed tokens."""
        if not self._prefix_cache or request.slot == 0:
            return
        num_full = request.num_computed // BLOCK_SIZE
        if num_full == request.num_published:
            return
        self._name_blocks(request, num_full)
        for i in range(request.num_published, num_full):
            self.ledger.cache.publish(request.blocks[i], request.block_names[i])
        request.num_published = num_full

    def _name_blocks(self, request: Request, count: int) -> None:
        names = request.block_names
        for i in range(len(names), count):
            tokens = request.tokens(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)
            names.append(self.ledger.cache.name(names[-1] if names else b"", tokens))

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_rank)

    def _close(self, request: Request) -> None:
        self._running.remove(request)
        self.ledger.give_back(request.blocks)
        self._free_slots.append(request.slot)
        request.blocks, request.slot = [], 0
        request.num_computed = request.num_sent_blocks = request.num_published = 0


_Row = tuple[Request, int, Phase]
"""A request, how many tokens of it a step computes, and as what."""


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _prompt_row(request: Request, budget: int) -> tuple[int, Phase]:
    """Tokens that `request` computes of its prompt within `budget`, and their phase."""
    left = request.num_given - request.num_computed
    if left <= budget:
        return left, Phase.PROMPT
    end = (request.num_computed + budget) // BLOCK_SIZE * BLOCK_SIZE
    return max(end - request.num_computed, 0), Phase.CHUNK


def _open_arrays(
    opened: Sequence[Request], eos_token_ids: Collection[int]
) -> dict[str, array[int]]:
    """What a plan says of the slots it opens: all tokens so far, and how many blocks are shared."""
    tokens = int32s()
    for request in opened:
        tokens.extend(request.tokens(0, request.num_given))
    return {
        "open_slot": int32s(request.slot for request in opened),
        "open_length": int32s(request.num_given for request in opened),
        "open_tokens": tokens,
        "open_sampling": open_sampling(opened, eos_token_ids),
        "num_shared": int32s(request.num_published for request in opened),
    }


def _block_arrays(running: Sequence[Request]) -> dict[str, array[int]]:
    """What a plan says of the blocks that slots got since the last plan."""
    slots, blocks = int32s(), int32s()
    for request in running:
        if request.num_sent_blocks < len(request.blocks):
            new = request.blocks[request.num_sent_blocks :]
            slots.extend([request.slot] * len(new))
            blocks.extend(new)
            request.num_sent_blocks = len(request.blocks)
    return {"block_slot": slots, "block_id": blocks}
