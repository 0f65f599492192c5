"""Recurrent states: one owner, every layer at once, and a count of allocations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.recurrent import CONFIG
from unisono.models.partition import ModelPartition
from unisono.workers.kv_cache import KVCache
from unisono.workers.memory import block_bytes
from unisono.workers.state_pool import StatePool, caches_of

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def pool(state_dtype: torch.dtype = torch.float32, tp: int = 1) -> StatePool:
    return StatePool(ModelPartition.of(CONFIG, tp), tp - 1, BF16, state_dtype, CPU)


def parts(states: StatePool) -> list[Tensor]:
    return [part for layer in states.layers for part in (layer.conv, layer.state)]


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1)])
def test_every_layer_has_the_states_of_this_rank(
    state_dtype: torch.dtype, tp: int, heads: int
) -> None:
    states = pool(state_dtype, tp)
    states.allocate(5)
    assert len(states.layers) == 2
    for layer in states.layers:
        # Two taps before a token's own; q, k and v of each head.
        assert (layer.conv.shape, layer.conv.dtype) == ((6, 2, heads * (2 + 2 + 4)), BF16)
        assert (layer.state.shape, layer.state.dtype) == ((6, heads, 4, 2), state_dtype)
    size = ModelPartition.of(CONFIG, tp).state_bytes(tp - 1, 2, state_dtype.itemsize)
    assert sum(part.numel() * part.element_size() for part in parts(states)) == 6 * size


def test_taking_it_anew_counts_and_gives_other_memory() -> None:
    states = pool()
    assert (states.generation, states.layers) == (0, [])
    states.allocate(2)
    before = parts(states)
    states.allocate(3)
    assert states.generation == 2
    assert {part.data_ptr() for part in before}.isdisjoint(x.data_ptr() for x in parts(states))
    assert not any(part[0].any() for part in parts(states)), "scratch is clear"


def test_a_copy_takes_every_layer_and_nothing_else() -> None:
    states = pool()
    states.allocate(4)
    for part in parts(states):
        part.copy_(torch.randn(part.shape))
    before = [part.clone() for part in parts(states)]
    states.copy(3, 1)
    for was, now in zip(before, parts(states), strict=True):
        assert torch.equal(now[1], was[3])
        assert torch.equal(now[[0, 2, 3, 4]], was[[0, 2, 3, 4]])
    states.clear([2, 4])
    for was, now in zip(before, parts(states), strict=True):
        assert not now[[2, 4]].any()
        assert torch.equal(now[[0, 3]], was[[0, 3]])


def test_each_layer_gets_its_own_kind_in_the_order_of_the_model() -> None:
    config = replace(CONFIG, num_layers=4, delta_layers=(True, False, False, True))
    partition = ModelPartition.of(config, 1)
    states, cache = StatePool(partition, 0, BF16, BF16, CPU), KVCache(partition, 0, BF16, CPU)
    cache.allocate(3)
    states.allocate(1)
    assert len(cache.layers) == 2, "of attention alone"
    size = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.k, layer.v))
    assert size == 4 * block_bytes(partition, 0, BF16)
    first, second, third, fourth = caches_of(config, cache, states)
    assert (first, fourth) == tuple(states.layers)
    assert (second, third) == tuple(cache.layers)
    alone = replace(config, num_layers=1, delta=None, delta_layers=())
    assert caches_of(alone, cache, None) == cache.layers[:1], "the last is the MTP layer's"
