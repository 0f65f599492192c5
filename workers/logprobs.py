"""Log-probabilities of a step: which logits they need, in pieces, and how they travel."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from unisono.workers.protocol import Rows, int32s, logprob_width
from unisono.workers.sampler import Sampler
from unisono.workers.slot_table import SlotTable

PIECE_ROWS = 64
"""Logits rows at a time: with 150,000 ids 64 of them take 40 MB and ten times that in between; all
of a long prompt would take many GB."""


def prompt_logprobs(
    rows: Rows,
    slots: SlotTable,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    sampler: Sampler,
) -> array[int]:
    """Return what `rows` say of the prompts of slots that want it, as `StepResult.logprobs` does.

    hidden [T, width] after the final norm, by row. The position before a prompt token predicts
    it; the last one predicts the first token of the answer and is left out.
    """
    records = int32s()
    first = 0
    for slot, start, count in zip(rows.slot, rows.start, rows.count, strict=True):
        kind = slots.sampling.of(slot)
        wanted = min(count, kind.num_prompt_tokens - 1 - start)
        if kind.prompt_logprobs >= 0:
            for begin, end in _pieces(wanted):
                logits = logits_of(hidden[first + begin : first + end])
                token_ids = slots.token_ids[slot, start + begin + 1 : start + end + 1]
                records += _raw(sampler.logprobs(logits, token_ids, kind.prompt_logprobs))
        first += count
    return records


def token_logprobs(
    row_slots: Sequence[int],
    slots: SlotTable,
    logits: Tensor,
    token_ids: Tensor,
    sampler: Sampler,
) -> array[int]:
    """Return the same of the sampled token_ids [S] whose logits are [S, this rank's rows].

    Row i belongs to slot `row_slots[i]`; rows whose slots do not want it are left out.
    """
    wanted = [slots.sampling.of(slot).logprobs for slot in row_slots]
    chosen = [row for row, num_top in enumerate(wanted) if num_top >= 0]
    records = int32s()
    for begin, end in _pieces(len(chosen)):
        piece = chosen[begin:end]
        at = torch.tensor(piece, dtype=torch.int64).to(logits.device)
        most = max(wanted[row] for row in piece)
        raw = sampler.logprobs(logits[at], token_ids[at], most).cpu()
        for row, record in zip(piece, raw, strict=True):
            # The likeliest ids come last: a prefix is the record with fewer of them.
            records += _raw(record[: logprob_width(wanted[row])])
    return records


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, PIECE_ROWS):
        yield begin, min(begin + PIECE_ROWS, count)


def _raw(records: Tensor) -> array[int]:
    return array("i", records.flatten().tolist())
