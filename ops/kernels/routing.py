"""Which experts a token takes, and who takes which expert, on the GPU. Reference:
`ops/reference/experts.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.alignment import row_alignment
from unisono.ops.kernels.launch import blocks_of, launchable, power_of_two

_FEW = 1024
"""Experts up to which one warp takes a row."""
_BLOCK = 64
"""Slots that a program finds a place for."""
_SCAN = 1024
"""Slots that a program looks at at once."""
_MOST_COMPARED = 4096
"""Slots up to which each is compared with all; more are sorted, and looked at so many at once."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Slots (token * chosen + place) in the order of their experts, and cut into tiles."""

    order: Tensor  # [slots] int32
    tiles: Tensor
    """[3, tiles] int32: the expert, its first place in `order`, how many places; 0 where there are
    fewer tiles than there might be."""


def route_experts(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return (weights fp32, ids int64), both [tokens, num_chosen], by ascending id.

    logits [tokens, experts], contiguous. The weights are those of a softmax in fp32 over all
    experts, the `num_chosen` highest (the lower id where they are equal), scaled to sum 1 if
    `renormalise`, rounded to the dtype of `logits` and widened again. A row with a NaN takes the
    first experts, with NaN.
    """
    tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    assert 0 < num_chosen <= num_experts, f"{num_chosen} of {num_experts}"
    shape = (tokens, num_chosen)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    block = power_of_two(num_experts)
    _route_kernel[(tokens,)](
        logits,
        weights,
        ids,
        NUM=num_experts,
        CHOSEN=num_chosen,
        RENORMALISE=renormalise,
        ALIGN=row_alignment(num_experts, logits),
        BLOCK=block,
        num_warps=1 if block <= _FEW else 4,
        enable_fp_fusion=False,
    )
    return weights, ids


def group_by_expert(ids: Tensor, num_experts: int, height: int) -> Groups:
    """Sort the slots of ids [tokens, chosen] by expert, then by number; cut each expert's into
    tiles of `height`. Makes device tensors only, of sizes that follow from that of `ids`."""
    assert ids.is_contiguous()
    slots, device = ids.numel(), ids.device
    num_tiles = min(slots, num_experts + slots // height)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    if slots <= _MOST_COMPARED:
        order = torch.empty(slots, dtype=torch.int32, device=device)
        blocks, scan = blocks_of(slots, _BLOCK), min(_SCAN, power_of_two(slots + 32))
    else:
        order = ids.flatten().sort(stable=True).indices.int()
        blocks, scan = 0, _MOST_COMPARED
    if slots:
        _group_kernel[(blocks + 1,)](
            ids,
            order,
            tiles,
            slots,
            num_tiles,
            NUM=num_experts,
            HEIGHT=height,
            BINS=power_of_two(num_experts + 1),
            BLOCK=_BLOCK,
            SCAN=scan,
            num_warps=4,
        )
    return Groups(order, tiles)


@launchable
@triton.jit(do_not_specialize=["logits_ptr", "weights_ptr", "ids_ptr"])
def _route_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    NUM: tl.constexpr,
    CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    row_ptr = tl.multiple_of(logits_ptr + token * NUM, ALIGN)
    x = tl.load(row_ptr + i, mask=i < NUM, other=float("-inf")).to(tl.float32)
    odds = tl.exp(x - tl.max(x, 0))
    odds = tl.div_rn(odds, odds * 0 + tl.sum(odds, 0))
    # A NaN comes after every number, what was taken after that, and what is no expert last.
    left = tl.where(odds == odds, odds, -1.0)
    left = tl.where(i < NUM, left, -3.0)
    for _ in range(CHOSEN):
        best = tl.min(tl.where(left == tl.max(left, 0), i, BLOCK), 0)
        left = tl.where(i == best, -2.0, left)
    is_chosen = left == -2.0
    weights = tl.where(is_chosen, odds, 0.0)
    if RENORMALISE:
        weights = tl.div_rn(weights, weights * 0 + tl.sum(weights, 0))
    place = token * CHOSEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    rounded = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    tl.store(weights_ptr + place, rounded, mask=is_chosen)
    tl.store(ids_ptr + place, i.to(tl.int64), mask=is_chosen)


@launchable
@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _group_kernel(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_slots: tl.tensor,
    num_tiles: tl.tensor,
    NUM: tl.constexpr,
    HEIGHT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
) -> None:
    """The last program cuts the tiles; the others, if any, find the places of BLOCK slots each."""
    program = tl.program_id(0)
    i = tl.arange(0, SCAN)
    if program < tl.num_programs(0) - 1:
        slot = program * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=NUM).to(tl.int32)
        place = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_slots, SCAN):
            other = start + i
            of = tl.load(ids_ptr + other, mask=other < num_slots, other=NUM).to(tl.int32)
            comes_first = (of[None, :] == expert[:, None]) & (other[None, :] < slot[:, None])
            comes_first |= of[None, :] < expert[:, None]
            place += tl.sum(comes_first.to(tl.int32), 1)
        tl.store(order_ptr + place, slot, mask=slot < num_slots)
    else:
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, num_slots, SCAN):
            other = start + i
            of = tl.load(ids_ptr + other, mask=other < num_slots, other=NUM).to(tl.int32)
            counts += tl.histogram(of, BINS)
        bins = tl.arange(0, BINS)
        counts = tl.where(bins < NUM, counts, 0)
        tiles = (counts + HEIGHT - 1) // HEIGHT
        first = tl.cumsum(counts, 0) - counts
        first_tile = tl.cumsum(tiles, 0) - tiles
        for n in range(tl.max(tiles, 0)):
            out_ptr = tiles_ptr + first_tile + n
            here = n < tiles
            tl.store(out_ptr, bins, mask=here)
            tl.store(out_ptr + num_tiles, first + n * HEIGHT, mask=here)
            length = tl.minimum(counts - n * HEIGHT, HEIGHT)
            tl.store(out_ptr + 2 * num_tiles, length, mask=here)
        for start in range(tl.sum(tiles, 0), num_tiles, SCAN):
            empty = start + i
            tl.store(tiles_ptr + 2 * num_tiles + empty, 0, mask=empty < num_tiles)
