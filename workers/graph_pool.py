"""Where a piece of a step is run: replayed from a captured graph, or eagerly with a reason.

The CPU has no graphs, so every run is eager and counted as such; capture and replay on a GPU
take their place here, behind the same call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

T = TypeVar("T")


class GraphPool:
    """`eager_runs` counts (piece, reason) of every run that was not a replay."""

    def __init__(self, device: torch.device) -> None:
        self._reason = f"{device.type} has no graphs"
        self.eager_runs: Counter[tuple[str, str]] = Counter()

    def run(self, piece: str, key: Hashable, body: Callable[[], T]) -> T:
        """Run `body`, the work of `piece` ("forward", "tail") at the sizes named by `key`."""
        self.eager_runs[piece, self._reason] += 1
        return body()
