"""Which full KV block holds which tokens, by content, and which idle one is given up first."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

_NAME_BYTES = 16
_SALT_BYTES = 16


class PrefixCache:
    """Names of published blocks. A block's name stands for all tokens from 0 to its end.

    A block that nobody uses any more rests: it can still be found, and the one that rests
    longest is evicted when a fresh block is needed.
    """

    def __init__(self) -> None:
        # Nobody outside may find two prefixes of one name, so each run has its own key.
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._resting: dict[int, None] = {}

    @property
    def num_resting(self) -> int:
        """Published blocks without a user: free for whoever needs one."""
        return len(self._resting)

    def name(self, parent: bytes, tokens: array[int]) -> bytes:
        """Return the name of a block of int32 `tokens` that follows `parent` (b"" at the start)."""
        return blake2b(parent + tokens.tobytes(), digest_size=_NAME_BYTES, key=self._salt).digest()

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest published head of `names`."""
        found = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, name: bytes) -> None:
        """Let a full, computed block be found; of two with the same content the first stays."""
        assert block not in self._name_of, f"block {block} is published already"
        if name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def name_of(self, block: int) -> bytes | None:
        """Return the name under which `block` is published, if it is."""
        return self._name_of.get(block)

    def is_resting(self, block: int) -> bool:
        """Whether `block` is published and unused."""
        return block in self._resting

    def rest(self, block: int) -> bool:
        """Take in a block whose last user is gone; False if it was never published."""
        if block not in self._name_of:
            return False
        self._resting[block] = None
        return True

    def wake(self, block: int) -> None:
        """Take a resting block back into use, under its name."""
        del self._resting[block]

    def evict(self) -> int:
        """Forget the block that rests longest and return it."""
        block = next(iter(self._resting))
        del self._resting[block]
        del self._block_of[self._name_of.pop(block)]
        return block

    def audit(self) -> None:
        """Names and blocks map to each other one to one; what rests has a name."""
        back = {block: name for name, block in self._block_of.items()}
        assert back == self._name_of, "names and blocks disagree"
        assert self._resting.keys() <= self._name_of.keys(), "a block rests without a name"
