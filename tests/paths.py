"""Where the checkout is, and how a child process of a test finds it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path(*first: Path | str) -> str:
    """PYTHONPATH of a child: `first`, the checkout, and what this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, first), str(ROOT), *filter(None, [given])])
