"""Vocabulary-parallel arg-max: a packed (value, lowest id) key, so that ties have one winner."""

import torch
from torch import Tensor

_ID_BITS = 31
_ID_MASK = (1 << _ID_BITS) - 1


def argmax_keys(logits: Tensor, first_id: int, num_ids: int) -> Tensor:
    """One int64 key a row: greater for a greater logit, on ties for a lower id.

    logits [rows, shard] fp32, whose column j is vocabulary id first_id + j; ids >= num_ids are
    never chosen. The key is (order-preserving bits of the fp32 value) << 31 | ~id, so the
    maximum of the keys of all shards is the answer. A shard with no eligible id gives the least
    key. NaN orders above +inf and is found by `unpack_keys`.
    """
    rows, shard = logits.shape
    eligible = min(shard, max(num_ids - first_id, 0))
    if eligible == 0:
        return torch.full((rows,), torch.iinfo(torch.int64).min, device=logits.device)
    shown = logits[:, :eligible]
    best = shown.amax(-1)  # NaN propagates
    ids = torch.arange(eligible, device=logits.device)
    is_best = (shown == best.unsqueeze(1)) | shown.isnan()
    lowest = torch.where(is_best, ids, eligible).amin(-1) + first_id
    # +0.0 turns -0.0 into 0.0: they are equal as logits and must be equal as keys.
    bits = (best + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    ordered = torch.where(best.isnan(), 0x7FFF_FFFF, ordered)
    return (ordered << _ID_BITS) | (_ID_MASK - lowest)


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [rows] int64 and whether the winning logit was NaN [rows] bool."""
    return _ID_MASK - (keys & _ID_MASK), (keys >> _ID_BITS) == 0x7FFF_FFFF


def key_of_id(token_ids: Tensor) -> Tensor:
    """Keys that name token_ids [n] int64, of no logit in particular. Waits for nothing."""
    return _ID_MASK - token_ids
