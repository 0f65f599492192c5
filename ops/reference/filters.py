"""Which tokens may be drawn: top-k, then top-p of what it left, then min-p.

Masses are added as whole numbers, so that their sums have no order and no rounding.
"""

import torch
from torch import Tensor

_UNIT = 2.0**40
"""The mass of the likeliest token: 2^22 tokens as likely still fit into 63 bits."""


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return `logits` [rows, vocabulary] fp32 with -inf for every id that may not be drawn.

    Of softmax(logits / temperature), ties ordered by ascending id, a row keeps
    top_k [rows] int64: that many likeliest ids; 0 keeps all
    top_p [rows] fp64: of those the fewest likeliest whose share of their mass reaches top_p
    min_p [rows] fp64: of those the ids at least min_p times as likely as the likeliest
    The likeliest id always stays. temperature [rows] fp64 is above 0. NaN is kept.
    """
    ordered, ids = (logits + 0.0).sort(dim=-1, descending=True, stable=True)
    best = ordered[:, :1]
    # Equal infinities have no difference.
    gap = torch.where(ordered == best, 0.0, ordered.double() - best.double())
    likelihood = (gap / temperature[:, None]).exp()
    place = torch.arange(logits.shape[1], device=logits.device)
    keep = (top_k[:, None] == 0) | (place < top_k[:, None])
    mass = torch.where(keep, (likelihood * _UNIT).round(), 0.0).to(torch.int64)
    before = mass.cumsum(-1) - mass
    wanted = top_p[:, None] * mass.sum(-1, keepdim=True).double()
    keep &= (top_p[:, None] >= 1.0) | (before.double() < wanted)
    keep &= likelihood >= min_p[:, None]
    left = torch.where(keep | ordered.isnan(), ordered, -torch.inf)
    return torch.empty_like(logits).scatter_(1, ids, left)
