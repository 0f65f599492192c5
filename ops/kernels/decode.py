"""The two ends of a decode step, out of the slot table and back into it, one kernel each.

Between them nothing needs the host: `expand_rows` reads what a slot is at, `advance_rows` writes
what became of it. A slot that holds as many tokens as it may has ended: its row is one of slot 0,
which is scratch, and answers nothing. Reference: `ops/reference/decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.kernels.overlap import begin, overlap_options
from unisono.ops.reference.draft_plan import Table

_BLOCK = 128
_ID_BITS = tl.constexpr(31)
_ID_MASK = tl.constexpr((1 << 31) - 1)
_NAN_BITS = tl.constexpr(0x7FFF_FFFF)


def expand_rows(
    slots: Tensor,
    table: Table,
    page: int,
    num_splits: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    records: Tensor,
) -> None:
    """Write the inputs of a step in which row i computes the newest token of slots[i].

    slots [rows] int64. Out: token_ids, positions, slot_mapping [rows] int64, and records [5, rows]
    int32 as `ops/kernels/attention.py` wants them, with `num_splits` partials a row.
    """
    rows = slots.shape[0]
    _expand_kernel[(blocks_of(rows, _BLOCK),)](
        slots,
        table.token_ids,
        table.lengths,
        table.limits,
        table.block_table,
        token_ids,
        positions,
        slot_mapping,
        records,
        rows,
        table.token_ids.stride(0),
        table.block_table.stride(0),
        num_splits,
        PAGE=page,
        BLOCK=_BLOCK,
        **overlap_options(slots.device),
    )


def advance_rows(keys: Tensor, slots: Tensor, table: Table) -> Tensor:
    """Give slots[i] the token that keys[i] names; return how many each row answers and the token,
    [rows, 2] int64: `settle_drafts` where there are no drafts, and nothing is ever pending."""
    rows = slots.shape[0]
    answers = slots.new_empty((rows, 2))
    _advance_kernel[(blocks_of(rows, _BLOCK),)](
        keys,
        slots,
        table.token_ids,
        table.lengths,
        table.limits,
        table.stop_ids,
        answers,
        rows,
        table.token_ids.stride(0),
        STOPS=table.stop_ids.shape[1],
        BLOCK=_BLOCK,
        **overlap_options(slots.device),
    )
    return answers


@launchable
@triton.jit
def _expand_kernel(
    slots_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_tokens_ptr: tl.tensor,
    out_positions_ptr: tl.tensor,
    out_mapping_ptr: tl.tensor,
    records_ptr: tl.tensor,
    num_rows: tl.tensor,
    tokens_stride: tl.tensor,
    blocks_stride: tl.tensor,
    num_splits: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    length = tl.load(lengths_ptr + slot, mask=is_row, other=1)
    goes_on = length < tl.load(limits_ptr + slot, mask=is_row, other=2)
    slot, position = tl.where(goes_on, slot, 0), tl.where(goes_on, length - 1, 0)
    token = tl.load(tokens_ptr + slot * tokens_stride + position, mask=is_row, other=0)
    block = tl.load(blocks_ptr + slot * blocks_stride + position // PAGE, mask=is_row, other=0)
    tl.store(out_tokens_ptr + row, token, mask=is_row)
    tl.store(out_positions_ptr + row, position, mask=is_row)
    tl.store(out_mapping_ptr + row, block * PAGE + position % PAGE, mask=is_row)
    tl.store(records_ptr + row, slot.to(tl.int32), mask=is_row)
    tl.store(records_ptr + num_rows + row, row, mask=is_row)
    tl.store(records_ptr + 2 * num_rows + row, position.to(tl.int32), mask=is_row)
    tl.store(records_ptr + 3 * num_rows + row, row * 0 + 1, mask=is_row)
    tl.store(records_ptr + 4 * num_rows + row, row * num_splits, mask=is_row)


@launchable
@triton.jit
def _advance_kernel(
    keys_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    stops_ptr: tl.tensor,
    answers_ptr: tl.tensor,
    num_rows: tl.tensor,
    tokens_stride: tl.tensor,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    key = tl.load(keys_ptr + row, mask=is_row, other=0)
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    token = _ID_MASK - (key & _ID_MASK)
    length = tl.load(lengths_ptr + slot, mask=is_row, other=1)
    goes_on = length < tl.load(limits_ptr + slot, mask=is_row, other=2)
    is_live = is_row & goes_on & (slot != 0)
    is_stop = is_live & (slot < 0)  # none
    for number in tl.static_range(STOPS):
        stop = tl.load(stops_ptr + slot * STOPS + number, mask=is_live, other=-1)
        is_stop = is_stop | (is_live & (token == stop))
    tl.store(tokens_ptr + slot * tokens_stride + length, token, mask=is_live)
    tl.store(lengths_ptr + slot, length + 1, mask=is_live)
    tl.store(limits_ptr + slot, length + 1, mask=is_stop)
    is_nan = (key >> _ID_BITS) == _NAN_BITS
    count = tl.where(goes_on, tl.where(is_nan, -1, 1), 0)
    tl.store(answers_ptr + row * 2, count.to(tl.int64), mask=is_row)
    tl.store(answers_ptr + row * 2 + 1, token, mask=is_row)
