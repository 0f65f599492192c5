"""Logits after what was said before: penalties, biases, and ids that may not come yet."""

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    history: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    first_id: int,
) -> Tensor:
    """Return `logits` [rows, shard] fp32 with the penalties of tokens that came before.

    Column j is vocabulary id first_id + j. history [rows, length] int64 holds prompt tokens in
    [0, num_prompt) and answered ones in [num_prompt, num_tokens); the three penalties are [rows]
    fp64. First, of every id in prompt or answer, a positive logit is divided by `repetition` and
    another multiplied; then frequency * (times answered) and presence * (ever answered) are
    subtracted. Computed in fp64, rounded once.
    """
    place = torch.arange(history.shape[1], device=logits.device)
    seen = _counts(history, place < num_tokens[:, None], first_id, logits.shape[1]) > 0
    answered = (place >= num_prompt[:, None]) & (place < num_tokens[:, None])
    counts = _counts(history, answered, first_id, logits.shape[1])
    exact = logits.double()
    factor = repetition[:, None]
    repeated = torch.where(exact > 0, exact / factor, exact * factor)
    exact = torch.where(seen & (factor != 1.0), repeated, exact)
    exact = exact - frequency[:, None] * counts
    return (exact - presence[:, None] * (counts > 0)).float()


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor, first_id: int) -> Tensor:
    """Return `logits` [rows, shard] fp32 with bias[i] added to id ids[i] of row rows[i].

    rows, ids [n] int64; bias [n] fp64, -inf for an id that may not come. Ids of other shards are
    left out. An id may stand twice in a row, once of them with 0 or -inf.
    """
    width = logits.shape[1]
    column = ids - first_id
    is_here = (column >= 0) & (column < width)
    # A spare column takes what belongs to other shards, so that no shape depends on the ids.
    total = torch.zeros(
        (logits.shape[0], width + 1), dtype=torch.float64, device=logits.device
    ).index_put_((rows, torch.where(is_here, column, width)), bias, accumulate=True)
    return (logits.double() + total[:, :width]).float()


def _counts(history: Tensor, counted: Tensor, first_id: int, width: int) -> Tensor:
    """How often each id of the shard stands where `counted`, [rows, width] int64."""
    column = history - first_id
    is_here = counted & (column >= 0) & (column < width)
    counts = torch.zeros((history.shape[0], width + 1), dtype=torch.int64, device=history.device)
    counts.scatter_add_(1, torch.where(is_here, column, width), torch.ones_like(history))
    return counts[:, :width]
