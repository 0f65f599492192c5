"""Who owns which KV block. Knows numbers, never tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockLedger:
    """Blocks 1 .. num_blocks; block 0 is scratch and never given out.

    A request reserves its worst case when it is admitted and takes blocks out of the reservation
    as it grows, so that a running request never waits for a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._owned: set[int] = set()
        self._reserved = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds or has reserved."""
        return len(self._free) - self._reserved

    def reserve(self, count: int) -> bool:
        """Set `count` free blocks aside; False if there are not as many."""
        if count > self.num_free:
            return False
        self._reserved += count
        return True

    def take(self, count: int) -> list[int]:
        """Take `count` blocks out of a reservation."""
        assert count <= self._reserved, f"{count} blocks of {self._reserved} reserved"
        self._reserved -= count
        blocks = [self._free.popleft() for _ in range(count)]
        self._owned.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int], reserved: int) -> None:
        """Free `blocks`, and what is left of their owner's reservation."""
        assert reserved <= self._reserved, f"{reserved} blocks of {self._reserved} reserved"
        self._reserved -= reserved
        for block in blocks:
            self._owned.remove(block)
            self._free.append(block)

    def audit(self) -> None:
        """Every block is free or owned, once; reservations are covered."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._owned, f"free and owned: {sorted(free & self._owned)}"
        assert len(free) + len(self._owned) == self.num_blocks, "a block was lost"
        assert 0 not in free | self._owned, "block 0 was given out"
        assert 0 <= self._reserved <= len(self._free), f"{self._reserved} reserved"
