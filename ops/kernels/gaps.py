"""Outputs of a step in which tokens may be no row's: what no kernel writes must be zero there."""

from __future__ import annotations

import torch
from torch import Tensor


class Outputs:
    """Hands out the outputs of one step's layers, cleared once.

    All layers of a shape are given the same memory: each output is read before the next layer of
    its kind writes its own, and all of them write the same rows.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def like(self, x: Tensor, *shape: int) -> Tensor:
        """[*shape] of the dtype of `x`, zero where nobody has written."""
        name = torch.Size(shape), x.dtype
        if name not in self._kept:
            self._kept[name] = x.new_zeros(shape)
        return self._kept[name]


def output(outputs: Outputs | None, like: Tensor, *shape: int) -> Tensor:
    """Where an op writes [*shape] of the dtype of `like`: into what `outputs` hands out, or, where
    each token is some row's, into memory that holds anything."""
    if outputs is None:
        return like.new_empty(*shape)
    return outputs.like(like, *shape)
