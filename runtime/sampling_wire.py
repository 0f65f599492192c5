"""Sampling parameters on their way to the ranks."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import replace

from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.workers.protocol import SlotSampling, int64s, pack_sampling

_SEED_MASK = (1 << 63) - 1


def with_seed(params: SamplingParams) -> SamplingParams:
    """Give `params` a seed from the operating system if it draws and has none.

    It is given once, where the request is submitted: however often the request is started again,
    its answer stays the same.
    """
    if params.temperature == 0 or params.seed is not None:
        return params
    return replace(params, seed=int.from_bytes(os.urandom(8), "little") & _SEED_MASK)


def open_sampling(opened: Sequence[Request]) -> array[int]:
    """Return `StepPlan.open_sampling` for the requests whose slots a step opens, in order."""
    slots = [_slot_sampling(request) for request in opened]
    return int64s() if all(slot.is_greedy for slot in slots) else pack_sampling(slots)


def _slot_sampling(request: Request) -> SlotSampling:
    params = request.params
    if params.temperature == 0:
        return SlotSampling()
    assert params.seed is not None, "a seed is given where a request is submitted"
    return SlotSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        seed=_noise_seed(params.seed, request.prompt_ids),
    )


def _noise_seed(seed: int, prompt_ids: array[int]) -> int:
    """The seed of the noise: prompts that share a seed must not share their noise."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8)
    digest.update(prompt_ids.tobytes())
    return int.from_bytes(digest.digest(), "little") & _SEED_MASK
