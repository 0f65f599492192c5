"""How the attention kernels are compiled and launched. None of it changes a bit: it follows from
widths and from how many tiles there are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from unisono.ops.attention import AttentionShape
from unisono.ops.kernels.attention_decode import decode_kernel, merge_kernel
from unisono.ops.kernels.attention_prefill import prefill_kernel
from unisono.ops.kernels.launch import bound, power_of_two
from unisono.ops.kernels.overlap import overlap_options

_FEW_PROGRAMS = 132
"""Up to here every program has a multiprocessor to itself and may fill its shared memory."""
_TAKES = ((1536, 4),)
"""From so many rows times KV heads, splits that a program takes: it starts once for all of them,
and leaves less to merge. Fewer programs end at too different times. On an H200, 256 rows of 400 to
800 keys and 8 heads take 161 us instead of 171, of which reading takes 149; with 128 rows there is
nothing to gain (scripts/tune_attention.py)."""

_SHORT_PROMPT = 2048
"""Keys up to which low tiles are quicker: a tall one begins with more of a triangle that nobody
sees. On an H200, 64 prompts of 128 tokens and 32 heads over 8 take 137 us instead of 153, 8 of
1,024 294 instead of 307; 2 of 4,096 would take 904 instead of 877 (scripts/tune_attention.py)."""


class Launch(NamedTuple):
    """How a kernel is compiled: none of it changes bits."""

    height: int
    warps: int
    stages: int
    takes: int = 1
    """Splits of a program, of the decode kernel."""
    registers: int | None = None
    """Most of a thread; None: as many as the compiler likes."""


def decode_launch(
    shape: AttentionShape, dtype: torch.dtype, longest: int, heads: int, num_splits: int
) -> Launch:
    """For rows of up to `longest` tokens, which have `heads` KV heads together; no taller than
    they fill, and than registers hold."""
    dim = shape.head_dim
    tallest = 16 if dtype == torch.float32 else 64
    height = max(16, power_of_two(min(longest * shape.group, tallest)))
    height = max(height, power_of_two(shape.group))
    takes = next((takes for least, takes in _TAKES if heads >= least), 1)
    if dtype == torch.float32:
        return Launch(height, 4 if dim <= 64 else 8, 1, takes)
    # A stage is a tile of keys and one of values: 32 KB at 128 channels, of the 227 KB there are.
    deep = 6 if dim <= 64 else 5 if dim <= 128 else 2
    if heads * num_splits <= _FEW_PROGRAMS:
        return Launch(height, 4, deep, takes)
    # Three programs on a processor, which the compiler would make two with a few registers more.
    is_slim = takes > 1 and height == 16 and dim <= 128
    return Launch(height, 4, min(deep, 3), takes, 168 if is_slim else None)


def prefill_launch(
    shape: AttentionShape, dtype: torch.dtype, programs: int, num_keys: int
) -> Launch:
    """For runs that see up to `num_keys` keys. Two fp32 accumulators of [height, head_dim] must fit
    the registers of the warps."""
    dim = shape.head_dim
    if dtype == torch.float32:
        launch = Launch(16, 4, 1) if dim <= 64 else Launch(32 if dim <= 128 else 16, 8, 1)
    elif dim > 128:
        launch = Launch(64, 8, 2)
    elif programs <= _FEW_PROGRAMS:
        launch = Launch(64, 4, 3)
    elif dim > 64 and num_keys <= _SHORT_PROMPT:
        launch = Launch(64, 4, 2)
    else:
        launch = Launch(128, 8, 3)
    return launch._replace(height=max(launch.height, power_of_two(shape.group)))


@functools.cache
def decode_of(
    shape: AttentionShape,
    window: int,
    launch: Launch,
    device: torch.device,
    alibi: bool,
    dtype: torch.dtype,
) -> Any:
    return bound(
        decode_kernel,
        TAKES=launch.takes,
        maxnreg=launch.registers,
        **_attending(launch, alibi, dtype),
        **_common(shape, window, launch, device),
    )


@functools.cache
def merge_of(
    shape: AttentionShape, window: int, launch: Launch, device: torch.device, height: int
) -> Any:
    return bound(
        merge_kernel,
        HEIGHT=height,
        TAKES=launch.takes,
        num_warps=min(4, height),
        **_common(shape, window, launch, device),
    )


@functools.cache
def prefill_of(
    shape: AttentionShape,
    window: int,
    launch: Launch,
    device: torch.device,
    alibi: bool,
    dtype: torch.dtype,
) -> Any:
    return bound(
        prefill_kernel,
        **_attending(launch, alibi, dtype),
        **_common(shape, window, launch, device),
    )


def _attending(launch: Launch, alibi: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Options of the kernels that read keys."""
    return {
        "BLOCK_M": launch.height,
        "ALIBI": alibi,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "STAGES": launch.stages,
        "num_warps": launch.warps,
    }


def _common(
    shape: AttentionShape, window: int, launch: Launch, device: torch.device
) -> dict[str, Any]:
    """Compile-time arguments of all kernels."""
    return {
        "GROUP": shape.group,
        "PER_TILE": launch.height // shape.group,
        "DIM": shape.head_dim,
        "DIM_PAD": max(16, power_of_two(shape.head_dim)),
        "WINDOW": window,
        **overlap_options(device),
    }
