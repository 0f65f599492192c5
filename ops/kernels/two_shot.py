"""Two-shot all-reduce over symmetric memory, alone and with the norm behind it.

What lanes, epochs, waits, stages, table_ptr and state_ptr are: ops/kernels/symmetric.py. Numbers
lie in a rank's own memory, and peers read them there. A lane has a slice for each rank. In an epoch

1. a rank writes its numbers of the lane to its memory, and releases the first signal to all;
2. having acquired that of all, it sums its own slice from all memories, writes the sums in place of
   its numbers, and releases the second signal;
3. having acquired that of all, it takes every slice from the memory of its owner.

Why nothing is written over that is still to be read. In step 2: slice r of a memory is read in the
step by rank r alone, and r writes to its own memory alone, so that only the numbers of r in the
memory of r change, each block of them after it was read; peers look at them after the second
signal, when they are sums. In step 1: the numbers of epoch e replace those of epoch e - 2, of which
there was the same half. To be in epoch e, this rank has acquired signals of epoch e - 1 from every
peer. A peer sends those from a later kernel than that of its epoch e - 2, and a kernel begins once
the one before it in the stream is over, whose reads are done then. None of it asks how long slices
are, or which of the kernels here runs in an epoch: both send both signals of a lane once an epoch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.ops.kernels.launch import launchable
from unisono.ops.kernels.norm import load_rows, normalised
from unisono.ops.kernels.symmetric import give_up


@launchable
@triton.jit(do_not_specialize=["rank", "polls"])
def two_shot_all_reduce_kernel(
    x_ptr: tl.tensor,
    total_ptr: tl.tensor,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rank: tl.tensor,
    polls: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    RANKS: tl.constexpr,
    RANKS_OR_MORE: tl.constexpr,
    EPOCHS: tl.constexpr,
    LANES: tl.constexpr,
    SIGNALS: tl.constexpr,
    DATA: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """`count` numbers; of each lane every rank sums one slice of `size`. Signals and numbers are in
    the memory from bytes SIGNALS and DATA on; a lane's region of the latter has REGION bytes."""
    dtype = total_ptr.dtype.element_ty
    lane = tl.program_id(0)
    epoch = tl.load(state_ptr + EPOCHS + lane) + 1
    start = lane * (size * RANKS)
    columns = tl.arange(0, BLOCK)
    region = DATA + (lane * 2 + (epoch & 1).to(tl.int32)).to(tl.int64) * REGION
    mine = _numbers_of(table_ptr, rank, region, dtype)
    first_signals = SIGNALS + lane * (RANKS * 8)
    second_signals = first_signals + LANES * RANKS * 8
    if FIRST == 0:
        _share(x_ptr, mine, start, size * RANKS, count, BLOCK)
        _signal(table_ptr, first_signals, rank, epoch, RANKS, RANKS_OR_MORE)
    if (FIRST <= 1) & (LAST >= 1):
        _meet(table_ptr, state_ptr, first_signals, rank, epoch, polls, RANKS, RANKS_OR_MORE)
        _sum_slice(table_ptr, mine, region, rank, start, size, count, RANKS, BLOCK)
        _signal(table_ptr, second_signals, rank, epoch, RANKS, RANKS_OR_MORE)
    if LAST == 2:
        _meet(table_ptr, state_ptr, second_signals, rank, epoch, polls, RANKS, RANKS_OR_MORE)
        for begin in range(0, size, BLOCK):
            for peer in tl.static_range(RANKS):
                theirs = _numbers_of(table_ptr, peer, region, dtype)
                at = peer * size + begin + columns
                inside = (begin + columns < size) & (start + at < count)
                summed = tl.load(theirs + at, mask=inside, cache_modifier=".cg")
                tl.store(total_ptr + start + at, summed, mask=inside)
        tl.store(state_ptr + EPOCHS + lane, epoch)


@launchable
@triton.jit(do_not_specialize=["rank", "polls", "num_rows", "slice_rows"])
def two_shot_all_reduce_add_rms_norm_kernel(
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
    num_rows: tl.tensor,
    slice_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_OR_MORE: tl.constexpr,
    EPOCHS: tl.constexpr,
    LANES: tl.constexpr,
    SIGNALS: tl.constexpr,
    DATA: tl.constexpr,
    REGION: tl.constexpr,
    ALIGN: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """The same of `num_rows` rows, `slice_rows` to a slice, and every rank makes of all sums what
    `norm._norm_kernel` does: it rounds where that does, and sums a row as that does. Numbers travel
    PIECE at a time to their sums, and ROWS rows at a time to the norm.

    Nothing is written over that is still to be read, as above: the rows of a rank's own slice are
    normed before the second meeting, while peers sum; it wrote their sums itself, and nobody else
    writes there. All rows are read from the memories, of which step 3 writes none.
    """
    dtype = total_ptr.dtype.element_ty
    lane = tl.program_id(0)
    epoch = tl.load(state_ptr + EPOCHS + lane) + 1
    first_row = lane * (slice_rows * RANKS)
    region = DATA + (lane * 2 + (epoch & 1).to(tl.int32)).to(tl.int64) * REGION
    mine = _numbers_of(table_ptr, rank, region, dtype)
    first_signals = SIGNALS + lane * (RANKS * 8)
    second_signals = first_signals + LANES * RANKS * 8
    start, size, count = first_row * WIDTH, slice_rows * WIDTH, num_rows * WIDTH
    if FIRST == 0:
        _share(x_ptr, mine, start, size * RANKS, count, PIECE)
        _signal(table_ptr, first_signals, rank, epoch, RANKS, RANKS_OR_MORE)
    if (FIRST <= 1) & (LAST >= 1):
        _meet(table_ptr, state_ptr, first_signals, rank, epoch, polls, RANKS, RANKS_OR_MORE)
        _sum_slice(table_ptr, mine, region, rank, start, size, count, RANKS, PIECE)
        _signal(table_ptr, second_signals, rank, epoch, RANKS, RANKS_OR_MORE)
    if LAST == 2:
        columns = tl.arange(0, BLOCK)[None, :]
        # Always 0, which the compiler does not know: see `_norm_kernel`.
        zero = tl.zeros((1,), tl.int32) + tl.program_id(1)
        weight = load_rows(weight_ptr, zero, columns, columns < WIDTH, ALIGN)
        # Places of rows count from the own slice on, so that ranks begin with different peers.
        for half in tl.static_range(2):
            if half == 1:
                _meet(
                    table_ptr, state_ptr, second_signals, rank, epoch, polls, RANKS, RANKS_OR_MORE
                )
            end = slice_rows * (RANKS if half == 1 else 1)
            for begin in range(slice_rows * half, end, ROWS):
                places = begin + tl.arange(0, ROWS)
                peers = (rank + places // slice_rows) % RANKS
                of_lane = peers * slice_rows + places % slice_rows
                rows = first_row + of_lane
                inside = ((places < end) & (rows < num_rows))[:, None] & (columns < WIDTH)
                at = rows.to(tl.int64) * WIDTH
                residual = load_rows(residual_ptr, at, columns, inside, ALIGN)
                x = _sums_of(table_ptr, peers, region, of_lane * WIDTH, columns, inside, dtype)
                if HAS_BIAS:
                    bias = load_rows(bias_ptr, zero, columns, columns < WIDTH, ALIGN)
                    x = (x + bias).to(dtype).to(tl.float32)
                x = (x + residual).to(dtype).to(tl.float32)
                tl.store(tl.multiple_of(total_ptr + at, ALIGN)[:, None] + columns, x, mask=inside)
                y = normalised(x, eps, WIDTH, weight_ptr.dtype.element_ty) * weight
                tl.store(tl.multiple_of(normed_ptr + at, ALIGN)[:, None] + columns, y, mask=inside)
        tl.store(state_ptr + EPOCHS + lane, epoch)


@triton.jit
def _share(
    x_ptr: tl.tensor,
    mine: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Step 1: write a lane's `size` numbers, from number `start` of `count` on, to `mine`."""
    columns = tl.arange(0, BLOCK)
    for begin in range(0, size, BLOCK):
        at = begin + columns
        inside = (at < size) & (start + at < count)
        tl.store(mine + at, tl.load(x_ptr + start + at, mask=inside), mask=inside)


@triton.jit
def _sum_slice(
    table_ptr: tl.tensor,
    mine: tl.tensor,
    region: tl.tensor,
    rank: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    count: tl.tensor,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Step 2: sum the slice of `rank`, of `size` numbers, by ascending rank into `mine`."""
    dtype = mine.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    for begin in range(0, size, BLOCK):
        at = rank * size + begin + columns
        inside = (begin + columns < size) & (start + at < count)
        theirs = _numbers_of(table_ptr, 0, region, dtype)
        total = tl.load(theirs + at, mask=inside, cache_modifier=".cg").to(tl.float32)
        for peer in tl.static_range(1, RANKS):
            theirs = _numbers_of(table_ptr, peer, region, dtype)
            total += tl.load(theirs + at, mask=inside, cache_modifier=".cg").to(tl.float32)
        tl.store(mine + at, total.to(dtype), mask=inside)


@triton.jit
def _sums_of(
    table_ptr: tl.tensor,
    ranks: tl.tensor,
    region: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Step 3: rows that begin `start` [rows] numbers behind `region` in the memories of `ranks`
    [rows], in fp32, [rows, block]."""
    memory = tl.load(table_ptr + ranks).to(tl.pointer_type(tl.int8))
    offset = region + start.to(tl.int64) * (DTYPE.primitive_bitwidth // 8)
    row_ptr = tl.multiple_of(memory + offset, 16).to(tl.pointer_type(DTYPE), bitcast=True)
    x = tl.load(row_ptr[:, None] + columns, mask=inside, other=0.0, cache_modifier=".cg")
    return x.to(tl.float32)


@triton.jit
def _signal(
    table_ptr: tl.tensor,
    signals: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    RANKS: tl.constexpr,
    RANKS_OR_MORE: tl.constexpr,
) -> None:
    """Release what this lane has written, to every rank: its signals begin at byte `signals`."""
    # What other threads wrote comes before the release of those that signal.
    tl.debug_barrier()
    peers = tl.arange(0, RANKS_OR_MORE)
    memory = tl.load(table_ptr + peers, mask=peers < RANKS, other=0)
    theirs = (memory + (signals + rank * 8)).to(tl.pointer_type(tl.int64))
    epochs = tl.zeros((RANKS_OR_MORE,), tl.int64) + epoch
    tl.atomic_xchg(theirs, epochs, mask=peers < RANKS, sem="release", scope="sys")


@triton.jit
def _meet(
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    signals: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    polls: tl.tensor,
    RANKS: tl.constexpr,
    RANKS_OR_MORE: tl.constexpr,
) -> None:
    """Acquire what all ranks have released in this epoch; looks at most `polls` times.

    A rank may be one epoch ahead: it has heard of this one from here.
    """
    left = tl.where(tl.load(state_ptr) == 0, polls, 1)
    peers = tl.arange(0, RANKS_OR_MORE)
    memory = tl.load(table_ptr + rank) + signals
    mine = (memory + peers * 8).to(tl.pointer_type(tl.int64))
    nothing = tl.zeros((RANKS_OR_MORE,), tl.int64)
    last_late = tl.full((), 1, tl.int32)
    while (last_late > 0) & (left > 0):
        seen = tl.atomic_add(mine, nothing, mask=peers < RANKS, sem="acquire", scope="sys")
        late = (seen < epoch) & (peers < RANKS)
        last_late = tl.max(tl.where(late, peers + 1, 0), axis=0)
        left -= 1
    if last_late > 0:
        give_up(table_ptr, state_ptr, last_late, RANKS)
    # No thread reads before the acquire of those that look.
    tl.debug_barrier()


@triton.jit
def _numbers_of(
    table_ptr: tl.tensor, rank: tl.tensor, offset: tl.tensor, DTYPE: tl.constexpr
) -> tl.tensor:
    """Pointer to the number at byte `offset` in the memory of `rank`, on 16 bytes."""
    memory = tl.load(table_ptr + rank).to(tl.pointer_type(tl.int8))
    return tl.multiple_of(memory + offset, 16).to(tl.pointer_type(DTYPE), bitcast=True)
