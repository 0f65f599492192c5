"""The ends of a step with drafts, row by row: out of the slot table and back into it.

A place of a row that is left over has token 0, position 0 and the last slot of block 0. A slot that
holds as many tokens as it may has ended: its row is one of scratch, slot 0, without drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unisono.ops.reference.sampling import unpack_keys


class Table(NamedTuple):
    """The slot table, all int64. Slot 0 is scratch, never ends and is never written."""

    token_ids: Tensor
    """[slots, length]: what a slot holds, and its drafts behind that."""
    lengths: Tensor
    """[slots]: tokens that each holds."""
    block_table: Tensor
    """[slots, blocks]."""
    num_pending: Tensor
    """[slots]: tokens that the recurrent state of each has yet to take in."""
    states: Tensor
    """[slots]: the number of that state."""
    limits: Tensor
    """[slots]: tokens that each may hold; behind a stop id that is what it holds."""
    stop_ids: Tensor
    """[slots, some]: tokens that each ends with; -1 where there are fewer."""


class Settled(NamedTuple):
    """What became of the drafts of a step."""

    answers: Tensor
    """[rows, 1 + width] int64: how many tokens the row answers, then these; what is in the rest is
    not said. None where the slot had ended, -1 of them where a logit of the row was NaN."""
    following: Tensor
    """[rows * width] int64: the token behind each place, true or only drafted."""
    last: Tensor
    """[rows] int64: the place before the row's newest token."""


def expand_drafts(
    slots: Tensor, drafts: Tensor, table: Table, width: int, page: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and KV slots [rows, width] of the newest token of each of `slots` [rows]
    and the `drafts` [rows] behind it."""
    token_ids, positions, mapping = (slots.new_zeros((len(slots), width)) for _ in range(3))
    mapping += page - 1
    for row, (slot, count) in enumerate(zip(slots.tolist(), drafts.tolist(), strict=True)):
        if table.lengths[slot] >= table.limits[slot]:
            slot, count = 0, 0
        for place in range(1 + count):
            at = int(table.lengths[slot]) - 1 + place
            token_ids[row, place], positions[row, place] = table.token_ids[slot, at], at
            mapping[row, place] = table.block_table[slot, at // page] * page + at % page
    return token_ids, positions, mapping


def settle_drafts(keys: Tensor, slots: Tensor, drafts: Tensor, table: Table, width: int) -> Settled:
    """Give each slot the tokens that `keys` name, up to the first that is a stop id of the slot or
    all that it may hold, or is behind a wrong draft; that included. Its lengths, its limits and
    what is pending follow.

    keys [rows * width] int64 as `argmax_keys` makes them; slots, drafts [rows] int64, drafts below
    `width`, behind the tokens that each slot holds. Waits for nothing.
    """
    places = torch.arange(width, device=keys.device)
    token_ids, is_nan = (each.view(-1, width) for each in unpack_keys(keys))
    lengths, limits = table.lengths[slots], table.limits[slots]
    goes_on = lengths < limits
    slots, drafts = torch.where(goes_on, slots, 0), torch.where(goes_on, drafts, 0)
    is_used = places <= drafts[:, None]
    at = lengths[:, None] + places
    drafted = table.token_ids[slots[:, None], at]
    is_stop = (token_ids[:, :, None] == table.stop_ids[slots][:, None]).any(2)
    is_right = (token_ids == drafted) & (places < drafts[:, None])
    is_right &= ~is_stop & (at + 1 < limits[:, None])
    is_kept = torch.cat((is_used[:, :1], is_right[:, :-1].long().cumprod(1) > 0), dim=1)
    counts = is_kept.sum(1)
    following = torch.where(is_kept, token_ids, torch.where(is_used, drafted, 0))
    is_live = slots != 0
    _write(table.token_ids, (slots[:, None], at), token_ids, is_kept & is_live[:, None])
    _write(table.lengths, (slots,), lengths + counts, is_live)
    _write(table.limits, (slots,), lengths + counts, is_live & (is_stop & is_kept).any(1))
    _write(table.num_pending, (slots,), torch.where(drafts > 0, counts, 0), is_live)
    answered = torch.where((is_nan & is_used).any(1), -1, counts)
    answers = torch.cat((torch.where(goes_on, answered, 0)[:, None], token_ids), dim=1)
    order = torch.arange(len(slots), device=keys.device)
    return Settled(answers, following.flatten(), order * width + counts - 1)


def _write(table: Tensor, at: tuple[Tensor, ...], values: Tensor, where: Tensor) -> None:
    """Write `values` to the places `at` of a table of slots, where that is asked for."""
    table[at] = torch.where(where, values, table[at])
