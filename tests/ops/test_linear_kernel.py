"""The ordered product: against the formula, in every tile, and a row's bits in any company.

The interpreter computes a tile with NumPy, whose order of a sum follows the tile's shape. So what
must be equal in every tile is tested there on small whole numbers, whose sums are exact in any
order; compiled, on noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close
from tests.ops import kernel_rig
from tests.ops.kernel_rig import DEVICE, DTYPES, IS_GPU, assert_same_rows
from unisono.ops.kernels import linear as kernels
from unisono.ops.kernels.linear import (
    OrderedLinear,
    Tiled,
    Verdict,
    Verdicts,
    ordered_product,
    pack_head,
    pack_linear,
)
from unisono.ops.kernels.linear_tiles import BORDER, Tile, candidates, tall_tile
from unisono.ops.reference.linear import linear

pytestmark = kernel_rig.MARKS

BOUNDS = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
SUM_BOUND = 1e-5
"""Of a sum kept in fp32: a tensor core cuts off what does not fit where an adder rounds."""
ODD_SHAPES = [(7, 5), (136, 72), (72, 136), (65, 576)] + ([(1003, 576)] if IS_GPU else [])
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    with kernel_rig.kept_blas_settings():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 33, 70])
@pytest.mark.parametrize(("out_features", "in_features"), ODD_SHAPES)
@pytest.mark.usefixtures("nan_filled_empty")
def test_against_the_formula(
    out_features: int, in_features: int, rows: int, dtype: torch.dtype
) -> None:
    x, weight = _noise(rows, in_features, dtype), _noise(out_features, in_features, dtype)
    want = linear(x.double(), weight.double())
    got = pack_linear(weight, {})(x)
    assert got.dtype == dtype
    assert_close("linear", got, want, BOUNDS[dtype])
    got = pack_head(weight, {})(x)
    assert got.dtype == torch.float32
    assert_close("head", got, want, SUM_BOUND)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(1003, 576)] if IS_GPU else [(72, 72), (40, 300)],
)
@pytest.mark.usefixtures("nan_filled_empty")
def test_every_tile_gives_the_same_bits(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    weight, x = _values(out_features, in_features, dtype), _values(18, in_features, dtype)
    tiles = _all_tiles(out_features, in_features, dtype)
    want = ordered_product(x, weight, torch.float32, tiles[0])
    if not IS_GPU:
        assert torch.equal(want, x.float() @ weight.float().T)
    for tile in tiles:
        # Each is compiled anew; other tests round.
        for out_dtype in {torch.float32} if IS_GPU else {dtype, torch.float32}:
            got = ordered_product(x, weight, out_dtype, tile)
            assert_same_rows(str(tile), got, want.to(out_dtype))


@pytest.mark.usefixtures("nan_filled_empty")
def test_every_place_of_a_grid_of_many_tiles_is_computed_once() -> None:
    """More row tiles than are computed together, and neither side a multiple of its tile."""
    weight, x = _values(50, 40, torch.float16), _values(150, 40, torch.float16)
    tile = Tile(outputs=16, rows=16, depth=64, warps=4, stages=3)
    want = torch.cat([ordered_product(part, weight, torch.float32, tile) for part in x.split(16)])
    assert_same_rows("150 rows", ordered_product(x, weight, torch.float32, tile), want)
    assert_close("150 rows", want, x.double() @ weight.double().T, SUM_BOUND)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("nan_filled_empty")
def test_a_row_keeps_its_bits_alone_in_company_and_at_every_border(dtype: torch.dtype) -> None:
    out_features, in_features = (1003, 576) if IS_GPU else (50, 72)
    product = pack_linear(_values(out_features, in_features, dtype), {})
    x = _values(130, in_features, dtype)
    whole = product(x)
    for rows in range(1, 131) if IS_GPU else BORDERS:
        assert_same_rows(f"first {rows} rows", product(x[:rows]), whole[:rows])
        assert_same_rows(f"last {rows} rows", product(x[-rows:]), whole[-rows:])
    order = torch.randperm(130).to(DEVICE)
    assert_same_rows("shuffled", product(x[order]), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 40, 100])
def test_nan_stays_in_its_row(rows: int, dtype: torch.dtype) -> None:
    product = pack_linear(_values(40, 72, dtype), {})
    x = _values(rows, 72, dtype)
    want = product(x)
    x[3:] = float("nan")
    got = product(x)
    assert_same_rows("rows without NaN", got[:3], want[:3])
    assert bool(got[3:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_neighbours_in_memory_are_not_read_past_the_edge(
    dtype: torch.dtype,
) -> None:
    """The rows and inputs that pad a tile are zeros, never what lies behind the tensor."""
    storage = kernel_rig.poisoned(2, 200 * 72, dtype=dtype)
    weight = storage[0, : 19 * 72].view(19, 72).copy_(_values(19, 72, dtype))
    x = storage[1, : 3 * 72].view(3, 72).copy_(_values(3, 72, dtype))
    got = pack_head(weight, {})(x)
    assert_close("head", got, x.double() @ weight.double().T, SUM_BOUND)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    weight, none = _values(7, 5, dtype), _values(0, 5, dtype)
    assert pack_linear(weight, {})(none).shape == (0, 7)
    assert pack_linear(weight, {})(none).dtype == dtype
    assert pack_head(weight, {})(none).dtype == torch.float32


def test_a_view_is_computed_like_its_copy() -> None:
    weight, wide = _values(2 * 40, 72, DTYPES[0]), _values(20, 2 * 72, DTYPES[0])
    product = pack_linear(weight[::2], {})
    assert_same_rows("every other weight row", product(wide[:, :72]), product(wide[:, :72].clone()))
    want = wide[:, :72].double() @ weight[::2].double().T
    assert_close("linear", product(wide[:, :72]), want, BOUNDS[DTYPES[0]])


def test_the_head_keeps_what_its_dtype_cannot_hold() -> None:
    dtype = DTYPES[-1]
    weight, x = torch.ones(3, 64, dtype=dtype, device=DEVICE), _ones(1, 64, dtype)
    x[0, 0] = 4096.0
    assert pack_head(weight, {})(x).tolist() == [[4159.0] * 3]


@pytest.mark.parametrize(
    ("tall", "served"), [("cublaslt", [64, 100]), ("tiled", []), ("one tile", [])]
)
def test_the_verdict_says_what_serves_from_the_border_up(
    tall: str, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, tiles = [], set()

    def library(x: Tensor, transposed: Tensor, out_dtype: torch.dtype) -> Tensor:
        calls.append(len(x))
        return x @ transposed

    def ours(x: Tensor, tiled: Tiled, out_dtype: torch.dtype) -> Tensor:
        tiles.add(tiled.tile)
        return x @ tiled.weight.T

    monkeypatch.setattr(kernels, "library_product", library)
    monkeypatch.setattr(kernels, "tiled_product", ours)
    weight, dtype = _ones(40, 72, torch.float16), torch.float16
    verdict = Verdict(shape=(40, 72), dtype=dtype, out_dtype=dtype, tall=tall, reason="a test")
    product = OrderedLinear(weight, verdict)
    for rows in (0, 1, 16, 17, BORDER - 1, BORDER, 100):
        product(_ones(rows, 72, dtype))
    assert calls == served
    assert len(tiles) == {"cublaslt": 3, "tiled": 5, "one tile": 1}[tall]
    assert product.verdict is verdict
    assert str(verdict) == f"float16 [40, 72]: {tall} from 64 rows up (a test)"


def test_a_table_may_know_better_than_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(kernels, "library_product", lambda x, *_: calls.append(len(x)))
    monkeypatch.setattr(kernels, "tiled_product", lambda x, tiled, _: calls.append(tiled.tile.rows))
    weight, dtype = _ones(1024, 72, torch.float16), torch.float16
    verdict = Verdict(
        shape=(1024, 72), dtype=dtype, out_dtype=dtype, tall="cublaslt", reason="a test"
    )
    product = OrderedLinear(weight, verdict)
    for rows in (BORDER - 1, BORDER, 128, 129):
        product(_ones(rows, 72, dtype))
    assert calls == [64, 64, 64, 129]


def test_equal_shapes_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    judge = kernels._judge

    def counted(weight: Tensor, out_dtype: torch.dtype) -> Verdict:
        judged.append(tuple(weight.shape))
        return judge(weight, out_dtype)

    monkeypatch.setattr(kernels, "_judge", counted)
    verdicts: Verdicts = {}
    for shape in ((40, 72), (40, 72), (72, 40)):
        pack_linear(_values(*shape, torch.float16), verdicts)
    pack_head(_values(40, 72, torch.float16), verdicts)
    assert judged == [(40, 72), (72, 40), (40, 72)]
    assert [verdict.out_dtype for verdict in verdicts.values()] == [
        torch.float16,
        torch.float16,
        torch.float32,
    ]


def _all_tiles(out_features: int, in_features: int, dtype: torch.dtype) -> list[Tile]:
    """Every tile that could serve the weight at any row count, without repetition."""
    narrow = [
        tile for rows in (1, 32, 63) for tile in candidates(out_features, in_features, rows, dtype)
    ]
    tall = [tall_tile(rows, dtype) for rows in (64, 65)]
    # Stages and warps do not exist in the interpreter.
    by_size = {
        (t.outputs, t.rows, t.depth, *((t.warps, t.stages) if IS_GPU else ())): t
        for t in narrow + tall
    }
    return list(by_size.values())


def _noise(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns).to(DEVICE, dtype)


def _values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Noise where kernels are compiled, else whole numbers whose sums are exact."""
    if IS_GPU:
        return _noise(rows, columns, dtype)
    return torch.randint(-2, 3, (rows, columns)).to(dtype)


def _ones(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(rows, columns, dtype=dtype, device=DEVICE)
