"""How ranks come to one answer before there is anything but a store between them."""

from __future__ import annotations

import torch.distributed as dist


class Agreement:
    """What all ranks say to one question after another, over the store."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("symmetric", store)
        self._rank, self._size = rank, size
        self._number = 0

    def exchange(self, text: str) -> list[str]:
        """Give `text`, get that of every rank."""
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", text)
        return [self._store.get(f"{self._number}/{rank}").decode() for rank in range(self._size)]

    def on(self, fault: str) -> str:
        """The first fault of any rank, with its number; "" if there is none."""
        faults = self.exchange(fault)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(faults) if text), "")
