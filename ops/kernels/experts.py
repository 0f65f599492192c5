"""A mixture of experts on the GPU: two grouped products and a sum.

The tokens of an expert are cut into tiles, and a program computes a block of outputs for one, so
that a weight is read once for a tile. Products are summed as those of every linear layer are
(`ops/kernels/linear.py`): in order, in fp32, whatever the tile. Each token's experts are then
added up by one program, by ascending id. Reference: `ops/reference/experts.py`.
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import blocks_of, launchable
from unisono.ops.kernels.linear_tiles import Tile
from unisono.ops.kernels.routing import Groups, group_by_expert
from unisono.ops.reference.experts import Experts

_log = logging.getLogger(__name__)
HEIGHTS = (16, 64)
"""Slots of a tile: the second where most experts have more than the first."""
ENTER = {
    16: Tile(outputs=32, rows=16, depth=128, warps=4, stages=4),
    64: Tile(outputs=64, rows=64, depth=64, warps=4, stages=4),
}
"""Of gate and up, by height; both at once, so twice the outputs."""
LEAVE = {
    16: Tile(outputs=64, rows=16, depth=128, warps=4, stages=4),
    64: Tile(outputs=128, rows=64, depth=64, warps=4, stages=4),
}
"""Of down."""
_BLOCK = 1024
_Proofs = dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], bool]
"""By the shapes of the weights: whether both heights give the same bits on this card."""


def pack_experts(gate_up: Tensor, down: Tensor, *, proofs: _Proofs) -> Experts:
    """Return the experts with weights gate_up [experts, 2 * width, in] and down [experts, in,
    width], both contiguous; they are kept, not copied.

    The experts take x [tokens, in] of the dtype of the weights, weights [tokens, chosen] fp32, ids
    [tokens, chosen] int64 by ascending id, and extra [tokens, in] or None. `proofs` is shared by
    the layers of a model: equal shapes are proven once.
    """
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    assert gate_up.dtype == down.dtype
    assert gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
    key = (tuple(gate_up.shape), tuple(down.shape), gate_up.dtype)
    if key not in proofs:
        proofs[key] = gate_up.device.type != "cuda" or _heights_agree(gate_up, down)
        _log.info(
            "experts %s: heights %s", list(gate_up.shape), "agree" if proofs[key] else "differ"
        )
    use_tall = proofs[key]

    def experts(x: Tensor, weights: Tensor, ids: Tensor, extra: Tensor | None) -> Tensor:
        tall = use_tall and ids.numel() > HEIGHTS[0] * len(down)
        said = products(x, ids, gate_up, down, HEIGHTS[1] if tall else HEIGHTS[0])
        return weighted_sum(said, weights, extra)

    return experts


def products(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, height: int) -> Tensor:
    """down(silu(gate x) * up x) of each slot's expert, [tokens, chosen, in], rounded as an MLP's.

    Weights as in `pack_experts`, and x and ids as its experts take them; `height` one of HEIGHTS.
    """
    num_experts, inputs, width = down.shape
    tokens, chosen = ids.shape
    assert x.shape == (tokens, inputs), (x.shape, ids.shape, down.shape)
    assert x.dtype == down.dtype, f"x is {x.dtype}, the weights {down.dtype}"
    x, ids = x.contiguous(), ids.contiguous()
    groups = group_by_expert(ids, num_experts, height)
    hidden = torch.empty((tokens * chosen, width), dtype=x.dtype, device=x.device)
    said = torch.empty((tokens, chosen, inputs), dtype=x.dtype, device=x.device)
    _launch(x, gate_up, hidden, groups, ENTER[height], chosen, is_gated=True)
    _launch(hidden, down, said, groups, LEAVE[height], chosen, is_gated=False)
    return said


def weighted_sum(said: Tensor, weights: Tensor, extra: Tensor | None) -> Tensor:
    """The sum over a token's places of weight * said, from the first on, + extra; in fp32, rounded
    once. said [tokens, chosen, width], weights [tokens, chosen] fp32, extra [tokens, width]."""
    tokens, chosen, width = said.shape
    assert weights.shape == (tokens, chosen)
    assert weights.dtype == torch.float32
    assert said.is_contiguous()
    assert weights.is_contiguous()
    if extra is not None:
        assert extra.shape == (tokens, width)
        assert extra.is_contiguous()
    out = torch.empty((tokens, width), dtype=said.dtype, device=said.device)
    _combine_kernel[(tokens, blocks_of(width, _BLOCK))](
        said,
        weights,
        said if extra is None else extra,
        out,
        width,
        CHOSEN=chosen,
        HAS_EXTRA=extra is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    groups: Groups,
    tile: Tile,
    chosen: int,
    *,
    is_gated: bool,
) -> None:
    outputs, inputs = weight.shape[1] // (2 if is_gated else 1), weight.shape[2]
    num_tiles = groups.tiles.shape[1]
    depth = tile.depth if x.element_size() == 2 else tile.depth // 2
    _grouped_kernel[(blocks_of(outputs, tile.outputs), num_tiles)](
        x,
        weight,
        out,
        groups.order,
        groups.tiles,
        num_tiles,
        outputs,
        inputs,
        CHOSEN=chosen,
        IS_GATED=is_gated,
        BLOCK_O=tile.outputs,
        BLOCK_R=tile.rows,
        BLOCK_K=depth,
        EVEN_K=inputs % depth == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@torch.no_grad()
def _heights_agree(gate_up: Tensor, down: Tensor) -> bool:
    """Whether rows of noise have the same bits in tiles of both heights."""
    generator = torch.Generator(down.device).manual_seed(0)
    rows = 2 * HEIGHTS[1] + 3
    x = torch.randn(rows, down.shape[1], dtype=down.dtype, device=down.device, generator=generator)
    ids = (torch.arange(rows, device=down.device) // (HEIGHTS[1] + 2)).clamp(max=len(down) - 1)
    low, tall = (products(x, ids[:, None], gate_up, down, height) for height in HEIGHTS)
    bits = torch.int16 if low.element_size() == 2 else torch.int32
    return torch.equal(low.view(bits), tall.view(bits))


@launchable
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    CHOSEN: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> None:
    """One tile of slots times a block of its expert's outputs, the weight on the M side.

    Gated: rows of x are tokens, weights [experts, 2 * outputs, inputs], and silu(gate) * up goes to
    the slot's place in `order`. Else rows of x are those places, weights [experts, outputs,
    inputs], and the result goes to the slot.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + num_tiles + tile)
    count = tl.load(tiles_ptr + 2 * num_tiles + tile)
    if count > 0:
        o_o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        o_r = tl.arange(0, BLOCK_R)
        o_k = tl.arange(0, BLOCK_K)
        m_o = o_o < num_outputs
        m_r = o_r < count
        place = (first + o_r).to(tl.int64)
        slot = tl.load(order_ptr + place, mask=m_r, other=0).to(tl.int64)
        of_expert = expert * num_outputs * num_inputs
        if IS_GATED:
            of_expert *= 2
            row, target = slot // CHOSEN, place
        else:
            row, target = place, slot
        p_weight = weight_ptr + of_expert + o_o[:, None] * num_inputs + o_k[None, :]
        p_x = x_ptr + row[:, None] * num_inputs + o_k[None, :]
        b_sum = tl.zeros((BLOCK_O, BLOCK_R), dtype=tl.float32)
        b_up = tl.zeros((BLOCK_O, BLOCK_R), dtype=tl.float32)
        for start in range(0, num_inputs, BLOCK_K):
            if EVEN_K:
                m_weight = m_o[:, None]
                m_x = m_r[:, None]
            else:
                m_k = (o_k < num_inputs - start)[None, :]
                m_weight = m_o[:, None] & m_k
                m_x = m_r[:, None] & m_k
            b_x = tl.trans(tl.load(p_x, mask=m_x, other=0.0))
            b_weight = tl.load(p_weight, mask=m_weight, other=0.0)
            b_sum = tl.dot(b_weight, b_x, b_sum, input_precision="ieee")
            if IS_GATED:
                b_weight = tl.load(p_weight + num_outputs * num_inputs, mask=m_weight, other=0.0)
                b_up = tl.dot(b_weight, b_x, b_up, input_precision="ieee")
            p_weight += BLOCK_K
            p_x += BLOCK_K
        dtype = out_ptr.dtype.element_ty
        if IS_GATED:
            gate = b_sum.to(dtype).to(tl.float32)
            silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
            b_sum = silu * b_up.to(dtype).to(tl.float32)
        p_out = out_ptr + target[:, None] * num_outputs + o_o[None, :]
        tl.store(p_out, tl.trans(b_sum).to(dtype), mask=m_r[:, None] & m_o[None, :])


@launchable
@triton.jit
def _combine_kernel(
    said_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    extra_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    CHOSEN: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        slot = token * CHOSEN + place
        said = tl.load(said_ptr + slot * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + slot) * said
    if HAS_EXTRA:
        total += tl.load(extra_ptr + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total, mask=inside)
