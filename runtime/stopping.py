"""Where an answer ends, by its tokens. Ranks end it there, too, without being told (`Table` in
ops/reference/draft_plan.py), unless by a stop id beyond the first NUM_STOP_IDS of its request."""

from __future__ import annotations

from collections.abc import Collection

from unisono.runtime.request import Request


def finish_reason(request: Request, token_id: int, eos_token_ids: Collection[int]) -> str | None:
    """Return why the answer ends with `token_id`, its newest, already counted; None: it goes on.

    stop: an end-of-text token of the model (unless ignore_eos) or one of the request's own stop
    ids. length: max_tokens, or the end of the context.
    """
    params = request.params
    if token_id in params.stop_token_ids:
        return "stop"
    if token_id in eos_token_ids and not params.ignore_eos:
        return "stop"
    return "length" if len(request.answer_ids) >= request.max_tokens else None
