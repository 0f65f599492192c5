"""The only tolerance functions of the tests: how far two tensors may lie apart, and not at all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_close(name: str, got: Tensor, want: Tensor, rms_ratio: float) -> None:
    """Require rms(got - want) <= rms_ratio * rms(want), both over the finite elements of `want`.

    Shapes must be equal; dtypes need not (a reference may be wider). NaN and infinities must
    stand in the same places with the same sign. A `want` of zeros admits zeros only. The message
    names the ratio that was met and the worst element.
    """
    assert got.shape == want.shape, f"{name}: shape {_shape(got)}, expected {_shape(want)}"
    got64, want64 = got.detach().cpu().double(), want.detach().cpu().double()
    _assert_same_specials(name, got64, want64)
    finite = torch.isfinite(want64)
    error = torch.where(finite, got64 - want64, 0.0)
    count = max(1, int(finite.sum()))
    error_rms = math.sqrt(float(error.square().sum()) / count)
    want_rms = math.sqrt(float(torch.where(finite, want64, 0.0).square().sum()) / count)
    if error_rms <= rms_ratio * want_rms:
        return
    ratio = error_rms / want_rms if want_rms else math.inf
    worst = int(error.abs().argmax())
    raise AssertionError(
        f"{name}: relative rms {ratio:.3e}, allowed {rms_ratio:.3e}; "
        f"worst element {_describe(worst, got64, want64)}"
    )


def assert_same_bits(name: str, got: Tensor, want: Tensor) -> None:
    """Require the same dtype, shape and bits: -0.0 is not 0.0, a NaN equals its own pattern."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {_shape(got)}, expected {_shape(want)}"
    differs = (_bits(got) != _bits(want)).flatten()
    if not bool(differs.any()):
        return
    first = int(differs.int().argmax())
    raise AssertionError(
        f"{name}: {int(differs.sum())} of {differs.numel()} elements differ; "
        f"first {_describe(first, got.detach().cpu(), want.detach().cpu())}"
    )


def _assert_same_specials(name: str, got: Tensor, want: Tensor) -> None:
    """Not-finite elements are compared by kind, since their difference says nothing."""
    got_kind, want_kind = _kind(got), _kind(want)
    differs = (got_kind != want_kind).flatten()
    if not bool(differs.any()):
        return
    first = int(differs.int().argmax())
    raise AssertionError(
        f"{name}: {int(differs.sum())} of {differs.numel()} elements differ in being finite; "
        f"first {_describe(first, got, want)}"
    )


def _kind(x: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return torch.isnan(x) * 1 + torch.isposinf(x) * 2 + torch.isneginf(x) * 3


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(_BITS[x.element_size()])


def _describe(flat: int, got: Tensor, want: Tensor) -> str:
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
    return f"{list(index)}: got {got[index].item()!r}, expected {want[index].item()!r}"


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
