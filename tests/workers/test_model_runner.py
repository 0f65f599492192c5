"""What no model here has is refused before anything runs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from unisono.workers.channel import ProtocolError
from unisono.workers.model_runner import ModelRunner
from unisono.workers.protocol import Phase, Rows, StepPlan, int32s

ROWS = Rows(slot=int32s([1]), start=int32s([5]), count=int32s([1]), phase=int32s([Phase.DECODE]))


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (
            StepPlan(
                step=3,
                rows=Rows(
                    slot=ROWS.slot,
                    start=ROWS.start,
                    count=ROWS.count,
                    phase=ROWS.phase,
                    drafts=int32s([2]),
                ),
            ),
            "drafts",
        ),
        (StepPlan(step=3, rows=ROWS, open_state=int32s([1])), "recurrent states"),
        (StepPlan(step=3, rows=ROWS, save_state=int32s([1])), "recurrent states"),
    ],
)
def test_drafts_and_states_are_refused(plan: StepPlan, what: str) -> None:
    nothing = cast(Any, None)
    runner = ModelRunner(nothing, nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(ProtocolError, match=f"step 3 .*{what}"):
        runner.step(plan)
