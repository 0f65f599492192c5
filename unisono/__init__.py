"""unisono: a multi-process tensor-parallel runtime for large language models.

The public names are loaded on first use, so that `import unisono` costs nothing:

    from unisono import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.launcher.offline import LLM as LLM
    from unisono.runtime.protocol import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "unisono.launcher.offline", "SamplingParams": "unisono.runtime.protocol"}
_ROOMS = ("launcher", "runtime", "workers", "models", "ops")

# In a checkout the five rooms lie beside this folder; installed, they lie inside it.
_checkout = Path(__file__).resolve().parent.parent
if (
    all((_checkout / room / "__init__.py").is_file() for room in _ROOMS)
    and (_checkout / "pyproject.toml").is_file()
):
    __path__.append(str(_checkout))


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
