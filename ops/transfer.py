"""Whole numbers to a device and back while nobody waits.

Both ways lead through pinned memory of torch's own pool. What is given back to the pool is handed
out again only once the copies that were started from it, or to it, are over: so numbers on their
way need no owner, however many steps are in flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 2
"""Numbers of 8 bytes that kernels load at a time: they are compiled anew for other addresses."""
_FILLINGS = [torch.zeros(count, dtype=torch.int64) for count in range(_ALIGNED)]
_DTYPES = {"i": torch.int32, "q": torch.int64}


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Start the copy of `numbers` to `device`, if they are not there."""
    if numbers.device.type == device.type:
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def upload_all(device: torch.device, *lists: Sequence[int] | Tensor) -> list[Tensor]:
    """Start one copy of all `lists` of whole numbers, which lie on the host.

    Returns an int64 tensor for each.
    """
    columns, places, begin = [_FILLINGS[0]], [], 0
    for each in lists:
        column = on_host(each)
        end = begin + column.numel()
        places.append(slice(begin, end))
        columns += column, _FILLINGS[-end % _ALIGNED]
        begin = end + -end % _ALIGNED
    packed = torch.empty(begin, dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat(columns, out=packed)
    there = packed.to(device, non_blocking=True)
    return [there[place] for place in places]


class Result:
    """Numbers [n] int64 on their way to the host, as they are at this point of a device's work."""

    def __init__(self, numbers: Tensor) -> None:
        on_gpu = numbers.is_cuda
        self._numbers = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event() if on_gpu else None
        if self._event is not None:
            self._event.record()

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        """Wait, and return them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers


class Answers:
    """The answers of a step's rows on their way to the host: numbers [rows, 1 + most] int64, how
    many tokens each row has, or -1 for a NaN, and then these."""

    def __init__(self, numbers: Tensor) -> None:
        self._each = numbers.shape[1]
        self._result = Result(numbers.flatten())

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self._result.is_ready()

    @property
    def counts(self) -> list[int]:
        """How many tokens each row has; empty if that is one and could not be more. Waits."""
        counts = self._result.read()[:: self._each]
        return [] if self._each == 2 and 0 not in counts else counts

    def read(self) -> list[int]:
        """Wait, and return the tokens of all rows.

        Raises FloatingPointError if a row's logits held a NaN, or those of its drafts.
        """
        numbers, each = self._result.read(), self._each
        counts = numbers[::each]
        if bad := [row for row, count in enumerate(counts) if count < 0]:
            raise FloatingPointError(f"the logits of sampling rows {bad} hold NaN")
        if each == 2 and 0 not in counts:
            return numbers[1::2]
        begins = range(1, len(numbers), each)
        rows = zip(begins, counts, strict=True)
        return [token for at, count in rows for token in numbers[at : at + count]]


def on_host(numbers: Sequence[int] | Tensor) -> Tensor:
    """Whole numbers as a tensor of int64, which may lie where they are."""
    if isinstance(numbers, Tensor):
        return numbers
    if not isinstance(numbers, array):
        numbers = array("q", numbers)
    if not numbers:
        return _FILLINGS[0]
    # Hundreds of times as fast as number by number.
    return torch.frombuffer(numbers, dtype=_DTYPES[numbers.typecode]).to(torch.int64)


def runs(firsts: Tensor, counts: Tensor, total: int) -> Tensor:
    """On the host, one after the other: of each run counts[i] numbers that begin with firsts[i];
    `total` of them."""
    shifts = firsts + counts - counts.cumsum(0)
    return shifts.repeat_interleave(counts, output_size=total).add_(torch.arange(total))
