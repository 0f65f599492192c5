"""The tables of tiles: every weight finds one, and none asks for more than the card has."""

from __future__ import annotations

import pytest
import torch

from unisono.ops.kernels.linear_tiles import (
    BORDER,
    HEIGHTS,
    SHARED_BYTES,
    candidates,
    height_of,
    middle_tiles,
    narrow_tile,
    tall_tile,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [
    (1, 1),
    (7, 5),
    (576, 1536),
    (1024, 3072),
    (6144, 4096),
    (4096, 12288),
    (24576, 4096),
    (49152, 576),
    (151936, 5120),
    (1 << 20, 1 << 15),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_every_weight_has_legal_tiles_at_every_row_count(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    for rows in range(1, BORDER):
        tiles = candidates(out_features, in_features, rows, dtype)
        assert tiles[0] == narrow_tile(out_features, in_features, height_of(rows), dtype)
        assert len(tiles) == len(set(tiles)) <= 32
        for tile in tiles:
            assert rows <= tile.rows <= BORDER
            assert tile.shared_bytes(dtype.itemsize) <= SHARED_BYTES, tile
            # Sizes of a tile are powers of two, and what the tensor core takes at least.
            for size, least in ((tile.outputs, 8), (tile.rows, 16), (tile.depth, 16)):
                assert size >= least, tile
                assert size & (size - 1) == 0, tile


@pytest.mark.parametrize("dtype", DTYPES)
def test_tall_tiles_are_legal(dtype: torch.dtype) -> None:
    for rows in (BORDER, BORDER + 1, 128, 100_000):
        assert tall_tile(rows, dtype).shared_bytes(dtype.itemsize) <= SHARED_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_serve_in_place_of_the_library_are_legal(dtype: torch.dtype) -> None:
    found = {
        shape: middle_tiles(*shape, dtype)
        for shape in [(1024, 2048), (1024, 3072), (4096, 12288), (4096, 4096), (576, 576)]
    }
    has_library = dtype != torch.float32
    assert set(found[1024, 3072]) == (set(range(BORDER, 129)) if has_library else set())
    assert set(found[4096, 12288]) == (set(range(113, 129)) if has_library else set())
    assert not found[4096, 4096]
    assert not found[576, 576]
    for tiles in found.values():
        assert all(tile.shared_bytes(dtype.itemsize) <= SHARED_BYTES for tile in tiles.values())


def test_heights_climb_to_the_border() -> None:
    assert [height_of(rows) for rows in (1, 16, 17, 32, 33, 63)] == [16, 16, 32, 32, 64, 64]
    assert HEIGHTS[-1] == BORDER
