"""Dispatch: resolved once, replaceable from tests, honest about what it lacks."""

from __future__ import annotations

import timeit

import pytest
import torch

from unisono.ops import dispatch
from unisono.workers.config import DEVICES, SERVED_DEVICES


@pytest.mark.parametrize("device", DEVICES[1:])
def test_the_devices_said_to_be_served_are_those_with_ops(device: str) -> None:
    if device in SERVED_DEVICES:
        assert dispatch.resolve(torch.device(device), 8)
    else:
        with pytest.raises(ValueError, match=f"'{device}' has no ops"):
            dispatch.resolve(torch.device(device), 8)


def test_a_device_without_ops_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'meta' has no ops.*cpu"):
        dispatch.resolve(torch.device("meta"), 64)


def test_attention_by_name_and_nothing_else_changes() -> None:
    own, tiled, formula = (
        dispatch.resolve(torch.device("cpu"), 8, attn) for attn in ("auto", "tiled", "reference")
    )
    assert tiled.plan_attention is own.plan_attention is not formula.plan_attention
    assert formula.paged_attention is not own.paged_attention
    assert formula.rms_norm is own.rms_norm
    for attn in ("triton", "torch-flash", "flash"):
        with pytest.raises(ValueError, match=f"no attention '{attn}' on cpu"):
            dispatch.resolve(torch.device("cpu"), 8, attn)


def test_use_replaces_an_op_inside_the_block_only() -> None:
    def planted(x: torch.Tensor) -> torch.Tensor:
        return x

    with dispatch.use(silu_and_mul=planted):
        assert dispatch.resolve(torch.device("cpu"), 8).silu_and_mul is planted
    assert dispatch.resolve(torch.device("cpu"), 8).silu_and_mul is not planted


def test_use_knows_the_names() -> None:
    with pytest.raises(ValueError, match="no op named sillu"), dispatch.use(sillu=len):
        pass


def test_a_hot_call_costs_nanoseconds() -> None:
    """An op is an attribute of a resolved table: nothing is looked up per call."""
    ops = dispatch.resolve(torch.device("cpu"), 8)
    best = min(timeit.repeat(lambda: ops.rms_norm, number=10_000, repeat=5)) / 10_000
    assert best < 1e-6
