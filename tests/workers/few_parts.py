"""Steps that need only a few of a rank's parts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from unisono.workers.step_parts import StepParts


def few_parts(**given: Any) -> StepParts:
    """The parts that are `given`; the others are None."""
    return StepParts(**{part.name: given.get(part.name) for part in fields(StepParts)})
