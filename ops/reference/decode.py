"""The two ends of a decode step, by index: out of the slot table and back into it."""

import torch
from torch import Tensor

from unisono.ops.reference.draft_plan import Table, expand_drafts, settle_drafts


def expand_rows(slots: Tensor, table: Table, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and KV slots [rows] of the newest token of each of `slots` [rows]; of
    slot 0 where that has ended."""
    places = expand_drafts(slots, torch.zeros_like(slots), table, 1, page)
    token_ids, positions, slot_mapping = (each[:, 0] for each in places)
    return token_ids, positions, slot_mapping


def advance_rows(keys: Tensor, slots: Tensor, table: Table) -> Tensor:
    """Append the tokens that `keys` [rows] name to their slots; return how many each row answers
    and the token, [rows, 2]."""
    return settle_drafts(keys, slots, torch.zeros_like(slots), table, 1).answers
