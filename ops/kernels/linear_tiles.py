"""Launch configurations of the ordered product: which tile serves which weight and row count.

A tile never changes a bit (`ops/kernels/linear.py` says why, and proves it at start), so these
tables are about speed only. `scripts/tune_linear.py` times what `candidates` lists and prints rows
for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

BORDER = 64
"""Rows from which a product is bound by arithmetic, and cuBLASLt serves where it is proven to."""
HEIGHTS = (16, 32, 64)
"""Rows of a tile below the border; a product takes the lowest that holds it."""
SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on a Hopper card."""
PROCESSORS = 132
"""Multiprocessors of an H200."""
TYPES = (torch.bfloat16, torch.float16, torch.float32)
_ANY = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes: `outputs` x `rows` elements, `depth` inputs a step."""

    outputs: int
    rows: int
    depth: int
    warps: int
    stages: int
    bulk: bool = False
    """Whether Hopper's copy engine brings the weight, where it can: one thread asks for a tile."""

    def shared_bytes(self, item_size: int) -> int:
        """Bytes of shared memory that its stages fill, for operands of `item_size` bytes.

        A `wgmma` (from 64 by 16 up) still reads its stage while the next are loaded, so it needs
        a buffer more than an `mma`, which has its operands in registers by then.
        """
        low, high = sorted((self.outputs, self.rows))
        is_wgmma = item_size == 2 and low >= 16 and high >= 64
        buffers = self.stages if is_wgmma else self.stages - 1
        return buffers * (self.outputs + self.rows) * self.depth * item_size


def _tile(outputs: int, rows: int, depth: int, warps: int, stages: int) -> Tile:
    return Tile(outputs=outputs, rows=rows, depth=depth, warps=warps, stages=stages)


def _bulk(outputs: int, rows: int, depth: int, warps: int, stages: int) -> Tile:
    return replace(_tile(outputs, rows, depth, warps, stages), bulk=True)


# Rows: (most outputs, most inputs, tile); the first that holds the weight serves. Narrow weights
# need narrow tiles, or too few programs pull at the memory at once; the copy engine pulls harder.
# Measured on an H200 by scripts/tune_linear.py.
_NARROW: dict[int, tuple[tuple[int, int, Tile], ...]] = {
    16: (
        (960, _ANY, _tile(8, 16, 256, 4, 6)),
        (1024, _ANY, _tile(8, 16, 512, 4, 8)),
        (1536, _ANY, _tile(16, 16, 64, 4, 8)),
        (2048, _ANY, _tile(16, 16, 512, 4, 8)),
        (3072, 960, _tile(32, 16, 64, 4, 8)),
        (8448, _ANY, _bulk(64, 16, 256, 4, 4)),
        (16384, _ANY, _bulk(128, 16, 128, 4, 4)),
        (24576, _ANY, _tile(64, 16, 128, 4, 3)),
        (28672, _ANY, _tile(128, 16, 128, 4, 3)),
        (49152, _ANY, _tile(128, 16, 128, 4, 2)),
        (_ANY, _ANY, _tile(64, 16, 128, 4, 3)),
    ),
    32: (
        (1024, _ANY, _tile(8, 32, 512, 4, 3)),
        (1536, _ANY, _tile(16, 32, 64, 4, 8)),
        (2048, _ANY, _tile(16, 64, 128, 4, 5)),
        (3072, 960, _tile(32, 32, 64, 4, 8)),
        (8448, _ANY, _bulk(64, 32, 256, 4, 4)),
        (16384, _ANY, _bulk(128, 32, 128, 4, 4)),
        (24576, _ANY, _tile(64, 32, 128, 4, 3)),
        (28672, _ANY, _tile(64, 32, 128, 4, 4)),
        (49152, _ANY, _tile(128, 32, 64, 4, 3)),
        (_ANY, _ANY, _tile(64, 32, 128, 4, 3)),
    ),
    64: (
        (2048, _ANY, _tile(16, 64, 128, 4, 5)),
        (3072, 960, _tile(32, 64, 64, 4, 5)),
        (8448, _ANY, _bulk(64, 64, 128, 4, 6)),
        (14336, _ANY, _tile(128, 64, 128, 8, 4)),
        (25600, _ANY, _tile(128, 64, 64, 4, 4)),
        (49152, _ANY, _tile(128, 64, 64, 4, 3)),
        (_ANY, _ANY, _tile(64, 64, 128, 4, 3)),
    ),
}
# Rows from the border up at which cuBLASLt, which may not split a sum, picks a kernel slower than
# ours: (outputs, inputs, rows, tile). For [1024, 3072] it takes ten times as long at 64 and at 96
# rows, and about as long as ours at others.
# Measured on an H200 by scripts/tune_linear.py --border.
_MIDDLE: tuple[tuple[range, range, range, Tile], ...] = (
    (range(961, 1025), range(_ANY), range(BORDER, 129), _tile(16, 64, 128, 4, 5)),
    (range(3073, 4097), range(8193, _ANY), range(113, 129), _bulk(64, 64, 128, 4, 5)),
)
_TALL = (_tile(128, 64, 64, 4, 4), _tile(128, 128, 64, 8, 4))

# Without tensor cores a thread keeps its operands of a step in registers, so steps are short.
_NARROW_FP32 = {
    16: _tile(32, 16, 32, 4, 4),
    32: _tile(32, 32, 32, 4, 4),
    64: _tile(32, 64, 32, 4, 4),
}
_TALL_FP32 = (_tile(64, 64, 32, 4, 3), _tile(64, 64, 32, 4, 3))


def narrow_tile(num_outputs: int, num_inputs: int, height: int, dtype: torch.dtype) -> Tile:
    """The tile for a weight [num_outputs, num_inputs] and at most `height` rows, of HEIGHTS."""
    if dtype == torch.float32:
        return _NARROW_FP32[height]
    return next(
        tile
        for most_outputs, most_inputs, tile in _NARROW[height]
        if num_outputs <= most_outputs and num_inputs <= most_inputs
    )


def middle_tiles(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> dict[int, Tile]:
    """By number of rows, from the border up, the tile that serves although cuBLASLt might."""
    if dtype == torch.float32:
        return {}
    return {
        num_rows: tile
        for outputs, inputs, rows, tile in _MIDDLE
        if num_outputs in outputs and num_inputs in inputs
        for num_rows in rows
    }


def tall_tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile from the border up."""
    low, high = _TALL_FP32 if dtype == torch.float32 else _TALL
    return low if num_rows <= low.rows else high


def height_of(num_rows: int) -> int:
    """The lowest of HEIGHTS that holds `num_rows`, which lie below the border."""
    return next(height for height in HEIGHTS if num_rows <= height)


def candidates(
    num_outputs: int, num_inputs: int, num_rows: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tile]:
    """Every tile worth timing for a product below the border; the one that serves comes first."""
    serving = narrow_tile(num_outputs, num_inputs, height_of(num_rows), dtype)
    others = _narrow_tiles(num_outputs, num_inputs, height_of(num_rows), dtype)
    return [serving, *(tile for tile in others if tile != serving)]


def _narrow_tiles(
    num_outputs: int, num_inputs: int, height: int, dtype: torch.dtype
) -> Iterator[Tile]:
    """Tiles of every size that the weight is worth, each with few stages and with many."""
    if dtype == torch.float32:
        for outputs in (16, 32, 64):
            yield from (_tile(outputs, height, 32, 4, stages) for stages in (3, 5))
        return
    for outputs, depths in _SIZES.items():
        programs = -(-num_outputs // outputs)
        if (outputs > 8 and 2 * programs < PROCESSORS) or programs > 64 * PROCESSORS:
            continue
        for depth in depths:
            # A step that the inputs do not fill is wasted in part; short sums feel it.
            if depth == 64 and num_inputs % 128 == 0 and outputs < 128:
                continue
            few, many = _stages(outputs, height, depth, programs)
            yield from (_tile(outputs, height, depth, 4, stages) for stages in {few, many})
            if outputs >= 64:
                yield _tile(outputs, height, depth, 8, many)
                if depth >= 128:
                    yield _bulk(outputs, height, depth, 4, many)


_SIZES = {8: (256, 512), 16: (64, 256, 512), 32: (64, 128, 256), 64: (64, 128, 256), 128: (64, 128)}
"""Outputs of a tile, and the inputs of a step worth trying with them."""


def _stages(outputs: int, height: int, depth: int, programs: int) -> tuple[int, int]:
    """Few: enough in flight to hide the memory's latency. Many: all that fits.

    Where there are more programs than processors, two must fit on one, or nothing is in flight
    while one ends and the next begins.
    """
    limit = SHARED_BYTES if programs <= PROCESSORS else SHARED_BYTES // 2 - 1024
    fitting = [
        stages
        for stages in range(2, 9)
        if _tile(outputs, height, depth, 4, stages).shared_bytes(2) <= limit
    ]
    if not fitting:
        return 2, 2
    ample = [
        stages
        for stages in fitting
        if _tile(outputs, height, depth, 4, stages).shared_bytes(2) >= 56 * 1024
    ]
    return (ample or fitting[-1:])[0], fitting[-1]
