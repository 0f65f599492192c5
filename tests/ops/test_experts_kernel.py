"""Routing and experts on the GPU: by the reference, and one answer for a token in any company."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.ops import graph_rig, kernel_rig
from unisono.ops.kernels import experts, routing
from unisono.ops.reference import experts as reference
from unisono.ops.reference.linear import linear

pytestmark = [*kernel_rig.MARKS, pytest.mark.usefixtures("nan_filled_empty")]
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPE = torch.bfloat16 if kernel_rig.IS_GPU else torch.float16


@pytest.fixture(autouse=True)
def products_that_do_not_show_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_rig.make_products_hide_their_shape(monkeypatch)


def some(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).to(kernel_rig.DEVICE)


def some_ids(tokens: int, chosen: int, num_experts: int) -> Tensor:
    """Those of a router, of which some experts are liked better."""
    liking = torch.rand(tokens, num_experts) * torch.rand(num_experts)
    return liking.topk(chosen, dim=1).indices.sort(dim=1).values.to(kernel_rig.DEVICE)


def by_reference(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, extra: Tensor | None
) -> Tensor:
    def pack_linear(weight: Tensor, bias: None) -> partial[Tensor]:
        return partial(linear, weight=weight)

    packed = reference.pack_experts(gate_up.cpu(), down.cpu(), pack_linear=pack_linear)
    return packed(x.cpu(), weights.cpu(), ids.cpu(), None if extra is None else extra.cpu())


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_experts", "chosen"), [(6, 2), (5, 5), (60, 4), (512, 10)])
def test_routes(num_experts: int, chosen: int, renormalise: bool, dtype: torch.dtype) -> None:
    logits = some(7, num_experts, dtype=dtype)
    weights, ids = routing.route_experts(logits, chosen, renormalise)
    want, want_ids = reference.route_experts(logits.cpu(), chosen, renormalise)
    assert ids.tolist() == want_ids.tolist()
    assert_close("weights", weights, want, BOUND[dtype])
    assert_same_bits("rounded", weights, weights.to(dtype).float())


def test_ties_go_to_the_lower_id_and_nan_takes_the_first() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        [1.0, 3.0, 1.0, 3.0, 1.0],
        [0.0] * 5,
        [1.0, nan, 2.0, 3.0, 4.0],
        [-inf, 0.0, -inf, 1.0, -inf],
    ]
    weights, ids = routing.route_experts(torch.tensor(rows, device=kernel_rig.DEVICE), 3, True)
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2], [0, 1, 2], [0, 1, 3]]
    assert bool(weights[2].isnan().all())
    assert not bool(weights[[0, 1, 3]].isnan().any())
    assert weights[3, 0].item() == 0.0


@pytest.mark.parametrize(
    ("tokens", "chosen", "num_experts", "height"),
    [
        (1, 1, 1, 16),
        (1, 3, 7, 16),
        (40, 2, 3, 16),
        (200, 8, 20, 64),
        (70, 1, 64, 16),
        (2100, 2, 5, 64),
    ],
)
def test_slots_are_grouped_by_expert(
    tokens: int, chosen: int, num_experts: int, height: int
) -> None:
    ids = some_ids(tokens, chosen, num_experts)
    groups = routing.group_by_expert(ids, num_experts, height)
    flat = ids.flatten().cpu()
    assert groups.order.tolist() == flat.sort(stable=True).indices.tolist()
    got = [tuple(tile) for tile in groups.tiles.T.tolist() if tile[2]]
    want, first = [], 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts).tolist()):
        for at in range(0, count, height):
            want.append((expert, first + at, min(height, count - at)))
        first += count
    assert got == want
    assert not bool(groups.tiles[2, len(want) :].any())


@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "chosen", "num_experts", "hidden", "width"),
    [(1, 2, 6, 64, 24), (5, 4, 4, 20, 7), (40, 1, 2, 72, 40)],
)
def test_experts_by_the_reference(
    tokens: int, chosen: int, num_experts: int, hidden: int, width: int, dtype: torch.dtype
) -> None:
    check(tokens, chosen, num_experts, hidden, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize(
    ("chosen", "num_experts", "hidden", "width"), [(8, 128, 2048, 768), (10, 512, 2048, 512)]
)
def test_real_shapes(tokens: int, chosen: int, num_experts: int, hidden: int, width: int) -> None:
    check(tokens, chosen, num_experts, hidden, width, torch.bfloat16)


def check(
    tokens: int, chosen: int, num_experts: int, hidden: int, width: int, dtype: torch.dtype
) -> None:
    """By the reference; experts that nobody takes are not read, for they are NaN."""
    ids = some_ids(tokens, chosen, num_experts)
    gate_up = some(num_experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down = some(num_experts, hidden, width, dtype=dtype) / width**0.5
    idle = torch.ones(num_experts, dtype=torch.bool, device=ids.device)
    idle[ids.flatten()] = False
    gate_up[idle], down[idle] = float("nan"), float("nan")
    x, extra = some(tokens, hidden, dtype=dtype), some(tokens, hidden, dtype=dtype)
    weights = torch.rand(tokens, chosen).to(ids.device)
    packed = experts.pack_experts(gate_up, down, proofs={})
    for more in (None, extra):
        want = by_reference(x, weights, ids, gate_up, down, more)
        assert_close("experts", packed(x, weights, ids, more), want, BOUND[dtype])


@pytest.mark.parametrize("tokens", [3, 70])
def test_a_slot_has_its_bits_in_tiles_of_every_height(tokens: int) -> None:
    # One step along the inputs: between two the interpreter rounds, where a tensor core does not.
    hidden, width = (136, 200) if kernel_rig.IS_GPU else (24, 40)
    ids, x = some_ids(tokens, 2, 3), some(tokens, hidden, dtype=DTYPE)
    gate_up = some(3, 2 * width, hidden, dtype=DTYPE) / hidden**0.5
    down = some(3, hidden, width, dtype=DTYPE) / width**0.5
    whole = experts.products(x, ids, gate_up, down, 64)
    assert_same_bits("low tiles", experts.products(x, ids, gate_up, down, 16), whole)
    for row in (0, tokens - 1):
        one = slice(row, row + 1)
        alone = experts.products(x[one], ids[one], gate_up, down, 16)
        assert_same_bits(f"token {row} alone", alone, whole[one])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernel_rig.DTYPES, ids=str)
def test_heights_agree_on_the_tensor_core(dtype: torch.dtype) -> None:
    proofs: dict = {}
    gate_up, down = some(8, 1024, 2048, dtype=dtype) / 45, some(8, 2048, 512, dtype=dtype) / 23
    packed = experts.pack_experts(gate_up, down, proofs=proofs)
    assert list(proofs.values()) == [True], "tall tiles would never be used on this card"
    ids, x = some_ids(300, 4, 8), some(300, 2048, dtype=dtype)
    weights = torch.rand(300, 4).to(ids.device)
    whole = packed(x, weights, ids, x)
    for cut in (slice(0, 1), slice(7, 30), slice(299, 300)):
        part = packed(x[cut], weights[cut], ids[cut], x[cut])
        assert_same_bits(f"tokens {cut}", part, whole[cut])


def test_no_tokens() -> None:
    logits = torch.empty(0, 4, device=kernel_rig.DEVICE)
    weights, ids = routing.route_experts(logits, 2, True)
    packed = experts.pack_experts(some(4, 8, 6, dtype=DTYPE), some(4, 6, 4, dtype=DTYPE), proofs={})
    assert packed(some(0, 6, dtype=DTYPE), weights, ids, None).shape == (0, 6)


@pytest.mark.gpu
def test_weights_of_more_elements_than_31_bits_and_many_tokens() -> None:
    num_experts, hidden, width, tokens = 700, 2048, 768, 20_001
    gate_up = torch.zeros(num_experts, 2 * width, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.zeros(num_experts, hidden, width, dtype=torch.bfloat16, device="cuda")
    first, second = some(2 * width, hidden, dtype=DTYPE) / 45, some(hidden, width, dtype=DTYPE) / 28
    gate_up[-1], down[-1] = first, second
    ids = torch.zeros(tokens, 8, dtype=torch.int64, device="cuda") + torch.arange(8).cuda()
    ids[-3:, -1] = num_experts - 1
    x, weights = some(tokens, hidden, dtype=DTYPE), torch.rand(tokens, 8).cuda()
    got = experts.pack_experts(gate_up, down, proofs={})(x, weights, ids, None)
    alone = experts.pack_experts(first[None], second[None], proofs={})
    last = torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    want = alone(x[-3:], weights[-3:, -1:].contiguous(), last, None)
    assert_same_bits("last tokens", got[-3:], want)
    assert not bool(got[:-3].any()), "experts of zeros must say zeros"


@pytest.mark.gpu
def test_a_graph_replays_them() -> None:
    packed = experts.pack_experts(
        some(16, 1024, 2048, dtype=DTYPE) / 45, some(16, 2048, 512, dtype=DTYPE) / 23, proofs={}
    )
    x, logits = some(5, 2048, dtype=DTYPE), some(5, 16, dtype=DTYPE)

    def call() -> Tensor:
        return packed(x, *routing.route_experts(logits, 4, True), x)

    assert_same_bits("graph", graph_rig.replayed(call), call())
