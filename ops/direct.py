"""Collectives that serve some sizes faster than the process group: what a `Group` asks first.

Whether one serves must follow from what is the same on all ranks: shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class Direct:
    """One that serves nothing: every answer is None. `ops/symmetric.py` has the one that does."""

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """`Group.all_reduce`, with its bits."""
        return None

    def all_reduce_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """`Group.all_reduce`, + bias [width] if there is one, then `add_rms_norm`: their bits.

        x and residual [tokens, width] of one dtype, weight [width] of that or fp32.
        """
        return None

    def max(self, x: Tensor) -> Tensor | None:
        """`Group.max`."""
        return None

    def check(self) -> None:
        """Raise PeerLost if a collective that the device has run waited for a rank in vain."""

    @contextmanager
    def checked(self) -> Iterator[None]:
        """`check` behind a block, also one that fails: wrong numbers follow from a lost peer."""
        try:
            yield
        finally:
            self.check()

    def close(self) -> None:
        """Let go of memory. Nothing that was captured may run any more."""
