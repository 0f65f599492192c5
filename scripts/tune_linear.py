"""Times every tile of the ordered product on one GPU: python scripts/tune_linear.py RESULT.json

Over the linear layers of real models, at row counts below the border, each launch on a weight that
is not in the cache, beside `torch.nn.functional.linear` as torch comes and the time that the bytes
take. All tiles must give the same bits. Prints the best tile of every shape; the tables to fill
are in ops/kernels/linear_tiles.py. With --border: at row counts from the border up, beside the
library that serves there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from unisono.ops.kernels.linear import forbid_split_k, library_product, ordered_product
from unisono.ops.kernels.linear_tiles import BORDER, HEIGHTS, Tile, candidates, height_of
from unisono.ops.timing import read_bytes_per_s, seconds_per_call

ROWS = (1, 2, 4, 8, 16, 32, 48, 63)
ROWS_OF_ALL_TILES = (1, 16, 32, 63)
"""Here every candidate is timed; elsewhere those that were best at the same height."""
MIDDLE_ROWS = range(BORDER, 257, 16)
MIDDLE_TILES = tuple(
    Tile(outputs=outputs, rows=rows, depth=128, warps=4, stages=stages, bulk=outputs * rows > 2048)
    for outputs, rows, stages in ((16, 64, 5), (32, 64, 5), (64, 32, 5), (64, 64, 5), (128, 64, 4))
)
COLD_BYTES = 160 << 20
"""Bytes that pass between two reads of a weight: three times the cache of an H200."""
KEPT = 3
ROW_COST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the weights of a model follow from."""

    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int


MODELS = {
    "qwen3-8b": Sizes(hidden=4096, queries=4096, keys=1024, inner=12288, vocabulary=151936),
    "qwen3-0.6b": Sizes(hidden=1024, queries=2048, keys=1024, inner=3072, vocabulary=151936),
    "qwen3-14b": Sizes(hidden=5120, queries=5120, keys=1024, inner=17408, vocabulary=151936),
    "qwen3-32b": Sizes(hidden=5120, queries=8192, keys=1024, inner=25600, vocabulary=151936),
    "llama-3.1-8b": Sizes(hidden=4096, queries=4096, keys=1024, inner=14336, vocabulary=128256),
    "smollm2-135m": Sizes(hidden=576, queries=576, keys=192, inner=1536, vocabulary=49152),
    # The larger half of its three groups of heads.
    "smollm2-135m on two": Sizes(hidden=576, queries=384, keys=128, inner=768, vocabulary=24576),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A weight [outputs, inputs] and where it is found first."""

    name: str
    outputs: int
    inputs: int

    @property
    def out_dtype(self) -> torch.dtype:
        """Of a head, sums are kept."""
        return torch.float32 if self.name.endswith("head") else torch.bfloat16

    def floor_bytes(self, rows: int) -> int:
        """Bytes that the product has to move."""
        operands = 2 * self.inputs * (self.outputs + rows)
        return operands + rows * self.outputs * self.out_dtype.itemsize


def main() -> int:
    """Time, print and write; 1 if two tiles gave different bits."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("result", type=Path, help="where to write the figures, as JSON")
    options.add_argument("--seconds", type=float, default=150.0, help="stop after that long")
    options.add_argument("--border", action="store_true", help="where the library serves")
    asked = options.parse_args()
    deadline = time.monotonic() + asked.seconds
    shapes = list(all_shapes())
    if asked.border:
        with torch.cuda.stream(torch.cuda.Stream()):
            entries = list(measure_border(shapes, deadline))
        asked.result.write_text(json.dumps(entries))
        return 0
    compile_tiles(shapes)
    print(f"{len(shapes)} shapes; tiles compiled, {deadline - time.monotonic():.0f} s left")
    with torch.cuda.stream(torch.cuda.Stream()):
        figures = measure(shapes, deadline)
    figures["tables"] = {height: suggested_table(figures["entries"], height) for height in HEIGHTS}
    for height, table in figures["tables"].items():
        print(f"{height}: (\n" + "".join(f"    {row}\n" for row in table) + ")")
    asked.result.write_text(json.dumps(figures))
    print(f"{len(figures['entries'])} entries, {len(figures['unequal'])} unequal: {asked.result}")
    return 1 if figures["unequal"] else 0


def all_shapes() -> Iterator[Shape]:
    """The distinct weights of all models on one and two ranks."""
    seen = set()
    for name, sizes in MODELS.items():
        for ranks in (1, 2):
            if ranks == 2 and name.startswith("smollm2"):
                continue
            for part, outputs, inputs in _weights(sizes, ranks):
                if (outputs, inputs) not in seen:
                    seen.add((outputs, inputs))
                    where = f"{name}{' on two' if ranks == 2 else ''} {part}"
                    yield Shape(name=where, outputs=outputs, inputs=inputs)


def compile_tiles(shapes: list[Shape]) -> None:
    """Fill the compiler's cache on all cores: a kernel is the same for all weights of a kind."""
    wanted = {
        (tile, shape.inputs % tile.depth == 0, shape.out_dtype)
        for shape in shapes
        for rows in HEIGHTS
        for tile in candidates(shape.outputs, shape.inputs, rows)
    }
    spawn = multiprocessing.get_context("spawn")
    workers = max(1, min(8, len(os.sched_getaffinity(0)) - 2))
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        list(pool.map(_compile, sorted(wanted, key=str), chunksize=4))


def measure(shapes: list[Shape], deadline: float) -> dict[str, Any]:
    """Time the shapes one by one until the deadline."""
    buffer = torch.randn(
        max(2 * shape.outputs * shape.inputs for shape in shapes),
        dtype=torch.bfloat16,
        device="cuda",
    )
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_tb_s": read_bytes_per_s(buffer.view(torch.float32)) / 1e12,
        "entries": [],
        "unequal": [],
    }
    defaults = {
        shape: {rows: time_default(shape, rows, buffer) for rows in ROWS} for shape in shapes
    }
    # What graphs held stays reserved until it is asked for.
    torch.cuda.empty_cache()
    forbid_split_k()
    for shape in shapes:
        if time.monotonic() > deadline:
            print(f"out of time before {shape.name}")
            break
        entries, unequal = measure_shape(shape, buffer)
        for entry in entries:
            entry["default_us"] = defaults[shape][entry["rows"]]
            entry["floor_us"] = shape.floor_bytes(entry["rows"]) / figures["read_tb_s"] / 1e6
            print(_line(shape, entry), flush=True)
        figures["entries"] += entries
        figures["unequal"] += unequal
    return figures


def measure_shape(shape: Shape, buffer: Tensor) -> tuple[list[dict[str, Any]], list[str]]:
    """Time and compare all candidates of a shape: one entry per row count, and what differed."""
    weights = _cold_copies(shape, buffer)
    x = torch.randn(BORDER - 1, shape.inputs, dtype=torch.bfloat16, device="cuda")
    serving = candidates(shape.outputs, shape.inputs, BORDER - 1)[0]
    want = ordered_product(x, weights[0], shape.out_dtype, serving)
    found: dict[int, dict[Tile, float]] = {}
    unequal = []
    for rows in sorted(ROWS, key=lambda rows: rows not in ROWS_OF_ALL_TILES):
        found[rows] = {}
        for tile in _worth_timing(shape, rows, found):
            got = ordered_product(x[:rows], weights[0], shape.out_dtype, tile)
            if not torch.equal(got, want[:rows]):
                unequal.append(f"{shape.name} {rows} rows: {tile} and {serving}")
                print(f"DIFFERENT BITS: {unequal[-1]}")
            found[rows][tile] = time_us(_launch(x[:rows], shape.out_dtype, tile), weights)
    torch.cuda.empty_cache()
    entries = []
    for rows in ROWS:
        best = min(found[rows], key=lambda tile: found[rows][tile])
        serves = candidates(shape.outputs, shape.inputs, rows)[0]
        entries.append(
            {
                "name": shape.name,
                "outputs": shape.outputs,
                "inputs": shape.inputs,
                "rows": rows,
                "best_us": found[rows][best],
                "serving_us": found[rows][serves],
                "best": asdict(best),
                "times": [asdict(tile) | {"us": us} for tile, us in found[rows].items()],
            }
        )
    return entries, unequal


def measure_border(shapes: list[Shape], deadline: float) -> Iterator[dict[str, Any]]:
    """Time the library and a few tiles at the heights of graphs; print where a tile is faster."""
    most = max(2 * shape.outputs * shape.inputs for shape in shapes)
    buffer = torch.randn(most, dtype=torch.bfloat16, device="cuda")
    forbid_split_k()
    for shape, rows in itertools.product(shapes, MIDDLE_ROWS):
        if shape.name.endswith("head") or time.monotonic() > deadline:
            continue
        weights = _cold_copies(shape, buffer)
        x = torch.randn(rows, shape.inputs, dtype=torch.bfloat16, device="cuda")
        library = time_us(_by_library(x, shape.out_dtype), weights)
        times = {tile: time_us(_launch(x, shape.out_dtype, tile), weights) for tile in MIDDLE_TILES}
        best = min(times, key=lambda tile: times[tile])
        if times[best] < library:
            print(
                f"{shape.name} {rows} rows: library {library:.2f} us, {times[best]:.2f} by {best}"
            )
        timed = [asdict(tile) | {"us": us} for tile, us in times.items()]
        yield {"name": shape.name, "rows": rows, "library_us": library, "times": timed}


def suggested_table(entries: list[dict[str, Any]], height: int) -> list[str]:
    """Rows for the table of a height: ranges of outputs, each with the tile that loses least.

    Losses are logarithms of times over the best time, summed; a row must earn `ROW_COST` of them.
    """
    losses: dict[int, dict[Tile, list[float]]] = {}
    for entry in entries:
        if entry["rows"] in ROWS_OF_ALL_TILES and height_of(entry["rows"]) == height:
            of_tile = losses.setdefault(entry["outputs"], {})
            for timed in entry["times"]:
                tile = Tile(**{key: timed[key] for key in entry["best"]})
                loss = math.log(timed["us"] / entry["best_us"])
                of_tile.setdefault(tile, []).append(loss)
    outputs = sorted(losses)
    # best[i]: the least loss of the first i widths, and the rows that give it.
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for stop in range(1, len(outputs) + 1):
        ways = []
        most = str(outputs[stop - 1]) if stop < len(outputs) else "_ANY"
        for start in range(stop):
            loss, row = _row([losses[width] for width in outputs[start:stop]], most)
            ways.append((best[start][0] + loss + ROW_COST, [*best[start][1], row]))
        best.append(min(ways))
    return best[-1][1]


def time_default(shape: Shape, rows: int, buffer: Tensor) -> float:
    """Microseconds of torch's own product, as torch comes."""
    x = torch.randn(rows, shape.inputs, dtype=torch.bfloat16, device="cuda")
    return time_us(lambda weight: F.linear(x, weight), _cold_copies(shape, buffer))


def time_us(launch: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Microseconds of one launch, over all of `weights` in turn."""
    calls = [partial(launch, weight) for weight in weights]
    return seconds_per_call(calls, weights[0].device) * 1e6


def _row(losses: list[dict[Tile, list[float]]], most_outputs: str) -> tuple[float, str]:
    """The tile that loses least over some widths, as a row of the table; infinite if none fits."""
    common = set.intersection(*(set(of_tile) for of_tile in losses))
    if not common:
        return math.inf, ""
    summed = {tile: sum(sum(of_tile[tile]) for of_tile in losses) for tile in common}
    tile = min(common, key=lambda tile: (summed[tile], str(tile)))
    worst = math.exp(max(max(of_tile[tile]) for of_tile in losses))
    sizes = f"{tile.outputs}, {tile.rows}, {tile.depth}, {tile.warps}, {tile.stages}"
    return summed[tile], f"({most_outputs}, _ANY, _tile({sizes})),  # worst {worst:.2f} of the best"


def _weights(sizes: Sizes, ranks: int) -> Iterator[tuple[str, int, int]]:
    yield "qkv", (sizes.queries + 2 * sizes.keys) // ranks, sizes.hidden
    yield "o", sizes.hidden, sizes.queries // ranks
    yield "gate_up", 2 * sizes.inner // ranks, sizes.hidden
    yield "down", sizes.hidden, sizes.inner // ranks
    yield "head", sizes.vocabulary // ranks, sizes.hidden


def _cold_copies(shape: Shape, buffer: Tensor) -> list[Tensor]:
    """Weights side by side that together do not fit the cache: noise, and no two the same."""
    size = shape.outputs * shape.inputs
    count = max(2, -(-COLD_BYTES // (2 * size)))
    return list(buffer[: count * size].view(count, shape.outputs, shape.inputs))


def _worth_timing(shape: Shape, rows: int, found: dict[int, dict[Tile, float]]) -> list[Tile]:
    every = candidates(shape.outputs, shape.inputs, rows)
    if rows in ROWS_OF_ALL_TILES:
        return every
    known = next(r for r in found if r != rows and height_of(r) == height_of(rows))
    best = sorted(found[known], key=lambda tile: found[known][tile])[:KEPT]
    return [*best, *(tile for tile in every[:1] if tile not in best)]


def _launch(x: Tensor, out_dtype: torch.dtype, tile: Tile) -> Callable[[Tensor], Tensor]:
    return lambda weight: ordered_product(x, weight, out_dtype, tile)


def _by_library(x: Tensor, out_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda weight: library_product(x, weight.T, out_dtype)


def _compile(kind: tuple[Tile, bool, torch.dtype]) -> None:
    tile, even, out_dtype = kind
    inputs = 2 * tile.depth + (0 if even else 16)
    x = torch.zeros(16, inputs, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(256, inputs, dtype=torch.bfloat16, device="cuda")
    ordered_product(x, weight, out_dtype, tile)


def _line(shape: Shape, entry: dict[str, Any]) -> str:
    best = entry["best"]
    tile = ", ".join(str(best[key]) for key in ("outputs", "rows", "depth", "warps", "stages"))
    speed = shape.floor_bytes(entry["rows"]) / entry["best_us"] / 1e6
    return (
        f"{shape.name:28} {shape.outputs:6} {shape.inputs:5} {entry['rows']:2} rows: "
        f"best {entry['best_us']:7.2f} us ({tile}), serving {entry['serving_us']:7.2f}, "
        f"torch {entry['default_us']:7.2f}, floor {entry['floor_us']:7.2f}; {speed:.2f} TB/s"
    )


if __name__ == "__main__":
    sys.exit(main())
