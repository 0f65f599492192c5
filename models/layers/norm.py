"""RMS norm with a weight from the checkpoint."""

from __future__ import annotations

from torch import Tensor

from unisono.models.interface import Build


class RMSNorm:
    """y = w * x / rms(x) over the last dimension; replicated on every rank."""

    def __init__(self, build: Build, width: int, eps: float) -> None:
        self.weight = build.empty(width)
        self._eps = eps
        self._norm = build.ops.rms_norm
        self._add_norm = build.ops.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self._norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[T, width] each -> (norm of x + residual, x + residual)."""
        return self._add_norm(x, residual, self.weight, self._eps)
