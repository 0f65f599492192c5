"""What follows a product whose input columns are cut: the sum over the ranks, then the bias."""

from torch import Tensor

from unisono.ops.comm import Group


def reduce_rows(partial: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """Return the sum of `partial` [tokens, out] over the ranks, rounded, plus `bias` [out], once.

    The bias is added after the sum: before it, it would be counted once a rank.
    """
    total = group.all_reduce(partial)
    return total if bias is None else total + bias
