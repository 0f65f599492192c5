"""Paged attention on the CPU, in fixed tiles: a query's bits do not depend on its company.

One definition serves prompts, chunks and decoding. Keys are taken in pages of PAGE tokens at
absolute positions. For a query: s = q k^T * scale, m = max of all visible s, p = exp(s - m)
(rounded to the cache's dtype), then sum(p) and p v page by page, added left to right. Pages a
query cannot see add exact zeros.

The products run as batched matrix products of one fixed tile: NARROW query rows (a decode row
with its whole query group, or a few prompt tokens) or WIDE rows, times one page. A row's bits
inside such a product depend neither on the batch nor on its place in the tile, and are the same in
both tiles as long as no thread takes fewer than four rows; `ops/exactness.py` proves it at start
and otherwise has the products run on one thread. Reference: `ops/reference/attention.py`.

Shape letters: T tokens, E tiles, R rows of a tile, P (tile, page) pairs, G query heads of a KV
head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64
"""Keys of one page: the KV block."""
NARROW = 16
"""Rows of the small tile."""
WIDE = 128
"""Rows of the large tile."""
VECTOR = 8
"""Products are this many channels wide, or a multiple."""
_SCRATCH_ROWS = 65536
"""Most score rows (PAGE floats each) that a batch of tiles aims for: the scratch stays in cache."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Local heads of a rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class TileBatch:
    """Tiles of one height, those with most pages first, and the pages they read.

    The pairs are ordered by the ordinal of the page within its tile, then by tile, so that pairs
    `steps[j]` are page j of tiles [0, stop - start).
    """

    query_rows: Tensor  # [E * kv_heads * R] rows of q.view(T * heads, head_dim)
    num_tiles: int
    height: int
    pair_tile: Tensor  # [P]
    pair_block: Tensor  # [P]
    steps: tuple[tuple[int, int], ...]
    hidden: Tensor  # [P, 1, R, PAGE] bool: keys the row may not see


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one step share; made once a step for each window in use."""

    shape: AttentionShape
    batches: tuple[TileBatch, ...]
    output_rows: Tensor  # [T * heads] rows of the tiles' outputs, batch after batch


def plan_attention(
    shape: AttentionShape,
    starts: Sequence[int],
    counts: Sequence[int],
    block_table: Tensor,
    window: int = 0,
) -> AttentionPlan:
    """Lay out the rows of a step: row i has queries at positions [starts[i], starts[i]+counts[i]).

    block_table [rows, blocks] int64 on the device of the cache: the block of each page of the
    row's request. The keys of the step itself are already in the cache. `window` as in the
    reference.
    """
    narrow: list[_Tile] = []
    wide: list[_Tile] = []
    token = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        height = NARROW if count * shape.group <= NARROW else WIDE
        height = max(height, -(-shape.group // NARROW) * NARROW)
        per_tile = height // shape.group
        for first in range(0, count, per_tile):
            length = min(per_tile, count - first)
            tile = _Tile(row, token + first, start + first, length, height, window)
            (narrow if height == NARROW else wide).append(tile)
        token += count
    batches = []
    output_rows = torch.empty(token, shape.num_heads, dtype=torch.int64)
    base = 0
    for tiles in (*_cache_sized(narrow, shape), *_cache_sized(wide, shape)):
        batches.append(_tile_batch(shape, tiles, block_table, base, output_rows))
        base += batches[-1].query_rows.numel()
    return AttentionPlan(shape, tuple(batches), output_rows.flatten().to(block_table.device))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, threads: int = 0
) -> Tensor:
    """Attention of the step's queries over the paged cache.

    q [T, heads, head_dim]; caches [blocks, kv_heads, PAGE, head_dim]. Returns [T, heads, head_dim]
    in the dtype of q. `threads` > 0: run the products on that many threads.
    """
    shape = plan.shape
    flat = q.reshape(-1, shape.head_dim)
    with _threads(threads):
        parts = [
            _attend_tiles(flat, k_cache, v_cache, batch, shape, scale) for batch in plan.batches
        ]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.index_select(0, plan.output_rows).view(q.shape).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Tile:
    """`length` consecutive queries of one row: token `token` of the step, position `position`."""

    row: int
    token: int
    position: int
    length: int
    height: int
    window: int

    @property
    def first_page(self) -> int:
        return max(self.position - self.window + 1, 0) // PAGE if self.window else 0

    @property
    def num_pages(self) -> int:
        return (self.position + self.length - 1) // PAGE + 1 - self.first_page


def _tile_batch(
    shape: AttentionShape, tiles: list[_Tile], block_table: Tensor, base: int, output_rows: Tensor
) -> TileBatch:
    height, group, kv_heads = tiles[0].height, shape.group, shape.num_kv_heads
    token = torch.tensor([tile.token for tile in tiles])[:, None]
    length = torch.tensor([tile.length for tile in tiles])[:, None]
    position = torch.tensor([tile.position for tile in tiles])[:, None]
    row = torch.arange(height)
    # Rows past the tile's queries repeat its last query: finite numbers that nobody reads.
    query = torch.minimum(row[None, :] // group, length - 1)  # [E, R]
    head = (row % group)[None, None, :] + group * torch.arange(kv_heads)[None, :, None]
    query_rows = (token + query)[:, None, :] * shape.num_heads + head  # [E, kv_heads, R]
    place = base + torch.arange(query_rows.numel()).view(query_rows.shape)
    used = (row[None, :] < length * group)[:, None, :].expand_as(query_rows)
    output_rows.view(-1)[query_rows[used]] = place[used]

    pages = [tile.num_pages for tile in tiles]
    steps: list[tuple[int, int]] = []
    pair_tile: list[int] = []
    pair_page: list[int] = []
    start = 0
    for ordinal in range(pages[0]):
        alive = sum(1 for count in pages if count > ordinal)
        steps.append((start, start + alive))
        pair_tile += range(alive)
        pair_page += [tiles[e].first_page + ordinal for e in range(alive)]
        start += alive
    tile_index, page_index = torch.tensor(pair_tile), torch.tensor(pair_page)
    rows = torch.tensor([tile.row for tile in tiles])
    device = block_table.device
    block = block_table[rows[tile_index].to(device), page_index.to(device)]
    key = page_index[:, None, None, None] * PAGE + torch.arange(PAGE)
    at = (position + query)[tile_index][:, None, :, None]
    hidden = key > at
    if tiles[0].window:
        hidden |= key <= at - tiles[0].window
    return TileBatch(
        query_rows.flatten().to(device),
        len(tiles),
        height,
        tile_index.to(device),
        block,
        tuple(steps),
        hidden.to(device),
    )


def _cache_sized(tiles: list[_Tile], shape: AttentionShape) -> Iterator[list[_Tile]]:
    """Split tiles of one height, those with most pages first, into batches of bounded scratch."""
    tiles.sort(key=lambda tile: -tile.num_pages)
    start = rows = 0
    for end, tile in enumerate(tiles):
        more = tile.num_pages * tile.height * shape.num_kv_heads
        if end > start and rows + more > _SCRATCH_ROWS:
            yield tiles[start:end]
            start, rows = end, 0
        rows += more
    if tiles:
        yield tiles[start:]


def _attend_tiles(
    flat_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: TileBatch,
    shape: AttentionShape,
    scale: float,
) -> Tensor:
    """Outputs of a batch's tiles as rows [E * kv_heads * R, head_dim] fp32."""
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    tiles = (batch.num_tiles, kv_heads, batch.height)
    pairs = (-1, kv_heads, batch.height)
    q = _widened(flat_q.index_select(0, batch.query_rows).float()).view(*tiles, -1)
    k = _widened(k_cache.index_select(0, batch.pair_block).float()).flatten(0, 1)
    v = _widened(v_cache.index_select(0, batch.pair_block).float()).flatten(0, 1)

    rows = q.index_select(0, batch.pair_tile).flatten(0, 1)
    scores = torch.bmm(rows, k.transpose(1, 2)).view(*pairs, PAGE).mul_(scale)
    scores.masked_fill_(batch.hidden, float("-inf"))
    peaks = scores.amax(-1, keepdim=True)
    top = peaks[: batch.num_tiles].clone()
    for start, stop in batch.steps[1:]:
        seen = top[: stop - start]
        torch.maximum(seen, peaks[start:stop], out=seen)

    weights = scores.sub_(top.index_select(0, batch.pair_tile)).exp_()
    if k_cache.dtype != torch.float32:
        weights = weights.to(k_cache.dtype).float()
    sums = weights.sum(-1, keepdim=True)
    products = torch.bmm(weights.flatten(0, 1), v).view(*pairs, v.shape[-1])
    total, out = sums[: batch.num_tiles], products[: batch.num_tiles]
    for start, stop in batch.steps[1:]:
        total[: stop - start] += sums[start:stop]
        out[: stop - start] += products[start:stop]
    return (out / total).flatten(0, 2)[:, :dim]


def _widened(x: Tensor) -> Tensor:
    """Pad the last dimension with zeros to whole vectors: a ragged end has bits of its own."""
    ragged = -x.shape[-1] % VECTOR
    return torch.nn.functional.pad(x, (0, ragged)) if ragged else x


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count <= 0 or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
