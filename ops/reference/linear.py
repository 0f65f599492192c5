"""Linear layers, by the formula."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T summed in fp32 (or wider, if x is), rounded once.

    x [tokens, in], weight [out, in] -> [tokens, out].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)
