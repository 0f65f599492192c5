"""What belongs to nobody, filled with NaN, and what belongs to somebody, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.rig import Rank


@torch.inference_mode()
def poison_scratch(rank: Rank) -> None:
    """Fill block 0, state 0 and the hidden states between two graphs with NaN.

    On a CPU not block 0 of the layer that drafts: drafts beyond a request's blocks lie there, and
    attention on a CPU reads what is hidden beside them.
    """
    for each in _scratch(rank):
        each.fill_(float("nan"))


def live_bytes(rank: Rank) -> list[Tensor]:
    """What belongs to somebody: all but slot 0, block 0 and state 0."""
    table = rank.runner._slots
    live = [part[1:] for layer in rank.cache.layers for part in (layer.k, layer.v)]
    live += [part[1:] for part in table.tensors]
    live += [] if rank.states is None else [tensor[:, 1:] for tensor in rank.states._tensors]
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in live]


def _scratch(rank: Rank) -> Iterator[Tensor]:
    is_cpu = rank.build.device.type == "cpu"
    layers = rank.cache.layers
    for layer in layers[: rank.model.config.num_kv_layers] if is_cpu else layers:
        yield from (layer.k[0], layer.v[0])
    for tensor in () if rank.states is None else rank.states._tensors:
        yield tensor[:, 0]
    if rank.runner._decode is not None:
        yield rank.runner._decode._buffers.hidden
