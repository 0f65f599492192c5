"""The two ends of a decode step, by index: out of the slot table and back into it."""

import torch
from torch import Tensor

from unisono.ops.reference.sampling import unpack_keys


def expand_rows(
    slots: Tensor, token_table: Tensor, lengths: Tensor, block_table: Tensor, page: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and KV slots [rows] of the newest token of each of `slots` [rows].

    token_table [slots, length], lengths [slots], block_table [slots, blocks], all int64.
    """
    positions = lengths[slots] - 1
    block = block_table[slots, torch.div(positions, page, rounding_mode="floor")]
    return token_table[slots, positions], positions, block * page + positions % page


def advance_rows(keys: Tensor, slots: Tensor, token_table: Tensor, lengths: Tensor) -> Tensor:
    """Append the tokens that `keys` [rows] name to their slots; return them, -1 where NaN won.

    Slot 0 is scratch and stays as it is.
    """
    token_ids, is_nan = unpack_keys(keys)
    live = slots != 0
    token_table[slots[live], lengths[slots[live]]] = token_ids[live]
    lengths[slots[live]] += 1
    return torch.where(is_nan, -1, token_ids)
