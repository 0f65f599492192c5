"""A mixture of gated MLPs: which experts a token takes, and the sum of what they say."""

from collections.abc import Callable

import torch
from torch import Tensor

from unisono.ops.linear import Linear
from unisono.ops.reference.activation import silu_and_mul

Experts = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(x [tokens, in], weights, ids [tokens, chosen], extra [tokens, in] or None) -> [tokens, in]."""


def route_experts(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return (weights fp32, ids int64), both [tokens, num_chosen], by ascending id.

    The weights are those of a softmax in fp32 over all of logits [tokens, experts], the
    `num_chosen` highest (the lower id where they are equal), scaled to sum 1 if `renormalise`,
    rounded to the dtype of `logits` and widened again.
    """
    wide = logits.float()
    odds = torch.exp(wide - wide.amax(-1, keepdim=True))
    odds /= odds.sum(-1, keepdim=True)
    best = odds.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    ids = best.sort(dim=-1).values
    weights = odds.gather(1, ids)
    if renormalise:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype).float(), ids


def pack_experts(
    gate_up: Tensor, down: Tensor, *, pack_linear: Callable[[Tensor, None], Linear]
) -> Experts:
    """Return the experts with weights gate_up [experts, 2 * width, in] and down [experts, in,
    width], each an MLP of two products that `pack_linear` makes.

    What they return is, by ascending id and in fp32, the sum of weight * down(silu(gate x) * up x)
    of a token's experts, + `extra`, rounded once to the dtype of `x`. The products and the
    activation round to that dtype, as those of any MLP do.
    """
    mlps = [
        (pack_linear(a, None), pack_linear(b, None)) for a, b in zip(gate_up, down, strict=True)
    ]

    def experts(x: Tensor, weights: Tensor, ids: Tensor, extra: Tensor | None) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, place = (ids == expert).nonzero(as_tuple=True)
            enter, leave = mlps[expert]
            said = leave(silu_and_mul(enter(x[rows])))
            total[rows] += weights[rows, place, None] * said.float()
        return (total if extra is None else total + extra.float()).to(x.dtype)

    return experts
