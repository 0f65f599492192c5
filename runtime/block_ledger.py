"""Who uses which KV block. Knows numbers, never tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from unisono.runtime.prefix_cache import PrefixCache


class BlockLedger:
    """Blocks 1 .. num_blocks; block 0 is scratch and never given out.

    A block is free (never published, or evicted), resting in `cache` (published, nobody uses it)
    or used, by one request or several. Free and resting blocks can both be taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._num_users: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free) + self.cache.num_resting

    def num_users(self, block: int) -> int:
        """How many requests use `block`."""
        return self._num_users.get(block, 0)

    def can_take(self, count: int, shared: Collection[int] = ()) -> bool:
        """Whether `count` blocks can be taken beside `shared`, which may be resting."""
        return count <= self.num_free - sum(map(self.cache.is_resting, shared))

    def take(self, count: int) -> list[int]:
        """Take `count` blocks of no content; what rests longest is evicted if none is free."""
        assert count <= self.num_free, f"{count} blocks of {self.num_free}"
        blocks = [self._free.popleft() if self._free else self.cache.evict() for _ in range(count)]
        self._num_users.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Collection[int]) -> None:
        """Add a user to published `blocks`, which keep their content."""
        for block in blocks:
            if self.cache.is_resting(block):
                self.cache.wake(block)
            self._num_users[block] = self.num_users(block) + 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one user of each of `blocks`, a request's in order.

        The last is let go first: a prefix is of no use without its head, so tails go first.
        """
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                del self._num_users[block]
                if not self.cache.rest(block):
                    self._free.append(block)

    def audit(self) -> None:
        """Every block is free, resting or used, once."""
        self.cache.audit()
        free, used = set(self._free), self._num_users.keys()
        resting = {b for b in range(self.num_blocks + 1) if self.cache.is_resting(b)}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & used, f"free and used: {sorted(free & used)}"
        assert not resting & (free | used), f"resting and free or used: {sorted(resting)}"
        assert free | used | resting == set(range(1, self.num_blocks + 1)), "a block was lost"
        assert all(count > 0 for count in self._num_users.values()), "a block has no users"
        assert not any(map(self.cache.name_of, free)), "a free block can be found"
