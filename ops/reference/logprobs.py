"""How likely a model finds a token: the log softmax of its own logits, and the likeliest ids."""

import torch
from torch import Tensor

_UNIT = 2.0**40
"""The mass of the likeliest id, as in `filters.py`: masses are whole numbers, so that their sum
has no order and no rounding."""
_ID_BITS = 31
_ID_MASK = (1 << _ID_BITS) - 1


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability and rank of one id a row, and the `num_top` likeliest ids.

    logits [rows, vocabulary] fp32 whole; token_ids [rows] int64. With m the row's maximum,
    logprob(l) = fp32(l - m - log(sum of round(2^40 exp(l - m)) / 2^40)), computed in fp64.

    logprob [rows] fp32; -inf for an id beyond the vocabulary. NaN if the row holds one
    rank [rows] int64: 1 + the number of ids with a greater logit
    top_ids [rows, num_top] int64: by logit descending, on ties the lowest id first; -1 where the
    vocabulary has no more
    top_logprobs [rows, num_top] fp32: of `top_ids`; -inf where that is -1
    """
    logits = logits + 0.0  # -0.0 and 0.0 are equal as logits
    best = logits.amax(-1, keepdim=True)  # NaN propagates
    mass = (_below(logits, best).exp() * _UNIT).round().to(torch.int64).sum(-1, keepdim=True)
    total = (mass.double() / _UNIT).log()
    is_known = token_ids < logits.shape[1]
    own = logits.gather(1, torch.where(is_known, token_ids, 0)[:, None])
    own = torch.where(is_known[:, None], own, -torch.inf)
    rank = (logits > own).sum(-1) + 1
    top_ids = _top_ids(logits, min(num_top, logits.shape[1]))
    top = (_below(logits.gather(1, top_ids), best) - total).float()
    missing = (0, num_top - top_ids.shape[1])
    return (
        (_below(own, best) - total).float()[:, 0],
        rank,
        torch.nn.functional.pad(top_ids, missing, value=-1),
        torch.nn.functional.pad(top, missing, value=-torch.inf),
    )


def _below(logits: Tensor, best: Tensor) -> Tensor:
    # Equal infinities have no difference.
    return torch.where(logits == best, 0.0, logits.double() - best.double())


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """By keys that are all different: the order-preserving bits of the logit, then ~id."""
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = logits.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << _ID_BITS) | (_ID_MASK - ids)
    return _ID_MASK - (keys.topk(count, dim=-1).values & _ID_MASK)
