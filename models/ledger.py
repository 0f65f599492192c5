"""Fills a rank's parameters from a source: each exactly once, or an error with the names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import torch

from unisono.models.tensor_info import CheckpointError
from unisono.models.weight_specs import WeightSpec


class WeightSource(Protocol):
    """What weights come from: a checkpoint, or a generator of random ones."""

    @property
    def names(self) -> Collection[str]:
        """All tensors of the files; none where there are no files."""
        ...

    def nbytes(self, spec: WeightSpec) -> int:
        """Return the bytes of `spec`'s part, for progress."""
        ...

    def copy_into(self, spec: WeightSpec, target: torch.Tensor) -> None:
        """Write `spec`'s part into `target`, converting the dtype. Raises CheckpointError."""
        ...


def fill_weights(
    specs: Iterable[WeightSpec],
    targets: Mapping[str, torch.Tensor],
    source: WeightSource,
    on_progress: Callable[[int, int], None],
) -> None:
    """Copy the part that each spec names into the target of its name, converting the dtype.

    A target has its spec's `local_shape`; it may be a view (a third of a fused projection).
    `on_progress(done, total)` hears of the source's bytes, first with done = 0. Raises
    CheckpointError, before a byte is copied, where names or shapes do not match one to one.
    """
    ordered = list(specs)
    _check(ordered, targets)
    sizes = [source.nbytes(spec) for spec in ordered]
    done, total = 0, sum(sizes)
    on_progress(done, total)
    for spec, size in zip(ordered, sizes, strict=True):
        source.copy_into(spec, targets[spec.name])
        done += size
        on_progress(done, total)


def _check(specs: list[WeightSpec], targets: Mapping[str, torch.Tensor]) -> None:
    counts = Counter(spec.name for spec in specs)
    misshapen = [
        f"{spec.name} {[*targets[spec.name].shape]} for {[*spec.local_shape]}"
        for spec in specs
        if spec.name in targets and targets[spec.name].shape != spec.local_shape
    ]
    faults = {
        "named twice": [name for name, count in counts.items() if count > 1],
        "without a parameter": [name for name in counts if name not in targets],
        "parameters never filled": [name for name in targets if name not in counts],
        "with a parameter of another shape": misshapen,
    }
    told = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in faults.items()
        if names
    ]
    if told:
        raise CheckpointError(f"weights: {'; '.join(told)}")
