"""The ends of a step with drafts, row by row: out of the slot table and back into it.

A place of a row that is left over has token 0, position 0 and the last slot of block 0.
"""

import torch
from torch import Tensor

from unisono.ops.reference.sampling import unpack_keys


def expand_drafts(
    slots: Tensor,
    drafts: Tensor,
    token_table: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    width: int,
    page: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and KV slots [rows, width] of the newest token of each of `slots` [rows]
    and the `drafts` [rows] behind it.

    token_table [slots, length], lengths [slots], block_table [slots, blocks], all int64.
    """
    token_ids, positions, mapping = (slots.new_zeros((len(slots), width)) for _ in range(3))
    mapping += page - 1
    for row, (slot, count) in enumerate(zip(slots.tolist(), drafts.tolist(), strict=True)):
        for place in range(1 + count):
            at = int(lengths[slot]) - 1 + place
            token_ids[row, place], positions[row, place] = token_table[slot, at], at
            mapping[row, place] = block_table[slot, at // page] * page + at % page
    return token_ids, positions, mapping


def settle_drafts(
    keys: Tensor,
    slots: Tensor,
    drafts: Tensor,
    token_table: Tensor,
    lengths: Tensor,
    num_pending: Tensor,
) -> tuple[list[list[int]], list[list[int]]]:
    """Append to each slot the tokens that `keys` [rows, width] name, up to the first behind a wrong
    draft; return these, and the tokens behind all used places of each row.

    A row with a NaN returns none. Slot 0 is scratch and stays as it is.
    """
    chosen, is_nan = unpack_keys(keys)
    answers, following = [], []
    for row, (slot, count) in enumerate(zip(slots.tolist(), drafts.tolist(), strict=True)):
        length, tokens = int(lengths[slot]), chosen[row, : count + 1].tolist()
        drafted = token_table[slot, length : length + count + 1].tolist()
        right = [token == draft for token, draft in zip(tokens, drafted[:count], strict=False)]
        kept = 1 + (right.index(False) if False in right else count)
        following.append([*tokens[:kept], *drafted[kept:]])
        answers.append([] if bool(is_nan[row, : count + 1].any()) else tokens[:kept])
        if slot:
            token_table[slot, length : length + kept] = torch.tensor(tokens[:kept])
            lengths[slot] = length + kept
            num_pending[slot] = kept if count else 0
    return answers, following
