"""The short causal convolution before a recurrence, each channel by itself."""

from torch import Tensor

from unisono.ops.reference.activation import silu


def short_conv(u: Tensor, weight: Tensor) -> Tensor:
    """y_t = silu(sum over j of weight[:, j] * u_{t + j}), without a bias.

    u [..., W - 1 + tokens, channels]: the W - 1 inputs before the first token, then the tokens
    themselves; weight [channels, W]. Returns [..., tokens, channels] in the dtype of `u`; the sum
    in fp32 from j = 0 on, silu in fp32, rounded once.
    """
    taps = weight.float().T.contiguous()
    tokens = u.shape[-2] - (len(taps) - 1)
    total = u[..., :tokens, :].float() * taps[0]
    for j in range(1, len(taps)):
        total += u[..., j : j + tokens, :].float() * taps[j]
    return silu(total).to(u.dtype)
