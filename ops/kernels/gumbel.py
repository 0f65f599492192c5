"""Gumbel noise by counting, on the GPU: the numbers of ops/reference/gumbel.py.

The whole numbers are those of the reference. Their logarithms in fp64 come from another library
than the CPU's and may differ in the last bit, so the noise of a GPU equals that of a CPU to about
1e-15 only. On one device an id has one noise, whatever shard, piece or company asks for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.ops.kernels.launch import launchable
from unisono.ops.kernels.sampling import LEAST_KEY, greatest, key_of, pieces_of

_PIECE = 1024
_KEYS_PIECE = 2048
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-52)
_HALF_UNIT = tl.constexpr(2.0**-53)
_WHOLE = tl.constexpr(1 << 53)
_UPPER_UNIT = tl.constexpr(2.0**-32)
_HALF_UPPER_UNIT = tl.constexpr(2.0**-33)
_ENDS = tl.constexpr(1 << 15)
"""So near to 0 or 1, in units of the upper 32 bits, these no longer tell the noise well enough."""
_NEAR_ONE = tl.constexpr(2.0**-4)
"""Below this, log(1 - w) is taken from its series: 1 - w would have lost digits of w."""
_LN_2 = tl.constexpr(0.6931471805599453)
_ROUGH = tl.constexpr(2e-4)
"""Twice what noise in fp32 may be off, four times over: it is off by less than 2.5e-5."""
_ROUGH_SUM = tl.constexpr(4e-6)
"""Likewise, of a logit with its noise: fp32 rounds three times."""


def add_noise(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_id: int
) -> Tensor:
    """Return fp32(logits + temperature * noise), [rows, shard] like `logits`.

    logits [rows, shard] fp32 with unit stride in a row, whose column j is vocabulary id
    first_id + j; temperature [rows] fp64, where 0 leaves a row its logits; seeds and positions
    [rows] int64, all contiguous. noise = -log(-log(u)) with u = (k + 1/2) / 2^52, k the upper 52
    bits of splitmix64. -inf stays -inf and NaN stays NaN.
    """
    _check(temperature, seeds, positions)
    rows, shard, pieces = pieces_of(logits, 0, logits.shape[1], _PIECE)
    noisy = torch.empty((rows, shard), dtype=torch.float32, device=logits.device)
    _noise_kernel[(rows, pieces)](
        logits,
        logits.stride(0),
        temperature,
        seeds,
        positions,
        noisy,
        first_id,
        shard,
        PIECE=_PIECE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return noisy


def noisy_argmax_keys(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_id: int,
    num_ids: int,
) -> Tensor:
    """`argmax_keys(add_noise(...), first_id, num_ids)` [rows] int64 in one pass over the logits.

    Arguments as in the two. The noise of `add_noise` is taken of those ids only that noise in fp32
    cannot tell apart from the greatest of their piece: nearly always one.
    """
    _check(temperature, seeds, positions)
    rows, eligible, pieces = pieces_of(logits, first_id, num_ids, _KEYS_PIECE)
    keys = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    _keys_kernel[(rows, pieces)](
        logits,
        logits.stride(0),
        temperature,
        seeds,
        positions,
        keys,
        first_id,
        eligible,
        PIECE=_KEYS_PIECE,
        IS_CUDA=logits.is_cuda,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return greatest(keys)


def _check(temperature: Tensor, seeds: Tensor, positions: Tensor) -> None:
    assert temperature.dtype == torch.float64
    assert temperature.is_contiguous()
    assert seeds.dtype == torch.int64
    assert seeds.is_contiguous()
    assert positions.dtype == torch.int64
    assert positions.is_contiguous()


@launchable
@triton.jit
def _noise_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    noisy_ptr: tl.tensor,
    first_id: tl.tensor,
    width: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = columns < width
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0)
    start = stream_start(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    bits = stream_bits(start, columns.to(tl.int64) + first_id)
    noisy = _with_noise(logits, bits, tl.load(temperature_ptr + row))
    tl.store(noisy_ptr + row * width + columns, noisy, mask=inside)


@launchable
@triton.jit
def _keys_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    first_id: tl.tensor,
    width: tl.tensor,
    PIECE: tl.constexpr,
    IS_CUDA: tl.constexpr,
) -> None:
    """The greatest key of a piece. fp64 takes a GPU so long that it is spared where it can be."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    columns = piece * PIECE + tl.arange(0, PIECE)
    inside = columns < width
    logits_ptr += row * row_stride
    logits = tl.load(logits_ptr + columns, mask=inside, other=0.0)
    temperature = tl.load(temperature_ptr + row)
    key = tl.full((), LEAST_KEY, tl.int64)
    if temperature == 0.0:
        key = tl.max(key_of(logits, columns, inside, first_id), axis=0)
    else:
        start = stream_start(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        whole = _stream(start, columns.to(tl.int64) + first_id)
        upper = (whole >> 32).to(tl.uint32)
        if tl.min(tl.minimum(upper, ~upper).to(tl.int32), axis=0) < _ENDS:
            noise = _rough_noise(whole >> 12, IS_CUDA)
        else:
            noise = _rougher_noise(upper, IS_CUDA)
        rough = logits + temperature.to(tl.float32) * noise
        best = tl.max(tl.where(inside, rough, -float("inf")), axis=0)
        # Finite, so that nothing is taken from an infinity but a number.
        slack = temperature.to(tl.float32) * _ROUGH + tl.minimum(tl.abs(best), 1e38) * _ROUGH_SUM
        # NaN is near, too.
        is_near = inside & ((rough < best - slack) == 0)
        if tl.sum(is_near.to(tl.int32), axis=0) == 1:
            column = tl.sum(tl.where(is_near, columns, 0), axis=0)
            its_bits = stream_bits(start, column.to(tl.int64) + first_id)
            its_noisy = _with_noise(tl.load(logits_ptr + column), its_bits, temperature)
            key = key_of(its_noisy, column, column < width, first_id)
        else:
            noisy = _with_noise(logits, whole >> 12, temperature)
            key = tl.max(key_of(noisy, columns, inside, first_id), axis=0)
    tl.store(keys_ptr + row * tl.num_programs(1) + piece, key)


@triton.jit
def _with_noise(logits: tl.tensor, bits: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """fp32(logits + temperature * noise): what counts."""
    uniform = (bits.to(tl.int64).to(tl.float64) + 0.5) * _UNIT
    noise = -tl.log(-tl.log(uniform))
    return (logits.to(tl.float64) + temperature * noise).to(tl.float32)


@triton.jit
def _rough_noise(bits: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    """The noise in fp32, wherever u lies."""
    odd = 2 * bits.to(tl.int64) + 1
    u = odd.to(tl.float32) * _HALF_UNIT
    w = -(odd - _WHOLE).to(tl.float32) * _HALF_UNIT
    return _noise_between(u, w, IS_CUDA)


@triton.jit
def _rougher_noise(upper: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    """The same from the upper 32 bits, which convert several times as fast as 64."""
    u = tl.fma(upper.to(tl.float32), _UPPER_UNIT, _HALF_UPPER_UNIT)
    w = tl.fma((~upper).to(tl.float32), _UPPER_UNIT, _HALF_UPPER_UNIT)
    return _noise_between(u, w, IS_CUDA)


@triton.jit
def _noise_between(u: tl.tensor, w: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    """-log(-log(u)) in fp32, near 1 from w = 1 - u."""
    series = tl.fma(w, tl.fma(w, tl.fma(w, tl.fma(w, 0.2, 0.25), 1 / 3), 0.5), 1.0) * w
    depth = tl.where(w < _NEAR_ONE, series, -_LN_2 * rough_log2(u, IS_CUDA))
    return -_LN_2 * rough_log2(depth, IS_CUDA)


@triton.jit
def rough_log2(x: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    """By one instruction, off by 2^-22, where Triton's own are thirty with a branch among them."""
    if IS_CUDA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def stream_start(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The state from which a position of a request counts, uint64."""
    return _mix(_mix(seed.to(tl.uint64) + _GOLDEN) + (position + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def stream_bits(start: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The upper 52 bits of splitmix64 for int64 vocabulary ids, uint64."""
    return _stream(start, ids) >> 12


@triton.jit
def _stream(start: tl.tensor, ids: tl.tensor) -> tl.tensor:
    return _mix(start + (ids + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)
