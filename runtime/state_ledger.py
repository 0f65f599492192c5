"""Who uses which recurrent state of a hybrid model, and which prefixes have a saved one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence


class StateLedger:
    """State slots 1 .. num_slots; slot 0 is scratch and never given out.

    A slot is free, the own state of a request, a snapshot, or about to become one. A snapshot is
    the state after all tokens of a block name (runtime/prefix_cache.py). It is only ever read: a
    request starts with a copy of it. The one that was not read for longest gives way when a slot
    is needed, but none that a step in flight reads.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(1, num_slots + 1))
        self._owned: set[int] = set()
        self._saving: dict[bytes, int] = {}
        self._snapshots: dict[bytes, int] = {}
        self._num_readers: Counter[int] = Counter()

    def can_take(self, beside: int = 0) -> bool:
        """Whether a slot can be taken and snapshot `beside` be kept."""
        return bool(self._free) or any(slot != beside for _, slot in self._idle())

    def take(self) -> int:
        """Take a slot of no content as a request's own."""
        slot = self._vacate()
        self._owned.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a request's own slot."""
        self._owned.remove(slot)
        self._free.append(slot)

    def find(self, names: Sequence[bytes]) -> int:
        """Return how many of a request's block `names` the longest snapshot covers; 0: none."""
        counts = range(len(names), 0, -1)
        return next((count for count in counts if names[count - 1] in self._snapshots), 0)

    def snapshot(self, name: bytes) -> int:
        """Return the slot of the snapshot `name`."""
        return self._snapshots[name]

    def begin_read(self, name: bytes) -> int:
        """Keep snapshot `name` until `end_read` of the slot that is returned."""
        slot = self._snapshots[name] = self._snapshots.pop(name)
        self._num_readers[slot] += 1
        return slot

    def end_read(self, slot: int) -> None:
        """The step that read `slot` is done."""
        self._num_readers[slot] -= 1
        if not self._num_readers[slot]:
            del self._num_readers[slot]

    def begin_save(self, name: bytes) -> int:
        """Return a slot for a snapshot `name`; 0 if there is one already, or no slot for it."""
        if name in self._snapshots or name in self._saving or not self.can_take():
            return 0
        self._saving[name] = self._vacate()
        return self._saving[name]

    def end_save(self, name: bytes) -> None:
        """The step that saved snapshot `name` is done: from now on it is found."""
        self._snapshots[name] = self._saving.pop(name)

    def audit(self, owned: Collection[int], read: Collection[int], saving: Collection[int]) -> None:
        """Every slot is one thing, once, and the steps and requests that need it are known.

        `owned` by requests; `read` and `saving` by steps in flight. Raises AssertionError.
        """
        assert sorted(owned) == sorted(self._owned), "a state has a lost owner"
        assert sorted(saving) == sorted(self._saving.values()), "a snapshot is not saved"
        assert Counter(read) == self._num_readers, "a snapshot has a lost reader"
        assert set(read) <= set(self._snapshots.values()), "a snapshot went while it was read"
        parts = (self._free, self._owned, self._saving.values(), self._snapshots.values())
        slots = sorted(slot for part in parts for slot in part)
        assert slots == list(range(1, self.num_slots + 1)), "a state is lost or is there twice"

    def _idle(self) -> list[tuple[bytes, int]]:
        """Snapshots that no step reads, the one that was not read for longest first."""
        return [item for item in self._snapshots.items() if item[1] not in self._num_readers]

    def _vacate(self) -> int:
        if self._free:
            return self._free.popleft()
        name, slot = self._idle()[0]
        del self._snapshots[name]
        return slot
