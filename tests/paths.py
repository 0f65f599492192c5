"""Where the checkout is, and how a child process of a test finds it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python_path(*first: Path | str) -> str:
    """PYTHONPATH of a child: `first`, the checkout, and what this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, first), str(ROOT), *filter(None, [given])])


@contextmanager
def loaded_script(name: str) -> Iterator[Any]:
    """scripts/NAME.py as a module, whose name it has meanwhile: dataclasses look themselves up."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
