"""How the memory of all-reduces over symmetric memory is divided, and which sizes it serves.

It is the same on every rank. What it is for: ops/kernels/symmetric.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.ops.kernels.launch import blocks_of

CROSSOVER = {2: (512 << 10, 64 << 20), 4: (256 << 10, 8 << 20), 8: (128 << 10, 8 << 20)}
"""By the number of ranks, or the next one: up to how many bytes one-shot and two-shot serve. A
one-shot sends everything to every peer, twice as large; above both, NCCL gathers."""
BLOCK_WORDS = 1024
"""Of 32 bits each: what a lane of a one-shot takes."""
REGION_WORDS = 4096
"""Of 32 bits each: the widest row of a one-shot with its norm, 8,192 numbers of 16 bits."""
_WORD, _SIGNAL = 8, 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How a rank's memory is divided, and which sizes are served; the same on every rank."""

    ranks: int
    one_shot_bytes: int
    """The most that a one-shot takes; its words come first in the memory."""
    two_shot_bytes: int
    """The most that a two-shot takes; behind the words its signals, then its numbers."""
    two_shot_lanes: int = 64
    """Fewer than a card has processors, so that all lanes of a rank run at once."""

    @classmethod
    def of(cls, ranks: int) -> Layout:
        """Raises ValueError for a number of ranks that is not served."""
        sizes = [size for most, size in sorted(CROSSOVER.items()) if ranks <= most]
        if ranks < 2 or not sizes:
            raise ValueError(f"{ranks} ranks; symmetric memory serves 2 to {max(CROSSOVER)}")
        return cls(ranks, *sizes[0])

    @property
    def one_shot_lanes(self) -> int:
        return self.one_shot_bytes // (4 * BLOCK_WORDS)

    @property
    def signals(self) -> int:
        """At which byte the signals begin."""
        return self.one_shot_lanes * 2 * self.ranks * REGION_WORDS * _WORD

    @property
    def data(self) -> int:
        """At which byte the numbers begin."""
        return self.signals + 2 * self.two_shot_lanes * self.ranks * _SIGNAL

    @property
    def region_bytes(self) -> int:
        """Of a lane's numbers."""
        return self.slice_bytes(self.two_shot_bytes) * self.ranks

    @property
    def nbytes(self) -> int:
        return self.data + self.two_shot_lanes * 2 * self.region_bytes

    def slice_bytes(self, nbytes: int) -> int:
        """What a rank sums of a lane, of a tensor of `nbytes`: whole multiples of 1 KiB."""
        return blocks_of(nbytes, self.two_shot_lanes * self.ranks << 10) << 10

    def slice_rows(self, num_rows: int, row_bytes: int) -> int:
        """How many whole rows of a lane a rank sums, of a tensor of `num_rows` that is not empty; 0
        where a slice of a lane's numbers has no room for them."""
        rows = blocks_of(num_rows, self.two_shot_lanes * self.ranks)
        return rows if rows * row_bytes * self.ranks <= self.region_bytes else 0
