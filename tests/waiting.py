"""Whether the host waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Within, whatever would have the host wait for the current GPU raises RuntimeError."""
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        # That it finds most of them only.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
