"""The two ends of a decode step, out of the slot table and back into it, one kernel each.

Between them nothing needs the host: `expand_rows` reads what a slot is at, `advance_rows` writes
what became of it. Reference: `ops/reference/decode.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.kernels.overlap import begin, overlap_options

_BLOCK = 128
_ID_BITS = tl.constexpr(31)
_ID_MASK = tl.constexpr((1 << 31) - 1)
_NAN_BITS = tl.constexpr(0x7FFF_FFFF)


def expand_rows(
    slots: Tensor,
    token_table: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    page: int,
    num_splits: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    records: Tensor,
) -> None:
    """Write the inputs of a step in which row i computes the newest token of slots[i].

    slots [rows] int64; token_table [slots, length], lengths [slots] and block_table
    [slots, blocks] int64. Out: token_ids, positions, slot_mapping [rows] int64, and records
    [5, rows] int32 as `ops/kernels/attention.py` wants them, with `num_splits` partials a row.
    """
    rows = slots.shape[0]
    _expand_kernel[(blocks_of(rows, _BLOCK),)](
        slots,
        token_table,
        lengths,
        block_table,
        token_ids,
        positions,
        slot_mapping,
        records,
        rows,
        token_table.stride(0),
        block_table.stride(0),
        num_splits,
        PAGE=page,
        BLOCK=_BLOCK,
        **overlap_options(slots.device),
    )


def advance_rows(keys: Tensor, slots: Tensor, token_table: Tensor, lengths: Tensor) -> Tensor:
    """Give slots[i] the token that keys[i] names; return the tokens [rows] int64.

    keys [rows] int64 as `argmax_keys` makes them. Slot 0 is scratch and stays as it is. A row
    whose winning logit was NaN gives -1.
    """
    rows = slots.shape[0]
    out = torch.empty_like(slots)
    _advance_kernel[(blocks_of(rows, _BLOCK),)](
        keys,
        slots,
        token_table,
        lengths,
        out,
        rows,
        token_table.stride(0),
        BLOCK=_BLOCK,
        **overlap_options(slots.device),
    )
    return out


@launchable
@triton.jit
def _expand_kernel(
    slots_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
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
    position = tl.load(lengths_ptr + slot, mask=is_row, other=1) - 1
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
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    tokens_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    begin(OVERLAPS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    key = tl.load(keys_ptr + row, mask=is_row, other=0)
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    token = _ID_MASK - (key & _ID_MASK)
    is_live = is_row & (slot != 0)
    length = tl.load(lengths_ptr + slot, mask=is_live, other=0)
    tl.store(tokens_ptr + slot * tokens_stride + length, token, mask=is_live)
    tl.store(lengths_ptr + slot, length + 1, mask=is_live)
    is_nan = (key >> _ID_BITS) == _NAN_BITS
    tl.store(out_ptr + row, tl.where(is_nan, -1, token), mask=is_row)
