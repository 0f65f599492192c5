"""Parallel linear layers. The name says how a layer is cut, the constructor takes its group.

Shape letters: T tokens, I input channels, O output channels of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from unisono.models.interface import Build, PartialSum
from unisono.ops.linear import Linear


class _Linear:
    """A weight that is filled from the checkpoint, then packed for the device."""

    def __init__(self, build: Build, in_features: int, out_features: int, bias: bool) -> None:
        self._build = build
        self.weight: Tensor | None = build.empty(out_features, in_features)
        self.bias: Tensor | None = build.empty(out_features) if bias else None
        self._product: Linear | None = None

    def pack(self, order: Tensor | None = None) -> None:
        """Hand the loaded weight to the device's format and drop the plain copy.

        `order` [O] int64: which of the loaded rows each row of the product is.
        """
        assert self.weight is not None
        if order is not None:
            order = order.to(self.weight.device)
            self.weight = self.weight[order]
            self.bias = None if self.bias is None else self.bias[order]
        self._product = self._build.ops.pack_linear(self.weight, self._local_bias())
        self.weight = None

    def product(self, x: Tensor) -> Tensor:
        """This rank's product, [T, I] -> [T, O]."""
        assert self._product is not None, "pack() comes first"
        return self._product(x)

    def _local_bias(self) -> Tensor | None:
        """What is added to this rank's product by itself."""
        return self.bias


class ColumnParallelLinear(_Linear):
    """Output rows are cut, W = [W_1; ...; W_p] and b with them; no communication.

    `parts` merges several projections of one input into one product: checkpoint name -> rows of
    this rank, in the order of the output.
    """

    def __init__(
        self, build: Build, in_features: int, parts: Mapping[str, int], bias: bool
    ) -> None:
        super().__init__(build, in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under `prefix` and where each is to be written."""
        assert self.weight is not None
        start = 0
        for name, rows in self.parts.items():
            yield f"{prefix}{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + rows]
            start += rows

    def __call__(self, x: Tensor) -> Tensor:
        """y_r = x W_r^T + b_r, [T, I] -> [T, O]."""
        return self.product(x)


class ReplicatedLinear(_Linear):
    """The whole weight on every rank: a router, a gate. No bias, no communication."""

    def __init__(self, build: Build, name: str, in_features: int, out_features: int) -> None:
        super().__init__(build, in_features, out_features, False)
        self.name = name

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under `prefix` and where each is to be written."""
        assert self.weight is not None
        yield f"{prefix}{self.name}.weight", self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """y = x W^T, [T, I] -> [T, O]."""
        return self.product(x)


class RowParallelLinear(_Linear):
    """Input columns are cut, W = [W_1 ... W_p]: the sum over ranks first, then the bias, once."""

    def __init__(
        self, build: Build, name: str, in_features: int, out_features: int, bias: bool
    ) -> None:
        super().__init__(build, in_features, out_features, bias)
        self.name = name
        self._reduce = build.ops.reduce_rows

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under `prefix` and where each is to be written."""
        assert self.weight is not None
        yield f"{prefix}{self.name}.weight", self.weight
        if self.bias is not None:
            yield f"{prefix}{self.name}.bias", self.bias

    def __call__(self, x: Tensor) -> PartialSum:
        """y = sum_r x_r W_r^T + b, still to be summed, [T, I of this rank] -> [T, O]."""
        return PartialSum(self.product(x), self.bias, self._reduce, self._build.group)

    def _local_bias(self) -> Tensor | None:
        return None
