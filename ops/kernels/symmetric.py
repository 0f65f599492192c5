"""All-reduce over memory that the GPUs of all ranks reach: element = dtype(sum by ascending rank).

Every rank has a block of such memory, laid out alike (ops/symmetric.py). A program is a *lane*: it
exchanges with the programs of the same number on the other ranks and owns its part of the memory,
so that lanes never wait for one another. How many collectives a lane has run, its epoch, is kept on
the device: graphs can be replayed any number of times and mixed with eager calls.

One-shot: a rank pushes 32 bits of its numbers to each peer in a word of 64, whose upper half is the
epoch. A word arrives whole, so that one which carries the epoch carries the numbers: no barrier, no
fence, one way over the link. Two-shot: each rank sums one slice of a lane, then takes the other
slices from its peers; signals with release and acquire of system scope stand between. Its kernels
are in ops/kernels/two_shot.py.

Each part of the memory is there twice and epochs alternate. A rank that writes in epoch e has heard
of epoch e - 1 from every peer, whose kernel of epoch e - 2 was over by then: what is written over
has been read. (A word of exactly 2^32 epochs ago would pass for a new one.)

Waits end after `polls` looks: then a rank that is late is written to the fault word, and the lane
goes on with what it has. Nobody waits again after that. A kernel runs the stages FIRST to LAST of
its exchange: all of them, but where ranks are played one after the other, in tests.

table_ptr [RANKS + 1] int64: the addresses of every rank's memory and of the fault word. state_ptr
int64: whether this rank has given up, then epochs, a kernel's from EPOCHS on. ops/device_time.py
knows them by "all_reduce".
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.ops.kernels.launch import launchable
from unisono.ops.kernels.norm import load_rows, normalised


@launchable
@triton.jit(do_not_specialize=["rank", "polls"])
def one_shot_all_reduce_kernel(
    x_ptr: tl.tensor,
    total_ptr: tl.tensor,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rank: tl.tensor,
    polls: tl.tensor,
    num_words: tl.tensor,
    RANKS: tl.constexpr,
    EPOCHS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """`num_words` words of 32 bits, BLOCK to a lane, on 16 bytes."""
    dtype = total_ptr.dtype.element_ty
    lane = tl.program_id(0)
    epoch = tl.load(state_ptr + EPOCHS + lane) + 1
    columns = tl.arange(0, BLOCK)
    at = lane * BLOCK + columns
    inside = at < num_words
    region = (lane * 2 + (epoch & 1).to(tl.int32)) * (RANKS * REGION)
    if FIRST == 0:
        words = tl.load(_words_of(x_ptr) + at, mask=inside, other=0)
        _push(table_ptr, region + rank * REGION, words, epoch, columns, inside, RANKS)
    if LAST == 1:
        mine = _region_of(table_ptr, rank, region)
        _await(mine, table_ptr, state_ptr, epoch, columns, inside, polls, RANKS, REGION)
        low, high = _sum(mine, columns, inside, dtype, RANKS, REGION)
        tl.store(_words_of(total_ptr) + at, _packed(low, high, dtype), mask=inside)
        tl.store(state_ptr + EPOCHS + lane, epoch)


@launchable
@triton.jit(do_not_specialize=["rank", "polls"])
def one_shot_all_reduce_add_rms_norm_kernel(
    x_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    total_ptr: tl.tensor,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rank: tl.tensor,
    polls: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    EPOCHS: tl.constexpr,
    REGION: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """A row to a lane. Rounds where `norm._norm_kernel` rounds, and sums a row as that does."""
    dtype = total_ptr.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    lane = tl.program_id(0)
    epoch = tl.load(state_ptr + EPOCHS + lane) + 1
    columns = tl.arange(0, BLOCK // PER_WORD)
    inside = columns < WIDTH // PER_WORD
    at = lane.to(tl.int64) * (WIDTH // PER_WORD) + columns
    region = (lane * 2 + (epoch & 1).to(tl.int32)) * (RANKS * REGION)
    if FIRST == 0:
        words = tl.load(_words_of(x_ptr) + at, mask=inside, other=0)
        _push(table_ptr, region + rank * REGION, words, epoch, columns, inside, RANKS)
    if LAST == 1:
        # Under way while the peers are waited for.
        residual = tl.load(_words_of(residual_ptr) + at, mask=inside, other=0)
        start = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, 1)
        across = tl.arange(0, BLOCK)[None, :]
        in_row = across < WIDTH
        zero = tl.zeros((1,), tl.int32) + tl.program_id(1)
        weight = load_rows(weight_ptr, zero, across, in_row, ALIGN)
        mine = _region_of(table_ptr, rank, region)
        _await(mine, table_ptr, state_ptr, epoch, columns, inside, polls, RANKS, REGION)
        low, high = _sum(mine, columns, inside, dtype, RANKS, REGION)
        if HAS_BIAS:
            bias = tl.load(_words_of(bias_ptr) + columns, mask=inside, other=0)
            low, high = _rounded_sum(low, high, bias, dtype)
        low, high = _rounded_sum(low, high, residual, dtype)
        tl.store(_words_of(total_ptr) + at, _packed(low, high, dtype), mask=inside)
        # The row is read again in the layout that the order of its sum follows from.
        tl.debug_barrier()
        x = load_rows(total_ptr, start, across, in_row, ALIGN)
        y = normalised(x, eps, WIDTH, weight_ptr.dtype.element_ty) * weight
        tl.store(tl.multiple_of(normed_ptr + start, ALIGN)[:, None] + across, y, mask=in_row)
        tl.store(state_ptr + EPOCHS + lane, epoch)


@launchable
@triton.jit(do_not_specialize=["rank", "polls"])
def one_shot_all_reduce_max_kernel(
    x_ptr: tl.tensor,
    total_ptr: tl.tensor,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rank: tl.tensor,
    polls: tl.tensor,
    num_keys: tl.tensor,
    RANKS: tl.constexpr,
    EPOCHS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """Of int64 numbers, BLOCK to a lane: lower halves first in the region, then upper halves."""
    lane = tl.program_id(0)
    epoch = tl.load(state_ptr + EPOCHS + lane) + 1
    columns = tl.arange(0, 2 * BLOCK)
    at = lane * BLOCK + columns % BLOCK
    inside = at < num_keys
    region = (lane * 2 + (epoch & 1).to(tl.int32)) * (RANKS * REGION)
    if FIRST == 0:
        keys = tl.load(x_ptr + at, mask=inside, other=0)
        words = tl.where(columns < BLOCK, keys, keys >> 32).to(tl.int32)
        _push(table_ptr, region + rank * REGION, words, epoch, columns, inside, RANKS)
    if LAST == 1:
        mine = _region_of(table_ptr, rank, region)
        _await(mine, table_ptr, state_ptr, epoch, columns, inside, polls, RANKS, REGION)
        columns = tl.arange(0, BLOCK)
        at = lane * BLOCK + columns
        inside = at < num_keys
        most = _key(mine, columns, inside, BLOCK)
        for peer in tl.static_range(1, RANKS):
            most = tl.maximum(most, _key(mine + peer * REGION, columns, inside, BLOCK))
        tl.store(total_ptr + at, most, mask=inside)
        tl.store(state_ptr + EPOCHS + lane, epoch)


@triton.jit
def _push(
    table_ptr: tl.tensor,
    offset: tl.tensor,
    words: tl.tensor,
    epoch: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    RANKS: tl.constexpr,
) -> None:
    """Write `words` int32 under the epoch to every rank, this one too, `offset` words behind the
    beginning of its memory."""
    tagged = (epoch << 32) | words.to(tl.uint32, bitcast=True).to(tl.int64)
    _push_from(table_ptr, 0, offset, tagged, columns, inside, RANKS)
    # No store is left for after the wait.
    tl.debug_barrier()


@triton.jit
def _push_from(
    table_ptr: tl.tensor,
    PEER: tl.constexpr,
    offset: tl.tensor,
    tagged: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    RANKS: tl.constexpr,
) -> None:
    """To ranks PEER and up; all addresses are read before the first store, at the same time."""
    theirs = _region_of(table_ptr, PEER, offset)
    if PEER + 1 < RANKS:
        _push_from(table_ptr, PEER + 1, offset, tagged, columns, inside, RANKS)
    tl.store(theirs + columns, tagged, mask=inside)


@triton.jit
def _await(
    mine: tl.tensor,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    epoch: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    polls: tl.tensor,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
) -> None:
    """Look until the words of all ranks carry the epoch, at most `polls` times."""
    left = tl.where(tl.load(state_ptr) == 0, polls, 1)
    num_late = tl.full((), 1, tl.int32)
    while (num_late > 0) & (left > 0):
        late = _late(mine, epoch, columns, inside)
        for peer in tl.static_range(1, RANKS):
            late |= _late(mine + peer * REGION, epoch, columns, inside)
        num_late = tl.max(late, axis=0)
        left -= 1
    if num_late > 0:
        for peer in tl.static_range(RANKS):
            late = _late(mine + peer * REGION, epoch, columns, inside)
            if tl.max(late, axis=0) > 0:
                give_up(table_ptr, state_ptr, peer + 1, RANKS)


@triton.jit
def _late(
    words_ptr: tl.tensor, epoch: tl.tensor, columns: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """1 where a word is not of this epoch, [words] int32."""
    words = tl.load(words_ptr + columns, mask=inside, other=0, volatile=True)
    return (((words >> 32).to(tl.int32) != epoch.to(tl.int32)) & inside).to(tl.int32)


@triton.jit
def give_up(
    table_ptr: tl.tensor, state_ptr: tl.tensor, late: tl.tensor, RANKS: tl.constexpr
) -> None:
    """Tell the host the late rank, counted from 1, and all lanes not to wait any more."""
    tl.store(tl.load(table_ptr + RANKS).to(tl.pointer_type(tl.int64)), late)
    tl.store(state_ptr, 1)


@triton.jit
def _sum(
    mine: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The words of all ranks, summed by ascending rank and rounded: (lower, upper) halves."""
    words = tl.load(mine + columns, mask=inside, other=0, volatile=True)
    low, high = _unpacked(words.to(tl.int32), DTYPE)
    for peer in tl.static_range(1, RANKS):
        words = tl.load(mine + peer * REGION + columns, mask=inside, other=0, volatile=True)
        more_low, more_high = _unpacked(words.to(tl.int32), DTYPE)
        low += more_low
        high += more_high
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)


@triton.jit
def _rounded_sum(
    low: tl.tensor, high: tl.tensor, words: tl.tensor, DTYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    more_low, more_high = _unpacked(words, DTYPE)
    return (low + more_low).to(DTYPE).to(tl.float32), (high + more_high).to(DTYPE).to(tl.float32)


@triton.jit
def _unpacked(words: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """int32 words -> the numbers in their lower and upper halves, in fp32; of fp32 twice the same.

    Little-endian: the lower half comes first in memory.
    """
    if DTYPE.primitive_bitwidth == 32:
        low = words.to(DTYPE, bitcast=True)
        high = low
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _packed(low: tl.tensor, high: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The inverse of `_unpacked`."""
    if DTYPE.primitive_bitwidth == 32:
        words = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | lower
    return words


@triton.jit
def _key(
    words_ptr: tl.tensor, columns: tl.tensor, inside: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """int64 numbers, from the words of their lower halves and, BLOCK further, of their upper."""
    low = tl.load(words_ptr + columns, mask=inside, other=0, volatile=True)
    high = tl.load(words_ptr + BLOCK + columns, mask=inside, other=0, volatile=True)
    return (high << 32) | low.to(tl.uint32).to(tl.int64)


@triton.jit
def _region_of(table_ptr: tl.tensor, rank: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Pointer to the word number `offset` in the memory of `rank`, on 16 bytes."""
    memory = tl.load(table_ptr + rank).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(memory + offset, 16)


@triton.jit
def _words_of(ptr: tl.tensor) -> tl.tensor:
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True)
