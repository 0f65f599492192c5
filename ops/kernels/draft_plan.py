"""The ends of a step with drafts, out of the slot table and back into it, one kernel each.

Every row has `width` places in the step: its slot's newest token, then its drafts. A place that has
neither computes nothing that counts: it reads token 0 at position 0 and writes its key and value to
the last place of block 0, which is scratch. So do rows of slot 0, scratch too, while drafts are
made: a request that has no block yet for its drafts has them in block 0, from the first place on.
A slot that holds as many tokens as it may has ended: its row is one of slot 0 without drafts, which
answers nothing. Nothing here needs the host. Reference: `ops/reference/draft_plan.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.reference.draft_plan import Settled, Table

_BLOCK = 32
"""Rows of a program, which is one warp: a row is one thread's."""
_ID_BITS = tl.constexpr(31)
_ID_MASK = tl.constexpr((1 << 31) - 1)
_NAN_BITS = tl.constexpr(0x7FFF_FFFF)
_VARYING = ["num_rows", "tokens_stride", "blocks_stride", "num_splits"]


class Places(NamedTuple):
    """Inputs of a step, all made on the device."""

    token_ids: Tensor  # [rows * width] int64
    positions: Tensor  # [rows * width] int64
    slot_mapping: Tensor  # [rows * width] int64
    attention: Tensor
    """[5, rows] int32, as `ops/kernels/attention.py` says."""
    delta: Tensor
    """[6, rows] int32, as `ops/kernels/delta_plan.py` says."""
    states: Tensor  # [rows] int64


def expand_drafts(
    slots: Tensor, drafts: Tensor, table: Table, width: int, page: int, num_splits: int
) -> Places:
    """Make the inputs of a step in which row i computes the newest token of slots[i] and drafts[i]
    tokens that lie behind it.

    slots, drafts [rows] int64, drafts below `width`; attention has `num_splits` partials a row.
    A row with drafts holds back, and what is pending of its slot comes first.
    """
    rows, like = slots.shape[0], slots
    token_ids, positions, slot_mapping = (like.new_empty(rows * width) for _ in range(3))
    attention, delta = (like.new_empty((count, rows), dtype=torch.int32) for count in (5, 6))
    states = torch.empty_like(slots)
    _expand_kernel[(blocks_of(rows, _BLOCK),)](
        *(slots, drafts, table.token_ids, table.lengths, table.limits, table.block_table),
        *(table.num_pending, table.states),
        *(token_ids, positions, slot_mapping, attention, delta, states),
        *(rows, table.token_ids.stride(0), table.block_table.stride(0), num_splits),
        WIDTH=width,
        PAGE=page,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return Places(token_ids, positions, slot_mapping, attention, delta, states)


def settle_drafts(keys: Tensor, slots: Tensor, drafts: Tensor, table: Table, width: int) -> Settled:
    """As the reference, with a row a thread."""
    rows = slots.shape[0]
    answers = slots.new_empty((rows, 1 + width))
    following, last = slots.new_empty(rows * width), torch.empty_like(slots)
    _settle_kernel[(blocks_of(rows, _BLOCK),)](
        *(keys, slots, drafts, table.token_ids, table.lengths, table.num_pending),
        *(table.limits, table.stop_ids),
        *(answers, following, last, rows, table.token_ids.stride(0)),
        WIDTH=width,
        STOPS=table.stop_ids.shape[1],
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return Settled(answers, following, last)


def place_drafts(
    keys: Tensor,
    slots: Tensor,
    answers: Tensor,
    table: Table,
    number: int,
    farthest: int,
    page: int,
    num_splits: int,
) -> Places:
    """Write draft `number` of each slot, from 0 on, behind what it holds; return the step, of one
    place a row, that drafts from it: at the position before it, `farthest` at the most.

    keys, slots [rows] int64. A row whose winning logit was NaN has -1 `answers` from now on, unless
    its slot has ended: nothing is drafted for those. Of the result, `delta` and `states` are empty.
    """
    rows = slots.shape[0]
    token_ids, positions, slot_mapping = (torch.empty_like(slots) for _ in range(3))
    attention = slots.new_empty((5, rows), dtype=torch.int32)
    _place_kernel[(blocks_of(rows, _BLOCK),)](
        *(keys, slots, table.token_ids, table.lengths, table.limits, table.block_table),
        *(token_ids, positions, slot_mapping, attention, answers),
        *(rows, table.token_ids.stride(0), table.block_table.stride(0), num_splits),
        *(number, farthest, answers.stride(0)),
        PAGE=page,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    nothing = slots.new_empty(0)
    return Places(token_ids, positions, slot_mapping, attention, nothing, nothing)


@launchable
@triton.jit(do_not_specialize=_VARYING)
def _expand_kernel(
    slots_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    states_ptr: tl.tensor,
    out_tokens_ptr: tl.tensor,
    out_positions_ptr: tl.tensor,
    out_mapping_ptr: tl.tensor,
    attention_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    out_states_ptr: tl.tensor,
    num_rows: tl.tensor,
    tokens_stride: tl.tensor,
    blocks_stride: tl.tensor,
    num_splits: tl.tensor,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    drafts = tl.load(drafts_ptr + row, mask=is_row, other=0)
    length = tl.load(lengths_ptr + slot, mask=is_row, other=1)
    goes_on = length < tl.load(limits_ptr + slot, mask=is_row, other=2)
    slot, drafts = tl.where(goes_on, slot, 0), tl.where(goes_on, drafts, 0)
    start = tl.where(goes_on, length - 1, 0)
    for place in tl.static_range(WIDTH):
        is_used = is_row & (place <= drafts)
        position = tl.where(is_used, start + place, 0)
        token = tl.load(tokens_ptr + slot * tokens_stride + position, mask=is_used, other=0)
        block_ptr = blocks_ptr + slot * blocks_stride + position // PAGE
        block = tl.load(block_ptr, mask=is_used, other=0)
        kept_at = tl.where(is_used, block * PAGE + position % PAGE, PAGE - 1)
        at = row * WIDTH + place
        tl.store(out_tokens_ptr + at, token, mask=is_row)
        tl.store(out_positions_ptr + at, position, mask=is_row)
        tl.store(out_mapping_ptr + at, kept_at, mask=is_row)
    count = (drafts + 1).to(tl.int32)
    tl.store(attention_ptr + row, slot.to(tl.int32), mask=is_row)
    tl.store(attention_ptr + num_rows + row, row * WIDTH, mask=is_row)
    tl.store(attention_ptr + 2 * num_rows + row, start.to(tl.int32), mask=is_row)
    tl.store(attention_ptr + 3 * num_rows + row, count, mask=is_row)
    tl.store(attention_ptr + 4 * num_rows + row, row * num_splits, mask=is_row)
    pending = tl.load(pending_ptr + slot, mask=is_row, other=0).to(tl.int32)
    tl.store(delta_ptr + row, row * WIDTH, mask=is_row)
    tl.store(delta_ptr + num_rows + row, start.to(tl.int32), mask=is_row)
    tl.store(delta_ptr + 2 * num_rows + row, count, mask=is_row)
    tl.store(delta_ptr + 3 * num_rows + row, row * 0, mask=is_row)
    tl.store(delta_ptr + 4 * num_rows + row, pending, mask=is_row)
    tl.store(delta_ptr + 5 * num_rows + row, (drafts > 0).to(tl.int32), mask=is_row)
    state = tl.load(states_ptr + slot, mask=is_row, other=0)
    tl.store(out_states_ptr + row, state, mask=is_row)


@launchable
@triton.jit(do_not_specialize=_VARYING[:2])
def _settle_kernel(
    keys_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    stops_ptr: tl.tensor,
    answers_ptr: tl.tensor,
    following_ptr: tl.tensor,
    last_ptr: tl.tensor,
    num_rows: tl.tensor,
    tokens_stride: tl.tensor,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    drafts = tl.load(drafts_ptr + row, mask=is_row, other=0)
    length = tl.load(lengths_ptr + slot, mask=is_row, other=1)
    limit = tl.load(limits_ptr + slot, mask=is_row, other=2)
    goes_on = length < limit
    slot, drafts = tl.where(goes_on, slot, 0), tl.where(goes_on, drafts, 0)
    is_live = is_row & (slot != 0)
    none = is_row & (slot < 0)
    # Before anything is written: so each stop id is loaded once, not once for each place.
    stop_at = drafts * 0 + WIDTH
    for place in tl.static_range(WIDTH):
        key = tl.load(keys_ptr + row * WIDTH + place, mask=is_row & (place <= drafts), other=0)
        is_stop = none
        for number in tl.static_range(STOPS):
            stop = tl.load(stops_ptr + slot * STOPS + number, mask=is_row, other=-1)
            is_stop = is_stop | (_ID_MASK - (key & _ID_MASK) == stop)
        stop_at = tl.where(is_stop, tl.minimum(stop_at, place), stop_at)
    final = tl.minimum(stop_at, limit - length - 1)
    is_right, has_nan, count = is_row, none, drafts * 0
    for place in tl.static_range(WIDTH):
        is_used = is_row & (place <= drafts)
        key = tl.load(keys_ptr + row * WIDTH + place, mask=is_used, other=0)
        token = _ID_MASK - (key & _ID_MASK)
        has_nan = has_nan | (is_used & ((key >> _ID_BITS) == _NAN_BITS))
        token_ptr = tokens_ptr + slot * tokens_stride + length + place
        drafted = tl.load(token_ptr, mask=is_used, other=0)
        is_kept = is_used & is_right
        # Were a row more than one thread's, another might still have to read the draft.
        tl.debug_barrier()
        tl.store(token_ptr, token, mask=is_kept & is_live)
        tl.store(answers_ptr + row * (WIDTH + 1) + 1 + place, token, mask=is_kept)
        behind = tl.where(is_kept, token, drafted)
        tl.store(following_ptr + row * WIDTH + place, behind, mask=is_row)
        count += is_kept.to(tl.int64)
        is_right = is_kept & (place < tl.minimum(drafts, final)) & (token == drafted)
    answered = tl.where(goes_on, tl.where(has_nan, -1, count), 0)
    tl.store(answers_ptr + row * (WIDTH + 1), answered, mask=is_row)
    tl.store(last_ptr + row, row * WIDTH + count - 1, mask=is_row)
    tl.store(lengths_ptr + slot, length + count, mask=is_live)
    tl.store(limits_ptr + slot, length + count, mask=is_live & (stop_at < count))
    tl.store(pending_ptr + slot, tl.where(drafts > 0, count, 0), mask=is_live)


@launchable
@triton.jit(do_not_specialize=[*_VARYING, "number", "farthest", "answers_stride"])
def _place_kernel(
    keys_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_tokens_ptr: tl.tensor,
    out_positions_ptr: tl.tensor,
    out_mapping_ptr: tl.tensor,
    attention_ptr: tl.tensor,
    answers_ptr: tl.tensor,
    num_rows: tl.tensor,
    tokens_stride: tl.tensor,
    blocks_stride: tl.tensor,
    num_splits: tl.tensor,
    number: tl.tensor,
    farthest: tl.tensor,
    answers_stride: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    key = tl.load(keys_ptr + row, mask=is_row, other=0)
    token = _ID_MASK - (key & _ID_MASK)
    length = tl.load(lengths_ptr + slot, mask=is_row, other=1)
    goes_on = length < tl.load(limits_ptr + slot, mask=is_row, other=2)
    slot, behind = tl.where(goes_on, slot, 0), length + number
    is_nan = is_row & goes_on & ((key >> _ID_BITS) == _NAN_BITS)
    tl.store(answers_ptr + row * answers_stride, row.to(tl.int64) * 0 - 1, mask=is_nan)
    is_live = is_row & (slot != 0)
    tl.store(tokens_ptr + slot * tokens_stride + behind, token, mask=is_live)
    position = tl.where(is_live, tl.minimum(behind - 1, farthest), 0)
    block_ptr = blocks_ptr + slot * blocks_stride + position // PAGE
    block = tl.load(block_ptr, mask=is_live, other=0)
    kept_at = tl.where(is_live, block * PAGE + position % PAGE, PAGE - 1)
    tl.store(out_tokens_ptr + row, token, mask=is_row)
    tl.store(out_positions_ptr + row, position, mask=is_row)
    tl.store(out_mapping_ptr + row, kept_at, mask=is_row)
    tl.store(attention_ptr + row, slot.to(tl.int32), mask=is_row)
    tl.store(attention_ptr + num_rows + row, row, mask=is_row)
    tl.store(attention_ptr + 2 * num_rows + row, position.to(tl.int32), mask=is_row)
    tl.store(attention_ptr + 3 * num_rows + row, row * 0 + 1, mask=is_row)
    tl.store(attention_ptr + 4 * num_rows + row, row * num_splits, mask=is_row)
