"""The tensor-parallel group: collectives whose sums have one order on every backend.

all_reduce: element = dtype(sum over ranks, ascending, of fp32(partial)), the same for gloo, NCCL
and symmetric memory (DESIGN: one answer). A group is handed to layers by their constructor;
nothing asks a global for its rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.ops.direct import Direct

# torch 2.13 has a new name for it and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_DIGEST_MASK = (1 << 62) - 1
_KIND = {"all_reduce": 1, "max": 2, "gather": 3}
T = TypeVar("T")


def ordered_sum(parts: Tensor) -> Tensor:
    """Sum parts [ranks, ...] over the ranks, ascending, in fp32; rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class PeerLost(RuntimeError):
    """A collective broke because another rank went away: never the root cause of a failure."""


class Group:
    """`size` ranks that compute one model together; this process is `rank` of them.

    `digest` is a rolling hash over (sequence, collective, number of elements). It is equal on
    every rank after every step, or the ranks have run different collectives. `num_met` counts the
    collectives that this process ran or captured, `met_ns` the nanoseconds that it was in them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        process_group: dist.ProcessGroup | None,
        add_parts: Callable[[Tensor], Tensor] = ordered_sum,
        direct: Direct | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.direct = direct or Direct()
        self.digest = self.num_met = self.met_ns = 0
        self._process_group = process_group
        self._add_parts = add_parts
        self._sequence = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` (any shape, float dtype) over the ranks and return it; `x` is left alone.

        Summed in fp32 by ascending rank and rounded once to the dtype of `x`, so that every rank
        holds the same bits. Raises PeerLost.
        """
        self._note("all_reduce", x.numel())
        if self.size == 1:
            return x
        total = self._met(self.direct.all_reduce(x))
        return self._add_parts(self._gather(x)) if total is None else total

    def all_reduce_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """`all_reduce`, + bias, then `add_rms_norm`, in one kernel and with their bits.

        None, and nothing has happened, where no kernel does it: then on every rank.
        """
        both = self._met(self.direct.all_reduce_add_rms_norm(x, bias, residual, weight, eps))
        if both is not None:
            self._note("all_reduce", x.numel())
        return both

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of the int64 tensor `x` over the ranks."""
        self._note("max", x.numel())
        if self.size == 1:
            return x
        most = self._met(self.direct.max(x))
        return self._gather(x).amax(0) if most is None else most

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks side by side, [rows, sum of widths].

        x [rows, widths[rank]], with the same rows on every rank.
        """
        widest = max(widths)
        self._note("gather", x.shape[0] * widest)
        if self.size == 1:
            return x
        padded = x.new_zeros((x.shape[0], widest))
        padded[:, : x.shape[1]] = x
        parts = self._gather(padded).unbind(0)
        return torch.cat([p[:, :w] for p, w in zip(parts, widths, strict=True)], dim=1)

    @contextmanager
    def recorded(self) -> Iterator[list[int]]:
        """Collect a hash of the collectives of the block, which are captured and not yet run."""
        before = self.digest, self._sequence
        self.digest = self._sequence = 0
        notes: list[int] = []
        try:
            yield notes
        finally:
            notes.append(self.digest)
            self.digest, self._sequence = before

    def replayed(self, notes: Sequence[int]) -> None:
        """Note captured collectives that run now."""
        for note in notes:
            self._sequence += 1
            self.digest = (self.digest * 1_000_003 ^ self._sequence * 8 ^ note) & _DIGEST_MASK

    def _met(self, result: T) -> T:
        self.num_met += result is not None
        return result

    def _gather(self, x: Tensor) -> Tensor:
        """`x` of every rank, [size, ...]."""
        parts = x.new_empty((self.size, *x.shape))
        self._guarded(
            lambda: _all_gather(parts.flatten(0, 1), x.contiguous(), group=self._process_group)
        )
        return parts

    def _guarded(self, collective: Callable[[], object]) -> None:
        began = time.perf_counter_ns()
        try:
            collective()
        except RuntimeError as error:
            raise PeerLost(
                f"collective {self._sequence} failed on rank {self.rank}: {error}"
            ) from error
        self.num_met += 1
        self.met_ns += time.perf_counter_ns() - began

    def _note(self, kind: str, numel: int) -> None:
        self._sequence += 1
        mixed = (self.digest * 1_000_003) ^ (self._sequence * 8 + _KIND[kind]) ^ (numel << 20)
        self.digest = mixed & _DIGEST_MASK


def solo_group() -> Group:
    """The group of a model that is not cut."""
    return Group(0, 1, None)
