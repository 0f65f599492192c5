"""A planned step in the ranks' words."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from unisono.runtime.in_flight import Flight, PlannedRow, Save
from unisono.runtime.request import Request
from unisono.runtime.sampling_wire import open_sampling
from unisono.workers.protocol import Rows, StepPlan, int32s


def step_plan(
    flight: Flight,
    opened: Sequence[Request],
    running: Sequence[Request],
    eos_token_ids: Collection[int],
    num_proposals: int = 0,
) -> StepPlan:
    """Return the plan of `flight`, in which the slots of `opened` get their requests.

    Whatever blocks of `running` requests the ranks do not know yet go with it.
    """
    return StepPlan(
        step=flight.step,
        rows=_rows(flight.rows),
        **_open_arrays(opened, eos_token_ids),
        **_block_arrays(running, flight.step),
        **_state_arrays(opened, flight.saves),
        num_proposals=num_proposals,
    )


def _rows(planned: Sequence[PlannedRow]) -> Rows:
    drafts = [row.drafts for row in planned]
    return Rows(
        slot=int32s([row.request.slot for row in planned]),
        start=int32s([row.start for row in planned]),
        count=int32s([row.count for row in planned]),
        phase=int32s([row.phase for row in planned]),
        drafts=int32s(drafts if any(drafts) else []),
    )


def _open_arrays(
    opened: Sequence[Request], eos_token_ids: Collection[int]
) -> dict[str, array[int]]:
    """What a plan says of the slots it opens: all tokens so far, and how many blocks are shared."""
    tokens = int32s()
    for request in opened:
        tokens.extend(request.tokens(0, request.num_given))
    return {
        "open_slot": int32s(request.slot for request in opened),
        "open_length": int32s(request.num_given for request in opened),
        "open_tokens": tokens,
        "open_sampling": open_sampling(opened, eos_token_ids),
        "num_shared": int32s(request.num_published for request in opened),
    }


def _block_arrays(running: Sequence[Request], step: int) -> dict[str, array[int]]:
    """What a plan says of the blocks that slots got since the last plan."""
    slots, blocks = int32s(), int32s()
    for request in running:
        if request.num_sent_blocks < len(request.blocks):
            new = request.blocks[request.num_sent_blocks :]
            slots.extend([request.slot] * len(new))
            blocks.extend(new)
            request.num_sent_blocks = len(request.blocks)
            request.last_step = step
    return {"block_slot": slots, "block_id": blocks}


def _state_arrays(opened: Sequence[Request], saves: Sequence[Save]) -> dict[str, array[int]]:
    """What a plan says of recurrent states: nothing where the model has none."""
    hybrid = [request for request in opened if request.state]
    return {
        "open_state": int32s(request.state for request in hybrid),
        "open_restore": int32s(request.restored for request in hybrid),
        "save_slot": int32s(save.slot for save in saves),
        "save_length": int32s(save.length for save in saves),
        "save_state": int32s(save.state for save in saves),
    }
