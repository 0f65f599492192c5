"""Whether the host waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Within, whatever would have the host wait for the current GPU raises RuntimeError."""
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode("default")


class NumbersOfTheHost(TorchDispatchMode):
    """Notes, without a GPU, calls that would wait for one, and that no captured step may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        """A number of a tensor, or a shape that hangs on its numbers."""
        self.copied: list[str] = []
        """A number of the host, which goes to the device as a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (_ATEN.where, _ATEN.copy_):
            if any(isinstance(arg, Tensor) and arg.dim() == 0 for arg in args):
                self.copied.append(str(func))
        elif func.overloadpacket in (_ATEN._local_scalar_dense, _ATEN.nonzero):
            self.asked.append(str(func))
        return func(*args, **(kwargs or {}))


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        # That it finds most of them only.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
