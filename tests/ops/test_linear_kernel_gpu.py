"""The ordered product on a GPU at the sizes of real models, and what is proven at start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close
from tests.ops import kernel_rig
from tests.ops.kernel_rig import assert_same_rows
from unisono.ops.kernels import linear as kernels
from unisono.ops.kernels.linear import (
    Verdict,
    Verdicts,
    forbid_split_k,
    library_product,
    ordered_product,
    pack_head,
    pack_linear,
)
from unisono.ops.kernels.linear_tiles import Tile, candidates, tall_tile

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]
BOUNDS = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
FP32_BOUND = 4e-6
SUM_BOUND = 1e-4
"""Of a sum kept in fp32: a tensor core cuts off what does not fit, at each 16 inputs."""
REAL_SHAPES = [
    (4096, 1024),  # Qwen3-0.6B: qkv
    (1024, 3072),  # down
    (6144, 4096),  # Qwen3-8B: qkv
    (4096, 12288),  # down
    (12288, 4096),  # gate_up on one of two ranks
    (4096, 6144),  # down on one of two ranks
    (960, 576),  # SmolLM2-135M: qkv
    (640, 576),  # qkv on the larger of two ranks
    (576, 1536),  # down
]
SPANS = [
    *((0, rows) for rows in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 1000)),
    *((start, start + rows) for start in (7, 333) for rows in (1, 5, 40, 63, 64, 300)),
    *((4096 - rows, 4096) for rows in (1, 63, 64, 100)),
]


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    with kernel_rig.kept_blas_settings():
        yield


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("out_features", "in_features"), REAL_SHAPES)
@pytest.mark.usefixtures("nan_filled_empty")
def test_rows_keep_their_bits_from_one_to_4096(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    verdicts: Verdicts = {}
    weight, x = _noise(out_features, in_features, dtype), _noise(4096, in_features, dtype)
    product = pack_linear(weight, verdicts)
    _assert_spans_keep_bits(product, x, verdicts)
    part = slice(40, 140)
    want = x[part].double() @ weight.double().T
    assert_close("linear", product(x)[part], want, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("vocabulary", "hidden"), [(151936, 1024), (75968, 4096), (49152, 576)])
@pytest.mark.usefixtures("nan_filled_empty")
def test_head_rows_keep_their_bits_across_the_border(
    vocabulary: int, hidden: int, dtype: torch.dtype
) -> None:
    verdicts: Verdicts = {}
    weight, x = _noise(vocabulary, hidden, dtype), _noise(300, hidden, dtype)
    product = pack_head(weight, verdicts)
    whole = product(x)
    assert whole.dtype == torch.float32
    for rows in (1, 16, 17, 33, 63, 64, 65, 128, 256):
        for first in {0, 300 - rows}:
            assert_same_rows(
                f"rows {first} to {first + rows}; {_told(verdicts)}",
                product(x[first : first + rows]),
                whole[first : first + rows],
            )
    for rows in (slice(0, 40), slice(200, 300)):
        want = x[rows].double() @ weight[:5000].double().T
        assert_close("head", product(x[rows])[:, :5000], want, SUM_BOUND)


@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (1024, 3072), (4096, 4096)])
@pytest.mark.usefixtures("nan_filled_empty")
def test_fp32_rows_keep_their_bits_from_one_to_4096(out_features: int, in_features: int) -> None:
    verdicts: Verdicts = {}
    weight = _noise(out_features, in_features, torch.float32)
    x = _noise(4096, in_features, torch.float32)
    product = pack_linear(weight, verdicts)
    assert [verdict.tall for verdict in verdicts.values()] == ["tiled"], _told(verdicts)
    _assert_spans_keep_bits(product, x, verdicts)
    want = x[:100].double() @ weight.double().T
    assert_close("linear", product(x[:100]), want, FP32_BOUND)


@pytest.mark.parametrize(
    ("out_features", "in_features", "dtype"),
    [
        (1024, 3072, torch.bfloat16),
        (4096, 2048, torch.bfloat16),
        (576, 1536, torch.bfloat16),
        (1024, 3072, torch.float16),
        (4096, 1024, torch.float32),
    ],
)
def test_every_candidate_gives_the_same_bits(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    """scripts/tune_linear.py compares them at every shape that it times."""
    weight, x = _noise(out_features, in_features, dtype), _noise(200, in_features, dtype)
    tiles = {
        *(
            tile
            for rows in (1, 32, 63)
            for tile in candidates(out_features, in_features, rows, dtype)
        ),
        *(tall_tile(rows, dtype) for rows in (64, 65)),
    }
    first, *others = sorted(tiles, key=str)
    want = ordered_product(x, weight, torch.float32, first)
    for tile in others:
        got = ordered_product(x, weight, torch.float32, tile)
        assert_same_rows(f"{tile} and {first}", got, want)


@pytest.mark.parametrize("dtype", HALVES)
def test_cublaslt_serves_the_shapes_of_qwen3_8b(dtype: torch.dtype) -> None:
    """Measured on an H200; on another card a shape that fails is served by the tiles, slower."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper card")
    verdicts: Verdicts = {}
    for shape in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
        pack_linear(_noise(*shape, dtype), verdicts)
    pack_head(_noise(151936, 4096, dtype), verdicts)
    print(*verdicts.values(), sep="\n")
    assert {verdict.tall for verdict in verdicts.values()} == {"cublaslt"}, _told(verdicts)


def test_a_library_that_differs_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, transposed: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = library_product(x, transposed, out_dtype)
        if len(x) >= 256:
            out[len(x) // 2, 3] += 1.0
        return out

    monkeypatch.setattr(kernels, "library_product", wrong)
    (verdict,) = _judged(640, 576, torch.bfloat16)
    assert (verdict.tall, verdict.reason) == ("tiled", "cuBLASLt differs at 256 rows")


def test_tiles_that_differ_leave_one(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tall_tile(1000, torch.bfloat16)

    def wrong(x: Tensor, weight: Tensor, out_dtype: torch.dtype, tile: Tile) -> Tensor:
        out = ordered_product(x, weight, out_dtype, tile)
        return out + 1.0 if tile == odd else out

    monkeypatch.setattr(kernels, "ordered_product", wrong)
    (verdict,) = _judged(640, 576, torch.bfloat16)
    assert verdict.tall == "one tile"
    assert verdict.reason.startswith(str(odd))


def test_rows_that_start_anywhere_are_not_for_the_library() -> None:
    (verdict,) = _judged(1003, 576, torch.bfloat16)
    assert (verdict.tall, verdict.reason) == (
        "tiled",
        "rows do not start on multiples of 16 bytes",
    )


def test_split_k_is_forbidden() -> None:
    forbid_split_k()
    forbidden = (False, False)
    assert torch._C._get_cublas_allow_bf16_reduced_precision_reduction() == forbidden
    assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == forbidden
    assert "cublaslt" in str(torch.backends.cuda.preferred_blas_library()).lower()


def test_a_weight_of_more_than_2_31_elements() -> None:
    out_features, in_features = 151936, 14400
    assert out_features * in_features > 1 << 31
    weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device="cuda").normal_()
    x, last = _noise(100, in_features, torch.bfloat16), slice(out_features - 3000, None)
    for rows in (3, 63):
        tile = candidates(out_features, in_features, rows)[0]
        got = ordered_product(x[:rows], weight, torch.float32, tile)
        want = x[:rows].double() @ weight[last].double().T
        assert_close(f"{rows} rows", got[:, last], want, SUM_BOUND)
    got = ordered_product(x, weight, torch.float32, tall_tile(100, torch.bfloat16))
    assert_close("tall", got[:, last], x.double() @ weight[last].double().T, SUM_BOUND)


def test_a_result_of_more_than_2_31_elements() -> None:
    rows, out_features = 14200, 151936
    assert rows * out_features > 1 << 31
    weight, x = _noise(out_features, 64, torch.bfloat16), _noise(rows, 64, torch.bfloat16)
    got = ordered_product(x, weight, torch.float32, tall_tile(rows, torch.bfloat16))
    want = x[-50:].double() @ weight.double().T
    assert_close("last rows", got[-50:], want, SUM_BOUND)


@pytest.mark.parametrize("rows", [1, 40, 64, 300])
@pytest.mark.parametrize("pack", [pack_linear, pack_head])
def test_a_captured_product_is_the_eager_one(pack, rows: int) -> None:
    product = pack(_noise(4096, 1024, torch.bfloat16), {})
    x = _noise(rows, 1024, torch.bfloat16)
    want = product(x)
    static = torch.zeros_like(x)
    product(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = product(static)
    static.copy_(x)
    graph.replay()
    assert_same_rows("replayed", got, want)


def _judged(out_features: int, in_features: int, dtype: torch.dtype) -> list[Verdict]:
    verdicts: Verdicts = {}
    pack_linear(_noise(out_features, in_features, dtype), verdicts)
    return list(verdicts.values())


def _assert_spans_keep_bits(product, x: Tensor, verdicts: Verdicts) -> None:
    whole = product(x)
    for start, stop in SPANS:
        assert_same_rows(
            f"rows {start} to {stop}; {_told(verdicts)}", product(x[start:stop]), whole[start:stop]
        )


def _told(verdicts: Verdicts) -> str:
    return "; ".join(map(str, verdicts.values()))


def _noise(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype)
