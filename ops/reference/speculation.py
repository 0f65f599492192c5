"""Which drafts are right enough, where they are judged by rejection sampling."""

import torch
from torch import Tensor


def judge_drafts(
    logits: Tensor, draft_logits: Tensor, drafted: Tensor, temperature: Tensor, chance: Tensor
) -> Tensor:
    """Return logits [n, vocabulary] fp32 from which the token of each place is drawn as it is, that
    is at temperature 1: rejection sampling.

    logits [n, vocabulary] fp32 are the model's and draft_logits those that drafted [n] int64 was
    drawn from, both -inf where an id may not be drawn; temperature [n] fp64 is above 0; chance [n]
    fp64 is uniform in (0, 1) and knows nothing of the draft. With p = softmax(logits / T) and
    q = softmax(draft_logits / T) the draft x is kept if chance < p(x) / q(x), and is then the only
    id left; else the token is drawn from max(p - q, 0). So it is distributed as p, whatever q is:
    Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding"
    (2023), section 2.3 and appendix A.1. What takes the place of a draft is never that draft, for
    p(x) < q(x) there. A NaN gives its row one.
    """
    p, q = (_odds(each, temperature) for each in (logits, draft_logits))
    at = drafted[:, None]
    excess = (p - q).clamp(min=0.0)
    is_kept = chance[:, None] * q.gather(1, at) < p.gather(1, at)
    # Where p and q are the same but for rounding, nothing may be left in excess.
    is_kept |= excess.sum(1, keepdim=True) == 0.0
    alone = torch.full_like(logits, -torch.inf).scatter_(1, at, 0.0)
    return torch.where(is_kept, alone, excess.log().float())


def _odds(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature) in fp64; equal infinities share all."""
    best = logits.amax(1, keepdim=True)
    # Filled, not chosen by `where`, which would copy a number of the host's into a captured step.
    gap = (logits.double() - best.double()).masked_fill_(logits == best, 0.0)
    return (gap / temperature[:, None]).softmax(1)
