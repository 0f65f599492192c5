"""Sampling parameters on their way to the ranks."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.workers.protocol import SlotSampling, pack_sampling

_SEED_MASK = (1 << 63) - 1


def with_seed(params: SamplingParams) -> SamplingParams:
    """Give `params` a seed from the operating system if it draws and has none.

    It is given once, where the request is submitted: however often the request is started again,
    its answer stays the same.
    """
    if params.temperature == 0 or params.seed is not None:
        return params
    return replace(params, seed=int.from_bytes(os.urandom(8), "little") & _SEED_MASK)


def is_rejecting(params: SamplingParams, accept: str) -> bool:
    """Whether drafts of a request, `params` as its caller gave them, are judged by rejection: what
    has a seed is promised one answer, and what is not drawn has but one."""
    return accept == "rejection" and params.temperature > 0 and params.seed is None


def open_sampling(opened: Sequence[Request], eos_token_ids: Iterable[int]) -> array[int]:
    """Return `StepPlan.open_sampling` for the requests whose slots a step opens, in order.

    `eos_token_ids` are the model's own ends of text.
    """
    return pack_sampling(_slot_sampling(request, eos_token_ids) for request in opened)


def _slot_sampling(request: Request, eos_token_ids: Iterable[int]) -> SlotSampling:
    params = request.params
    ends = () if params.ignore_eos else sorted(eos_token_ids)
    slot = SlotSampling(
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        num_prompt_tokens=request.num_prompt_tokens,
        min_tokens=params.min_tokens,
        bias=params.logit_bias,
        max_length=request.num_prompt_tokens + request.max_tokens,
        stop_ids=tuple(dict.fromkeys((*ends, *params.stop_token_ids))),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        checksums=int(request.checksums),
    )
    if params.temperature == 0:
        return slot
    assert params.seed is not None, "a seed is given where a request is submitted"
    return replace(
        slot,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        seed=noise_seed(params.seed, request.prompt_ids),
        rejects=int(request.rejects),
    )


def noise_seed(seed: int, prompt_ids: array[int]) -> int:
    """The seed of the noise: prompts that share a seed must not share their noise."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8)
    digest.update(prompt_ids.tobytes())
    return int.from_bytes(digest.digest(), "little") & _SEED_MASK
