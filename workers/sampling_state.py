"""How the tokens of each slot are chosen: on the device as numbers, on the host as kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.workers.protocol import SlotSampling


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The drawing rows among the sampling rows of a step; the others are greedy.

    `whole` and `filtered` [rows] int64 index the sampling rows: those drawn from the whole
    vocabulary, and those drawn from what top-k, top-p and min-p leave. The rest is [S], an entry
    for every sampling row.
    """

    whole: Tensor
    filtered: Tensor
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor


class SamplingState:
    """The `SlotSampling` of every slot. The host knows each one's kind without asking a device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._slots = [SlotSampling()] * (num_slots + 1)
        self._reals = torch.zeros((num_slots + 1, 3), dtype=torch.float64, device=device)
        self._wholes = torch.zeros((num_slots + 1, 2), dtype=torch.int64, device=device)

    def open(self, slot: int, sampling: SlotSampling) -> None:
        """Choose the tokens of `slot` by `sampling` from now on."""
        self._slots[slot] = sampling
        if not sampling.is_greedy:
            reals = (sampling.temperature, sampling.top_p, sampling.min_p)
            self._reals[slot] = torch.tensor(reals, dtype=torch.float64)
            self._wholes[slot] = torch.tensor((sampling.top_k, sampling.seed))

    def rows(self, slots: Sequence[int], positions: Tensor) -> SamplingRows | None:
        """The drawing rows where row i gives `slots[i]` its token at positions[i]; None: none."""
        kinds = [self._slots[slot] for slot in slots]
        if all(kind.is_greedy for kind in kinds):
            return None
        drawn = [row for row, kind in enumerate(kinds) if not kind.is_greedy]
        index = torch.tensor(slots, dtype=torch.int64).to(self._device)
        temperature, top_p, min_p = self._reals[index].unbind(1)
        top_k, seeds = self._wholes[index].unbind(1)
        return SamplingRows(
            self._index(row for row in drawn if not kinds[row].is_filtered),
            self._index(row for row in drawn if kinds[row].is_filtered),
            positions,
            temperature,
            top_p,
            min_p,
            top_k,
            seeds,
        )

    def _index(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor([*rows], dtype=torch.int64).to(self._device)
