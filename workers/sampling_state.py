"""How the tokens of each slot are chosen: on the device as numbers, on the host as kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.workers.protocol import SlotSampling


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows among the sampling rows of a step that are not plain.

    Four lists of sampling rows, [n] int64 each: `penalized`; `biased`; `whole`, drawn from the
    whole vocabulary; `filtered`, drawn from what top-k, top-p and min-p leave. A row may be in
    several; those in neither of the last two are greedy. `history` [penalized, length] are the
    tokens of the penalized ones. `bias_rows`, `bias_ids` and `bias` [m] say what is added to
    which logit. The rest is [S], an entry for every sampling row.
    """

    penalized: Tensor
    biased: Tensor
    whole: Tensor
    filtered: Tensor
    history: Tensor
    bias_rows: Tensor
    bias_ids: Tensor
    bias: Tensor
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    seeds: Tensor
    num_prompt: Tensor


class SamplingState:
    """The `SlotSampling` of every slot. The host knows each one's kind without asking a device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._slots = [SlotSampling()] * (num_slots + 1)
        self._demanding: set[int] = set()
        self._drawing: set[int] = set()
        """Slots that need more than logits and noise, or want more than tokens."""
        self._reals = torch.zeros((num_slots + 1, 6), dtype=torch.float64, device=device)
        self._wholes = torch.zeros((num_slots + 1, 4), dtype=torch.int64, device=device)

    def open(self, slot: int, sampling: SlotSampling) -> None:
        """Choose the tokens of `slot` by `sampling` from now on."""
        was_plain, self._slots[slot] = self._slots[slot].is_plain, sampling
        self._demanding.discard(slot)
        self._drawing.discard(slot)
        if not sampling.needs_noise_only or sampling.logprobs >= 0 or sampling.checksums:
            self._demanding.add(slot)
        if not sampling.is_greedy:
            self._drawing.add(slot)
        if sampling.is_plain and was_plain:
            return
        reals = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        wholes = (
            sampling.top_k,
            sampling.seed,
            sampling.num_prompt_tokens,
            sampling.num_prompt_tokens + sampling.min_tokens,
        )
        self._reals[slot] = torch.tensor(reals, dtype=torch.float64)
        self._wholes[slot] = torch.tensor(wholes)

    def of(self, slot: int) -> SlotSampling:
        """How the tokens of `slot` are chosen."""
        return self._slots[slot]

    def want_only_tokens(self, slots: Sequence[int]) -> bool:
        """Whether rows of these slots need logits and noise alone, and want tokens alone."""
        return self._demanding.isdisjoint(slots)

    def draw(self, slots: Sequence[int]) -> bool:
        """Whether noise has a part in any row of these slots."""
        return not self._drawing.isdisjoint(slots)

    def draws(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Temperature [n] fp64, 0 for greedy ones, and seed [n] int64 of slots [n]."""
        return self._reals[slots, 0], self._wholes[slots, 1]

    def rows(
        self, slots: Sequence[int], positions: Tensor, token_ids: Tensor
    ) -> SamplingRows | None:
        """The rows that are not plain where row i gives `slots[i]` its token at positions[i].

        token_ids [slots, length] are the slot table's. None: every row is plain.
        """
        kinds = [self._slots[slot] for slot in slots]
        if all(kind.is_plain for kind in kinds):
            return None
        index = self._whole_numbers(slots)
        temperature, top_p, min_p, repetition, presence, frequency = self._reals[index].unbind(1)
        top_k, seeds, num_prompt, on_time = self._wholes[index].unbind(1)
        penalized = self._where(kind.is_penalized for kind in kinds)
        bias_rows, bias_ids, bias = self._biases(kinds, positions < on_time)
        return SamplingRows(
            penalized=penalized,
            biased=self._where(kind.is_biased for kind in kinds),
            whole=self._where(not kind.is_greedy and not kind.is_filtered for kind in kinds),
            filtered=self._where(not kind.is_greedy and kind.is_filtered for kind in kinds),
            history=token_ids[index[penalized]],
            bias_rows=bias_rows,
            bias_ids=bias_ids,
            bias=bias,
            positions=positions,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            top_k=top_k,
            seeds=seeds,
            num_prompt=num_prompt,
        )

    def _biases(
        self, kinds: Sequence[SlotSampling], is_early: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows counted among the biased ones, ids and values; late ids are barred where early."""
        rows, ids, values, sources = [], [], [], []
        biased = [row for row, kind in enumerate(kinds) if kind.is_biased]
        for number, row in enumerate(biased):
            entries = [*kinds[row].bias, *((late, -math.inf) for late in kinds[row].late_ids)]
            rows += [number] * len(entries)
            sources += [row] * len(entries)
            ids += [token_id for token_id, _ in entries]
            values += [value for _, value in entries]
        bias = torch.tensor(values, dtype=torch.float64).to(self._device)
        is_idle = (bias == -math.inf) & ~is_early[self._whole_numbers(sources)]
        bias = torch.where(is_idle, 0.0, bias)
        return self._whole_numbers(rows), self._whole_numbers(ids), bias

    def _where(self, flags: Iterable[bool]) -> Tensor:
        return self._whole_numbers([row for row, flag in enumerate(flags) if flag])

    def _whole_numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)
