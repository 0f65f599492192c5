"""What scripts/tune_linear.py makes of its timings, and the weights that it times."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.paths import loaded_script
from unisono.ops.kernels.linear_tiles import Tile

NARROW = Tile(outputs=16, rows=16, depth=256, warps=4, stages=5)
WIDE = Tile(outputs=64, rows=16, depth=128, warps=4, stages=5)


@pytest.fixture(scope="module")
def script():
    with loaded_script("tune_linear") as module:
        yield module


def test_a_table_has_a_row_where_a_row_pays(script) -> None:
    entries = [
        _entry(1024, 1, {NARROW: 2.0, WIDE: 4.0}),
        _entry(1024, 16, {NARROW: 3.0, WIDE: 4.0}),
        _entry(4096, 1, {NARROW: 5.05, WIDE: 5.0}),
        _entry(6144, 1, {NARROW: 6.0, WIDE: 9.0}),
        _entry(24576, 1, {NARROW: 9.0, WIDE: 6.0}),
        _entry(151936, 1, {WIDE: 60.0}),
        _entry(151936, 32, {NARROW: 1.0, WIDE: 60.0}),  # another height
    ]
    assert script.suggested_table(entries, 16) == [
        "(6144, _ANY, _tile(16, 16, 256, 4, 5)),  # worst 1.01 of the best",
        "(_ANY, _ANY, _tile(64, 16, 128, 4, 5)),  # worst 1.00 of the best",
    ]
    assert script.suggested_table([], 16) == []


def test_shapes_are_those_of_the_models_once_each(script) -> None:
    shapes = list(script.all_shapes())
    sizes = [(shape.outputs, shape.inputs) for shape in shapes]
    assert len(sizes) == len(set(sizes))
    of_qwen3_8b = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]
    assert sizes[:5] == of_qwen3_8b
    assert {(640, 576), (576, 384), (75968, 4096), (5120, 12800)} <= set(sizes)


def _entry(outputs: int, rows: int, times: dict[Tile, float]) -> dict:
    best = min(times, key=lambda tile: times[tile])
    return {
        "outputs": outputs,
        "rows": rows,
        "best": asdict(best),
        "best_us": times[best],
        "times": [asdict(tile) | {"us": us} for tile, us in times.items()],
    }
