"""What running requests hold on the ranks: a slot, KV blocks and, in hybrid models, a state.

And what others may find of it. Attention-only models publish every full block; hybrid ones only
blocks wholly inside a prompt, for there a generated token is computed in another form than the
same token of a prompt, and what follows a hit must start from a snapshot of the state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from unisono.runtime.block_ledger import BlockLedger
from unisono.runtime.in_flight import Flight, PlannedRow, Save, Seat
from unisono.runtime.request import Request, blocks_for
from unisono.runtime.state_ledger import StateLedger
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase


class Holdings:
    """Three ledgers and the prefix cache. `num_states` 0: the model has no recurrent state."""

    def __init__(
        self, num_blocks: int, num_slots: int, num_states: int, prefix_cache: bool
    ) -> None:
        self.blocks = BlockLedger(num_blocks)
        self.states = StateLedger(num_states)
        self.is_hybrid = num_states > 0
        self._prefix_cache = prefix_cache
        self._num_slots = num_slots
        self._free_slots = deque(range(1, num_slots + 1))

    def anew(self, num_blocks: int = 0, prefix_cache: bool | None = None) -> Holdings:
        """Empty ones, in which all is free and nothing can be found, for as many requests and
        states; otherwise as these unless it is said."""
        size = num_blocks or self.blocks.num_blocks
        finds = self._prefix_cache if prefix_cache is None else prefix_cache
        return Holdings(size, self._num_slots, self.states.num_slots, finds)

    def admit(self, request: Request) -> bool:
        """Seat `request` with blocks for all its tokens so far; False if there is no room."""
        if not self._free_slots or (self.is_hybrid and not self.states.can_take()):
            return False
        shared = self.find_shared(request)
        missing = blocks_for(request.num_tokens) - len(shared)
        if not self.blocks.can_take(missing, shared):
            return False
        self.blocks.share(shared)
        request.blocks = shared + self.blocks.take(missing)
        request.slot = self._free_slots.popleft()
        request.restored = 0
        if self.is_hybrid:
            if shared:
                request.restored = self.states.begin_read(request.block_names[len(shared) - 1])
            request.state = self.states.take()
        request.num_given = request.num_tokens
        request.num_published = len(shared)
        request.num_computed = request.next_start = len(shared) * BLOCK_SIZE
        return True

    def find_shared(self, request: Request) -> list[int]:
        """Published blocks that hold its first tokens; the last is always left to compute."""
        if not self._prefix_cache or request.lacks_prompt_logprobs:
            return []
        count = min(request.num_tokens - 1, self._num_publishable(request)) // BLOCK_SIZE
        names = self.name_blocks(request, count)
        found = self.blocks.cache.find(names[:count])
        if self.is_hybrid:
            request.num_common = len(found)
            found = found[: self.states.find(names[: len(found)])]
            if found and not self.states.can_take(self.states.snapshot(names[len(found) - 1])):
                return []  # its own state will take the snapshot's place
        return found

    def missing(self, request: Request, count: int) -> int:
        """Blocks to take before `request` computes up to `count` more tokens."""
        lacking = request.most_computed + count - len(request.blocks) * BLOCK_SIZE
        return blocks_for(lacking) if lacking > 0 else 0

    def publish(self, request: Request) -> None:
        """Let others find the blocks that `request` has filled with tokens that are known."""
        if not self._prefix_cache:
            return
        num_full = min(request.num_computed, self._num_publishable(request)) // BLOCK_SIZE
        if num_full <= request.num_published:
            return
        names = self.name_blocks(request, num_full)
        for i in range(request.num_published, num_full):
            self.blocks.cache.publish(request.blocks[i], names[i])
        request.num_published = num_full

    def begin_saves(self, rows: Iterable[PlannedRow]) -> list[Save]:
        """Snapshots to save in a step: where a prompt leaves what others have, too, and of the last
        border that each prompt row passes, as far as there is room."""
        prompts = [row for row in rows if self.is_hybrid and row.phase != Phase.DECODE]
        common = [self.begin_save(row, row.request.num_common) for row in prompts]
        saves = common + [self.begin_save(row, row.start + row.count) for row in prompts]
        return [save for save in saves if save is not None]

    def begin_save(self, row: PlannedRow, most: int) -> Save | None:
        """The snapshot of the last of `most` borders that a prompt row passes: not of the prompt's
        own end, where the same prompt again would have nothing to compute."""
        request, last = row.request, min(row.start + row.count, row.request.num_prompt_tokens - 1)
        count = min(most, last // BLOCK_SIZE)
        if not self._prefix_cache or count * BLOCK_SIZE <= row.start:
            return None
        name = self.name_blocks(request, count)[count - 1]
        if not (state := self.states.begin_save(name)):
            return None
        return Save(slot=request.slot, length=count * BLOCK_SIZE, state=state, name=name)

    def unseat(self, request: Request) -> Seat:
        """Take everything from `request`; the seat still has to be freed."""
        seat = Seat(slot=request.slot, blocks=request.blocks, state=request.state)
        request.blocks, request.slot, request.state = [], 0, 0
        request.num_computed = request.next_start = request.num_drafts = request.num_proposed = 0
        request.num_sent_blocks = request.num_published = 0
        return seat

    def free(self, seat: Seat) -> None:
        """Let others have what a request held."""
        self.blocks.give_back(seat.blocks)
        self._free_slots.append(seat.slot)
        if seat.state:
            self.states.give_back(seat.state)

    def name_blocks(self, request: Request, count: int) -> list[bytes]:
        """Return the names of its blocks, of the first `count` at least."""
        names = request.block_names
        for i in range(len(names), count):
            tokens = request.tokens(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)
            names.append(self.blocks.cache.name(names[-1] if names else b"", tokens))
        return names

    def audit(self, running: Sequence[Request], flights: Collection[Flight]) -> None:
        """All adds up: each slot, block and state is free, or held by who is known to hold it.

        Raises AssertionError.
        """
        leaving = [seat for flight in flights for seat in flight.leaving]
        seats: list[Request | Seat] = [*running, *leaving]
        slots = [seat.slot for seat in seats]
        assert sorted([*slots, *self._free_slots]) == list(range(1, self._num_slots + 1))
        self.blocks.audit()
        users = Counter(block for seat in seats for block in seat.blocks)
        lost = [block for block in users if users[block] != self.blocks.num_users(block)]
        assert not lost, f"blocks with a lost user: {lost}"
        assert self.blocks.num_free + len(users) == self.blocks.num_blocks, "a block has no user"
        self.states.audit(
            [seat.state for seat in seats if self.is_hybrid],
            [state for flight in flights for state in flight.reads],
            [save.state for flight in flights for save in flight.saves],
        )
        for request in running:
            self._audit_blocks(request)

    def _audit_blocks(self, request: Request) -> None:
        assert request.num_sent_blocks <= len(request.blocks), request
        for i, block in enumerate(request.blocks):
            name = self.blocks.cache.name_of(block)
            if name is not None or self.blocks.num_users(block) > 1:
                last = (i + 1) * BLOCK_SIZE
                assert last <= request.num_computed, "a shared block is written"
                assert last <= self._num_publishable(request), "a block that may not be found"
                assert name == request.block_names[i], "a block has another's name"

    def _num_publishable(self, request: Request) -> int:
        """Tokens whose blocks others may find, once they are computed."""
        return request.num_prompt_tokens if self.is_hybrid else request.num_tokens
