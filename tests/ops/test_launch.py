"""What a launch hands to a compiled kernel, and when it asks Triton for another one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import Parameter
from triton.tools.tensor_descriptor import TensorDescriptor

from unisono.ops.kernels import activation, launch
from unisono.ops.kernels.launch import Launchable, blocks_of, bound, launchable, power_of_two

X = torch.zeros(64)


class Kernel:
    """In the place of a kernel of Triton's: three arguments, two constants."""

    def __init__(self) -> None:
        names = [("x", False), ("number", False), ("scale", False), ("WIDTH", True), ("EVEN", True)]
        self.params = [SimpleNamespace(name=name, is_constexpr=is_) for name, is_ in names]
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self._compile(args, options)

    def _compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> SimpleNamespace:
        self.compiled.append((args, options))

        def run(*handed: Any) -> None:
            self.launched.append(handed)

        return SimpleNamespace(run=run, function=len(self.compiled), packed_metadata=("packed",))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return Kernel()


def test_the_second_launch_hands_over_addresses_and_constants_in_order(kernel: Kernel) -> None:
    launched = Launchable(kernel)
    for grid in ((5,), (6, 2)):
        launched[grid](X, 48, 0.5, EVEN=True, num_warps=4, WIDTH=72)
    assert kernel.compiled == [((X, 48, 0.5), {"EVEN": True, "num_warps": 4, "WIDTH": 72})]
    handed = (X.data_ptr(), 48, 0.5, 72, True)
    assert kernel.launched == [(6, 2, 1, 77, 1, ("packed",), None, None, None, *handed)]


def test_options_may_be_named_once(kernel: Kernel) -> None:
    launched, options = Launchable(kernel), {"EVEN": True, "num_warps": 4, "WIDTH": 72}
    often = bound(launched, **options)
    for grid in ((5,), (6, 2)):
        often.launch(grid, X, 48, 0.5)
    assert kernel.compiled == [((X, 48, 0.5), options)]
    launched[(6, 2)](X, 48, 0.5, **options)
    bound(launched, **options).launch((6, 2), X, 48, 0.5)
    handed = (X.data_ptr(), 48, 0.5, 72, True)
    assert kernel.launched == [(6, 2, 1, 77, 1, ("packed",), None, None, None, *handed)] * 3
    bound(launched, **options | {"WIDTH": 73}).launch((5,), X, 48, 0.5)
    assert len(kernel.compiled) == 2, "other options, another form"


@pytest.mark.parametrize(
    "other",
    [
        ((X[1:], 48, 0.5), {}),
        ((Parameter(X), 48, 0.5), {}),
        ((Parameter(X[1:]), 48, 0.5), {}),
        ((X, True, 0.5), {}),
        ((X, 1 << 40, 0.5), {}),
        ((X, -(1 << 40), 0.5), {}),
        ((X, 48, TensorDescriptor.from_tensor(X.view(4, 16), [4, 8])), {}),
        ((X.half(), 48, 0.5), {}),
        ((None, 48, 0.5), {}),
        ((X, 1, 0.5), {}),
        ((X, 50, 0.5), {}),
        ((X, 1 << 31, 0.5), {}),
        ((X, 48, 1), {}),
        ((X, 48, 0.5), {"WIDTH": 73}),
        ((X, 48, 0.5), {"num_warps": 8}),
        ((X, 48, 0.5), {"num_stages": 3}),
    ],
)
def test_whatever_triton_compiles_for_is_told_apart(kernel: Kernel, other: Any) -> None:
    launched, options = Launchable(kernel), {"WIDTH": 72, "EVEN": True, "num_warps": 4}
    args, changed = other
    for _ in range(2):
        launched[(1,)](X, 48, 0.5, **options)
        launched[(1,)](*args, **(options | changed))
    assert [len(kernel.compiled), len(kernel.launched)] == [2, 2]
    assert [handed[4] for handed in kernel.launched] == [1, 2], "each has its own form"


def test_numbers_of_one_kind_and_options_in_another_order(kernel: Kernel) -> None:
    launched = Launchable(kernel)
    for number in (3, 5, 1027):
        launched[(1,)](X, number, 0.25, WIDTH=1, EVEN=2)
    launched[(1,)](X, 3, 0.25, EVEN=1, WIDTH=2)
    launched[(1,)](X, 3, 0.25, EVEN=1, WIDTH=2)
    assert [len(kernel.compiled), [handed[-2:] for handed in kernel.launched]] == [
        2,
        [(1, 2), (1, 2), (2, 1)],
    ]


def test_an_argument_by_name_is_our_own_mistake(kernel: Kernel) -> None:
    with pytest.raises(AssertionError, match="come before constants"):
        Launchable(kernel)[(1,)](X, 48, scale=0.5, WIDTH=1, EVEN=2)


def test_the_interpreter_keeps_its_kernels() -> None:
    @triton.jit
    def nothing(x_ptr: tl.tensor) -> None:
        pass

    assert isinstance(launchable(nothing), Launchable) == isinstance(nothing, triton.JITFunction)


@pytest.mark.parametrize("value", [1, 2, 3, 16, 17, 1000])
def test_sizes_are_those_of_triton(value: int) -> None:
    assert power_of_two(value) == triton.next_power_of_2(value)
    assert blocks_of(value, 16) == triton.cdiv(value, 16)


@pytest.mark.gpu
def test_a_hot_launch_takes_microseconds_of_the_host() -> None:
    x = torch.zeros(1, 2 * 4096, dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(300):
        began = time.perf_counter()
        activation.silu_and_mul(x)
        times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    # 25 us where it was measured, beside other work: a step has hundreds of launches.
    assert sorted(times)[150] < 60e-6, sorted(times)[150]
