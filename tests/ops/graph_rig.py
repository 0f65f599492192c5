"""Captures a call in a CUDA graph, which an op that waits for the device cannot survive."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def replayed(call: Callable[[], Tensor]) -> Tensor:
    """What `call` gives when it is captured and replayed; it runs once before, to be compiled."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return result
