"""Linear layers on a GPU whose rows keep their bits whatever the batch, at the speed of memory.

Every product sums over its inputs in order, in fp32, and never in parts that are added up later.
Then nothing about a tile can show in the result: not its sizes, not the instruction it compiles
to, not its pipeline. So one kernel serves every row count, with tiles chosen for speed; and from
`BORDER` rows up cuBLASLt does, forbidden to split a sum, wherever it is proven at start to give
the same bits. In fp32 cuBLAS follows no order that could be named, and the kernel serves alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from unisono.ops.kernels.launch import blocks_of, bound, launchable
from unisono.ops.kernels.linear_tiles import (
    BORDER,
    HEIGHTS,
    TYPES,
    Tile,
    height_of,
    middle_tiles,
    narrow_tile,
    tall_tile,
)
from unisono.ops.kernels.overlap import LINE, overlap_options, prefetch, release, wait
from unisono.ops.linear import Linear

_log = logging.getLogger(__name__)

PROBED_ROWS = (64, 65, 96, 127, 128, 129, 200, 256, 384, 512, 777, 1024, 2048, 4096, 8192)
"""Row counts at which cuBLASLt must give the bits of the kernel before it may serve."""
_PROBED_ALWAYS, _PROBED_ELEMENTS = 256, 1 << 26
"""Rows probed at any cost, and the size of a result beyond which no more are."""
_FETCHED_AHEAD = 16 * 1024
"""Bytes of a weight that a program asks for before it may read its rows."""
_LEAST_AHEAD = 32
"""Outputs of a tile from which that pays: narrow tiles have programs enough to pull at once."""
_GROUP = 8
"""Row tiles that are computed together, so that they find a weight tile in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What serves a weight of one shape, and why; made once when the first is packed."""

    shape: tuple[int, int]
    dtype: torch.dtype
    out_dtype: torch.dtype
    tall: str
    """From `BORDER` rows up: "cublaslt", or "tiled", our kernel. "one tile": ours, and every row
    count on one tile, for on this card the tiles differ."""
    reason: str

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}: {self.tall} from {BORDER} rows up ({self.reason})"


Verdicts = dict[tuple[torch.Size, torch.dtype, torch.dtype], Verdict]
"""By shape, dtype of a weight and dtype of its results."""


def forbid_split_k() -> None:
    """Have every matrix product of this process go to cuBLASLt, and none split its sums."""
    with warnings.catch_warnings():
        # That the choice is experimental: what it computes is proven for every weight.
        warnings.filterwarnings("ignore", message="torch.backends.cuda.preferred_blas_library")
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def pack_linear(weight: Tensor, verdicts: Verdicts) -> Linear:
    """Return the exact product with `weight` [out, in], of its dtype.

    The weight is kept, not copied (unless it is not contiguous). `verdicts` is shared by the
    weights of a model: equal shapes are proven once. On a CUDA device `forbid_split_k` is called,
    which changes settings of the process.
    """
    return _pack(weight, weight.dtype, verdicts)


def pack_head(weight: Tensor, verdicts: Verdicts) -> Linear:
    """Return the exact product with `weight` [out, in] whose sums are kept: fp32 whatever `x` is.

    The products are those of the dtype of `weight`; nothing is rounded to it afterwards.
    """
    return _pack(weight, torch.float32, verdicts)


class OrderedLinear:
    """The product with one weight: tiles below the border, `verdict.tall` from there up, but where
    the tables know a faster tile."""

    def __init__(self, weight: Tensor, verdict: Verdict) -> None:
        num_outputs, num_inputs = weight.shape
        self._transposed, self._verdict = weight.T, verdict
        self._dtype, self._out_dtype = weight.dtype, verdict.out_dtype
        narrow = {
            height: Tiled.of(weight, narrow_tile(num_outputs, num_inputs, height, weight.dtype))
            for height in HEIGHTS
        }
        self._one_tile = narrow[HEIGHTS[0]] if verdict.tall == "one tile" else None
        middle = middle_tiles(num_outputs, num_inputs, weight.dtype)
        laid_out = {tile: Tiled.of(weight, tile) for tile in set(middle.values())}
        self._narrow = [narrow[height_of(max(rows, 1))] for rows in range(BORDER)]
        self._middle = {rows: laid_out[tile] for rows, tile in middle.items()}
        tall = {tall_tile(rows, weight.dtype) for rows in (BORDER, _PROBED_ALWAYS)}
        self._tall = {tile: Tiled.of(weight, tile) for tile in tall}
        self._uses_library = verdict.tall == "cublaslt"

    @property
    def verdict(self) -> Verdict:
        """What serves from the border up, and why."""
        return self._verdict

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in], of the dtype of the weight -> [tokens, out]."""
        x, num_rows = x.contiguous(), x.shape[0]
        tiled = self._one_tile
        if tiled is None:
            tiled = self._narrow[num_rows] if num_rows < BORDER else self._middle.get(num_rows)
        if tiled is None:
            if self._uses_library:
                return library_product(x, self._transposed, self._out_dtype)
            tiled = self._tall[tall_tile(num_rows, self._dtype)]
        return tiled_product(x, tiled, self._out_dtype)


def library_product(x: Tensor, transposed: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch's product of x [tokens, in] and a weight [in, out], rounded to `out_dtype` only."""
    if out_dtype == x.dtype:
        return torch.mm(x, transposed)
    return torch.mm(x, transposed, out_dtype=out_dtype)


def ordered_product(x: Tensor, weight: Tensor, out_dtype: torch.dtype, tile: Tile) -> Tensor:
    """x [tokens, in] times weight [out, in], both contiguous -> [tokens, out] of `out_dtype`.

    Any tile serves any number of rows.
    """
    return tiled_product(x, Tiled.of(weight, tile), out_dtype)


class Tiled(NamedTuple):
    """A weight as the kernel is handed it: tile after tile."""

    weight: Tensor
    num_outputs: int
    num_inputs: int
    tile: Tile
    handed: Tensor | TensorDescriptor
    """The latter where the copy engine brings it."""
    kernel: Any
    """`_ordered_kernel` for this weight and tile."""

    @classmethod
    def of(cls, weight: Tensor, tile: Tile) -> Tiled:
        assert weight.is_contiguous(), "rows of the weight must be contiguous"
        num_outputs, num_inputs = weight.shape
        row = num_inputs * weight.element_size()
        starts_on_lines = not row % LINE.value and not weight.data_ptr() % LINE.value
        # The interpreter, on a CPU, copies as well as the engine of a Hopper card.
        has_engine = weight.device.type != "cuda" or overlap_options(weight.device)["OVERLAPS"]
        handed, ahead = weight, 0
        is_bulk = tile.bulk and starts_on_lines and has_engine
        if is_bulk:
            handed = TensorDescriptor.from_tensor(weight, [tile.outputs, tile.depth])
        elif starts_on_lines and tile.outputs >= _LEAST_AHEAD:
            # Bytes of each row of a tile that are fetched while the kernel before still runs.
            ahead = min(row, _FETCHED_AHEAD // tile.outputs // LINE.value * LINE.value)
        kernel = bound(
            _ordered_kernel,
            BLOCK_O=tile.outputs,
            BLOCK_R=tile.rows,
            BLOCK_K=tile.depth,
            GROUP=_GROUP,
            EVEN_K=num_inputs % tile.depth == 0,
            BULK=is_bulk,
            AHEAD=ahead,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlap_options(weight.device),
        )
        return cls(weight, num_outputs, num_inputs, tile, handed, kernel)


def tiled_product(x: Tensor, tiled: Tiled, out_dtype: torch.dtype) -> Tensor:
    """`ordered_product` with what was laid out before."""
    weight, num_outputs, num_inputs, tile, handed, kernel = tiled
    num_rows, width = x.shape
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    assert width == num_inputs, f"x is {list(x.shape)}, the weight {list(weight.shape)}"
    assert x.is_contiguous(), "rows of x must be contiguous"
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype)
    if num_rows == 0:
        return out
    grid = (blocks_of(num_outputs, tile.outputs) * blocks_of(num_rows, tile.rows),)
    kernel.launch(grid, x, handed, out, num_rows, num_outputs, num_inputs)
    return out


@launchable
@triton.jit(do_not_specialize=["num_rows"])
def _ordered_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BULK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One tile of x W^T. Its longer side is the M side of the product: the tensor core takes 16
    of M, or 64 for `wgmma`, and 8 of N.
    """
    i_tile = tl.program_id(0)
    tiles_o = tl.cdiv(num_outputs, BLOCK_O)
    tiles_r = tl.cdiv(num_rows, BLOCK_R)
    first_r = i_tile // (GROUP * tiles_o) * GROUP
    group = tl.minimum(tiles_r - first_r, GROUP)
    i_in_group = i_tile % (GROUP * tiles_o)
    i_r = first_r + i_in_group % group
    i_o = i_in_group // group

    o_o = i_o.to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    o_r = i_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    m_o = o_o < num_outputs
    m_r = o_r < num_rows
    if OVERLAPS and AHEAD > 0:
        # Nothing writes a weight while it is used.
        first = tl.minimum(o_o, num_outputs - 1) * num_inputs
        prefetch(weight_ptr + first, tl.full([BLOCK_O], AHEAD, tl.int32))
    wait(OVERLAPS)
    if not BULK:
        p_weight = weight_ptr + o_o[:, None] * num_inputs + o_k[None, :]
    p_x = x_ptr + o_r[:, None] * num_inputs + o_k[None, :]

    if BLOCK_R > BLOCK_O:
        b_sum = tl.zeros((BLOCK_R, BLOCK_O), dtype=tl.float32)
    else:
        b_sum = tl.zeros((BLOCK_O, BLOCK_R), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        if EVEN_K:
            m_weight = m_o[:, None]
            m_x = m_r[:, None]
        else:
            m_k = (o_k < num_inputs - start)[None, :]
            m_weight = m_o[:, None] & m_k
            m_x = m_r[:, None] & m_k
        if BULK:
            # What lies outside is zero.
            b_weight = weight_ptr.load([i_o * BLOCK_O, start])
        else:
            b_weight = tl.load(p_weight, mask=m_weight, other=0.0)
            p_weight += BLOCK_K
        b_x = tl.load(p_x, mask=m_x, other=0.0)
        if BLOCK_R > BLOCK_O:
            b_sum = tl.dot(b_x, tl.trans(b_weight), b_sum, input_precision="ieee")
        else:
            b_sum = tl.dot(b_weight, tl.trans(b_x), b_sum, input_precision="ieee")
        p_x += BLOCK_K
    release(OVERLAPS)

    if BLOCK_O >= BLOCK_R:
        b_sum = tl.trans(b_sum)
    p_out = out_ptr + o_r[:, None] * num_outputs + o_o[None, :]
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_r[:, None] & m_o[None, :])


def _pack(weight: Tensor, out_dtype: torch.dtype, verdicts: Verdicts) -> Linear:
    assert weight.dtype in TYPES, f"no kernel for weights of {weight.dtype}"
    weight = weight.contiguous()
    key = (weight.shape, weight.dtype, out_dtype)
    if key not in verdicts:
        verdicts[key] = _judge(weight, out_dtype)
        _log.info("linear %s", verdicts[key])
    return OrderedLinear(weight, verdicts[key])


@torch.no_grad()
def _judge(weight: Tensor, out_dtype: torch.dtype) -> Verdict:
    """Prove the tiles against each other and cuBLASLt against them, on rows of noise."""
    num_outputs, num_inputs = weight.shape
    verdict = partial(
        Verdict, shape=(num_outputs, num_inputs), dtype=weight.dtype, out_dtype=out_dtype
    )
    if weight.device.type != "cuda":
        return verdict(tall="tiled", reason=f"cuBLASLt does not compute on {weight.device.type}")
    forbid_split_k()
    probed = list(_probed_rows(num_outputs, weight.dtype))
    x = torch.randn(
        probed[-1],
        num_inputs,
        dtype=weight.dtype,
        device=weight.device,
        generator=torch.Generator(weight.device).manual_seed(0),
    )
    first, *others = [
        *(narrow_tile(num_outputs, num_inputs, height, weight.dtype) for height in HEIGHTS),
        *(tall_tile(rows, weight.dtype) for rows in (BORDER, _PROBED_ALWAYS)),
        *set(middle_tiles(num_outputs, num_inputs, weight.dtype).values()),
    ]
    want = ordered_product(x, weight, out_dtype, first)
    for tile in others:
        got = ordered_product(x[:_PROBED_ALWAYS], weight, out_dtype, tile)
        if not _same_bits(got, want):
            return verdict(tall="one tile", reason=f"{tile} differs from {first}")
    if weight.dtype == torch.float32:
        return verdict(tall="tiled", reason="the order of cuBLAS in float32 depends on the rows")
    if (num_inputs * weight.element_size()) % 16 or (num_outputs * out_dtype.itemsize) % 16:
        return verdict(tall="tiled", reason="rows do not start on multiples of 16 bytes")
    for num_rows in probed:
        if not _same_bits(library_product(x[:num_rows], weight.T, out_dtype), want):
            return verdict(tall="tiled", reason=f"cuBLASLt differs at {num_rows} rows")
    return verdict(tall="cublaslt", reason=f"same bits at {len(probed)} row counts")


def _probed_rows(num_outputs: int, dtype: torch.dtype) -> Iterator[int]:
    for rows in PROBED_ROWS:
        affordable = dtype != torch.float32 and rows * num_outputs <= _PROBED_ELEMENTS
        if rows <= _PROBED_ALWAYS or affordable:
            yield rows


def _same_bits(got: Tensor, want: Tensor) -> bool:
    """Whether the rows of `got` are the first of `want`, to the sign of a zero."""
    bits = torch.int16 if got.element_size() == 2 else torch.int32
    return torch.equal(got.view(bits), want[: len(got)].view(bits))
