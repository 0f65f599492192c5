"""Linear layers, by the formula."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T summed in fp32, rounded once; x [tokens, in], weight [out, in] -> [tokens, out]."""
    return (x.float() @ weight.float().T).to(x.dtype)
