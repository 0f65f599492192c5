"""Logits after what was said before, on the GPU: penalties, biases, and ids that may not come yet.

Histories and biases name few ids of a vocabulary: all other logits are copied, and counters are
cleared, used and read only where an id is named. These three steps are launches of one kernel,
since each needs what any program of the step before wrote. An id that is named twice has its result
written twice, with the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable

_PIECE = 2048
_BLOCK = 1024
"""Tokens of a history, or biases, of one program."""
_CLEAR, _COUNT, _APPLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_STEPS = (_CLEAR.value, _COUNT.value, _APPLY.value)


def penalize(
    logits: Tensor,
    history: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    first_id: int,
) -> Tensor:
    """Return `logits` [rows, shard] fp32 with the penalties of tokens that came before.

    The contract is the reference's, to the bit. logits and history [rows, length] int64 with unit
    stride in a row; num_prompt and num_tokens [rows] int64 and the three penalties [rows] fp64,
    contiguous. Takes 8 bytes a logit of memory while it runs.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert history.shape[1] < 2 or history.stride(1) == 1
    _check(torch.int64, num_prompt, num_tokens)
    _check(torch.float64, repetition, presence, frequency)
    (rows, shard), length = logits.shape, history.shape[1]
    result = torch.empty((rows, shard), dtype=torch.float32, device=logits.device)
    counters = torch.empty((rows, shard, 2), dtype=torch.int32, device=logits.device)
    _copy_kernel[(rows, blocks_of(shard, _PIECE))](
        logits,
        logits.stride(0),
        presence,
        frequency,
        result,
        shard,
        PIECE=_PIECE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    for step in _STEPS:
        _penalize_kernel[(rows, blocks_of(length, _BLOCK))](
            history,
            history.stride(0),
            length,
            num_prompt,
            num_tokens,
            counters,
            logits,
            logits.stride(0),
            repetition,
            presence,
            frequency,
            result,
            first_id,
            shard,
            STEP=step,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return result


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor, first_id: int) -> Tensor:
    """Return `logits` [rows, shard] fp32 with bias[i] added to id ids[i] of row rows[i].

    The contract is the reference's, to the bit: an id may stand twice in a row, once of them with 0
    or -inf, so that the order of the two cannot matter. logits contiguous; rows and ids [n] int64
    and bias [n] fp64, contiguous. Takes 8 bytes a logit of memory while it runs.
    """
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    _check(torch.int64, rows, ids)
    _check(torch.float64, bias)
    # The reference adds a zero to every other logit, which makes 0.0 of -0.0.
    result = logits + 0.0
    sums = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    for step in _STEPS:
        _bias_kernel[(blocks_of(len(ids), _BLOCK),)](
            rows,
            ids,
            bias,
            len(ids),
            sums,
            logits,
            result,
            first_id,
            logits.shape[1],
            STEP=step,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return result


def _check(dtype: torch.dtype, *tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()


@launchable
@triton.jit
def _copy_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    result_ptr: tl.tensor,
    shard: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """A penalty of no tokens changes at most the sign of a zero, where it is below 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = columns < shard
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0)
    exact = logits.to(tl.float64) - tl.load(frequency_ptr + row) * 0.0
    exact = exact - tl.load(presence_ptr + row) * 0.0
    tl.store(result_ptr + row * shard + columns, exact.to(tl.float32), mask=inside)


@launchable
@triton.jit
def _penalize_kernel(
    history_ptr: tl.tensor,
    history_stride: tl.tensor,
    length: tl.tensor,
    num_prompt_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    result_ptr: tl.tensor,
    first_id: tl.tensor,
    shard: tl.tensor,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token of the history each. Counters: how often answered, how often in the prompt."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    told = (place < length) & (place < tl.load(num_tokens_ptr + row))
    columns = tl.load(history_ptr + row * history_stride + place, mask=told, other=0) - first_id
    here = told & (columns >= 0) & (columns < shard)
    counters = counters_ptr + 2 * (row * shard + columns)
    if STEP == _CLEAR:
        tl.store(counters, 0, mask=here)
        tl.store(counters + 1, 0, mask=here)
    elif STEP == _COUNT:
        is_prompt = (place < tl.load(num_prompt_ptr + row)).to(tl.int32)
        tl.atomic_add(counters + is_prompt, 1, mask=here, sem="relaxed")
    else:
        count = tl.load(counters, mask=here, other=0)
        factor = tl.load(repetition_ptr + row)
        exact = tl.load(logits_ptr + row * row_stride + columns, mask=here, other=0.0)
        exact = exact.to(tl.float64)
        if factor != 1.0:
            exact = tl.where(exact > 0.0, exact / factor, exact * factor)
        exact = exact - tl.load(frequency_ptr + row) * count.to(tl.float64)
        exact = exact - tl.load(presence_ptr + row) * (count > 0).to(tl.float64)
        tl.store(result_ptr + row * shard + columns, exact.to(tl.float32), mask=here)


@launchable
@triton.jit
def _bias_kernel(
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num: tl.tensor,
    sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    result_ptr: tl.tensor,
    first_id: tl.tensor,
    shard: tl.tensor,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(ids_ptr + place, mask=place < num, other=0) - first_id
    here = (place < num) & (columns >= 0) & (columns < shard)
    at = tl.load(rows_ptr + place, mask=here, other=0) * shard + columns
    if STEP == _CLEAR:
        tl.store(sums_ptr + at, 0.0, mask=here)
    elif STEP == _COUNT:
        bias = tl.load(bias_ptr + place, mask=here, other=0.0)
        tl.atomic_add(sums_ptr + at, bias, mask=here, sem="relaxed")
    else:
        exact = tl.load(logits_ptr + at, mask=here, other=0.0).to(tl.float64)
        exact = exact + tl.load(sums_ptr + at, mask=here, other=0.0)
        tl.store(result_ptr + at, exact.to(tl.float32), mask=here)
