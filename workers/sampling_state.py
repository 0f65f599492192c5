"""How the tokens of each slot are chosen: on the device as numbers, on the host as kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.ops.transfer import upload_all
from unisono.workers.protocol import SlotSampling, StepPlan

_SEED, _DRAFT_SEED = 1, 4
"""Columns of the whole numbers of a slot, as `_wholes_of` has them."""
_DRAFT_STREAM = 1 << 62
"""Tells the seeds of drafts that are judged by rejection from those of the tokens that take their
place: neither may know of the other's noise."""


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
        """Slots that need more than logits and noise, or want more than tokens."""
        self._drawing: set[int] = set()
        self._rejecting: set[int] = set()
        self._reals = torch.zeros((num_slots + 1, 6), dtype=torch.float64, device=device)
        self._wholes = torch.zeros((num_slots + 1, 5), dtype=torch.int64, device=device)

    def open(self, slots: Sequence[int], recipes: Sequence[SlotSampling]) -> None:
        """Choose the tokens of slots[i] by recipes[i] from now on."""
        changed: dict[int, SlotSampling] = {}
        for slot, recipe in zip(slots, recipes, strict=True):
            if not (recipe.is_plain and self._slots[slot].is_plain):
                changed[slot] = recipe
            self._note(slot, recipe)
        if not changed:
            return
        reals = [number for recipe in changed.values() for number in _reals_of(recipe)]
        wholes = [number for recipe in changed.values() for number in _wholes_of(recipe)]
        at, bits, numbers = upload_all(self._device, [*changed], _bits(reals), wholes)
        self._reals[at] = bits.view(torch.float64).view(len(changed), -1)
        self._wholes[at] = numbers.view(len(changed), -1)

    def of(self, slot: int) -> SlotSampling:
        """How the tokens of `slot` are chosen."""
        return self._slots[slot]

    def want_more_than_tokens(self, slots: Iterable[int]) -> bool:
        """Whether log-probabilities or checksums come with tokens of these slots."""
        kinds = (self._slots[slot] for slot in self._demanding.intersection(slots))
        return any(kind.logprobs >= 0 or kind.checksums for kind in kinds)

    def checksum_rows(self, slots: Sequence[int]) -> list[int]:
        """Those of the rows with these slots whose logits are to be summed up."""
        return _where(self._slots[slot].checksums > 0 for slot in slots)

    def want_only_tokens(self, slots: Sequence[int]) -> bool:
        """Whether rows of these slots need logits and noise alone, and want tokens alone."""
        return self._demanding.isdisjoint(slots)

    def draw(self, slots: Sequence[int]) -> bool:
        """Whether noise has a part in any row of these slots."""
        return not self._drawing.isdisjoint(slots)

    def reject(self, slots: Sequence[int]) -> bool:
        """Whether drafts of any of these slots are judged by rejection sampling."""
        return not self._rejecting.isdisjoint(slots)

    def reject_drafts(self, plan: StepPlan) -> bool:
        """Whether there are such drafts in `plan`, to be judged or to be made."""
        has_drafts = plan.num_proposals > 0 or any(plan.rows.drafts)
        return has_drafts and self.reject(plan.rows.slot)

    def draws(self, slots: Tensor, *, drafting: bool = False) -> tuple[Tensor, Tensor]:
        """Temperature [n] fp64, 0 for greedy ones, and seed [n] int64 of slots [n]. `drafting`:
        what is drawn are drafts."""
        return self._reals[slots, 0], self._wholes[slots, _DRAFT_SEED if drafting else _SEED]

    def rejecting(self, slots: Tensor) -> Tensor:
        """Whether drafts of slots [n] are judged by rejection sampling, [n] bool."""
        return self._wholes[slots, _SEED] != self._wholes[slots, _DRAFT_SEED]

    def rows(
        self,
        slots: Sequence[int],
        positions: Tensor,
        token_ids: Tensor,
        *,
        drafting: bool = False,
    ) -> SamplingRows | None:
        """The rows that are not plain where row i gives `slots[i]` its token at positions[i].

        token_ids [slots, length] are the slot table's. None: every row is plain. `drafting`: what
        is given are drafts.
        """
        kinds = [self._slots[slot] for slot in slots]
        if all(kind.is_plain for kind in kinds):
            return None
        index, penalized, biased, whole, filtered, bias_rows, sources, bias_ids, bits = upload_all(
            self._device,
            slots,
            _where(kind.is_penalized for kind in kinds),
            _where(kind.is_biased for kind in kinds),
            _where(not kind.is_greedy and not kind.is_filtered for kind in kinds),
            _where(not kind.is_greedy and kind.is_filtered for kind in kinds),
            *_biases(kinds),
        )
        temperature, top_p, min_p, repetition, presence, frequency = self._reals[index].unbind(1)
        top_k, seeds, num_prompt, on_time, draft_seeds = self._wholes[index].unbind(1)
        bias = bits.view(torch.float64)
        # Ids that may not come yet are barred where it is early, and left alone elsewhere.
        bias = bias.masked_fill((bias == -math.inf) & (positions >= on_time)[sources], 0.0)
        return SamplingRows(
            penalized=penalized,
            biased=biased,
            whole=whole,
            filtered=filtered,
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
            seeds=draft_seeds if drafting else seeds,
            num_prompt=num_prompt,
        )

    def _note(self, slot: int, sampling: SlotSampling) -> None:
        """Keep what the host asks of slots."""
        self._slots[slot] = sampling
        for kinds in (self._demanding, self._drawing, self._rejecting):
            kinds.discard(slot)
        if not sampling.needs_noise_only or sampling.logprobs >= 0 or sampling.checksums:
            self._demanding.add(slot)
        if not sampling.is_greedy:
            self._drawing.add(slot)
        if sampling.rejects:
            self._rejecting.add(slot)


def _reals_of(sampling: SlotSampling) -> tuple[float, ...]:
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )


def _wholes_of(sampling: SlotSampling) -> tuple[int, ...]:
    return (
        sampling.top_k,
        sampling.seed,
        sampling.num_prompt_tokens,
        sampling.num_prompt_tokens + sampling.min_tokens,
        sampling.seed ^ _DRAFT_STREAM if sampling.rejects else sampling.seed,
    )


def _biases(kinds: Sequence[SlotSampling]) -> tuple[list[int], list[int], list[int], Tensor]:
    """What is added to which logit: the row counted among the biased ones, and among all, the id,
    and the bits of the value. Late ids are barred, as if it were early everywhere."""
    rows, sources, ids, values = [], [], [], []
    biased = [row for row, kind in enumerate(kinds) if kind.is_biased]
    for number, row in enumerate(biased):
        entries = [*kinds[row].bias, *((late, -math.inf) for late in kinds[row].late_ids)]
        rows += [number] * len(entries)
        sources += [row] * len(entries)
        ids += [token_id for token_id, _ in entries]
        values += [value for _, value in entries]
    return rows, sources, ids, _bits(values)


def _bits(reals: Sequence[float]) -> Tensor:
    """Numbers of fp64 as whole ones, to travel among such."""
    return torch.tensor(reals, dtype=torch.float64).view(torch.int64)


def _where(flags: Iterable[bool]) -> list[int]:
    return [row for row, flag in enumerate(flags) if flag]
