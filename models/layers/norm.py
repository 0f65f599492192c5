"""RMS norm with a weight from the checkpoint."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from unisono.models.config import ModelConfig
from unisono.models.interface import Build, PartialSum


class NormWeight:
    """The weight of a norm. Zero-centred ones are kept in fp32 and get their 1 once, after loading.

    bf16 would lose the bits of 1 + weight; the ops multiply in the dtype of the weight.
    """

    def __init__(self, build: Build, width: int, *, zero_centred: bool) -> None:
        self.weight = build.empty(width, dtype=torch.float32 if zero_centred else None)
        self._zero_centred = zero_centred

    def pack(self) -> None:
        """After loading, once."""
        if self._zero_centred:
            self.weight.add_(1.0)


class RMSNorm(NormWeight):
    """y = w * x / rms(x) over the last dimension; replicated on every rank."""

    def __init__(self, build: Build, width: int, eps: float, *, zero_centred: bool = False) -> None:
        super().__init__(build, width, zero_centred=zero_centred)
        self._eps = eps
        self._norm = build.ops.rms_norm
        self._add_norm = build.ops.add_rms_norm
        self._fuses_sums = build.ops.fuses_sums

    @classmethod
    def of(cls, build: Build, config: ModelConfig) -> Self:
        """A norm over the hidden state of a model."""
        return cls(
            build, config.hidden_size, config.rms_norm_eps, zero_centred=config.zero_centred_norms
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self._norm(x, self.weight, self._eps)

    def add(self, x: PartialSum, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[T, width] each -> (norm of the total + residual, the total + residual)."""
        both = None
        if self._fuses_sums:
            rest = (residual, self.weight, self._eps)
            both = x.group.all_reduce_add_rms_norm(x.part, x.bias, *rest)
        return both or self._add_norm(x.total(), residual, self.weight, self._eps)
