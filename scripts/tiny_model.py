"""The model that scripts/train_tiny.py trains: the text model of qwen3_5 and its MTP layer.

Parameters have the names that checkpoints of the family use; formulas are those of transformers'
Qwen3_5 classes and MtpModel. It knows whole sequences only, no cache.

Shape letters: B sequences, T tokens of each, H heads, D a head's width, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
"""Tokens of a chunk of the delta rule; sequences have whole chunks."""
_BLOCK = 16
"""Widest triangle that is inverted by a product of powers, whose size nothing bounds but width."""


class TinyModel(nn.Module):
    """`model.*` and `mtp.*`; the head is the embedding."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.mtp = MTP(config)
        self._num_layers = config["num_hidden_layers"]
        self.apply(self._initialise)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] -> states after the final norm, [B, T, hidden]."""
        return self.model(self.embed(ids))

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def drafts(self, hidden: Tensor, following: Tensor, count: int) -> list[Tensor]:
        """States [B, T, hidden] of `count` drafts in a row behind every position t.

        `hidden` [B, T, hidden] is that of the tokens, `following` [B, T + count - 1] the tokens
        behind the first. Draft number k, from 1, reads following[t + k - 1] and is one for the
        token behind that.
        """
        return self.mtp(self.embed(following), hidden, count)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Layer):
            for last in (module.mixer_out, module.mlp.down_proj):
                nn.init.normal_(last.weight, std=0.02 / (2 * self._num_layers) ** 0.5)


class Norm(nn.Module):
    """RMSNorm whose weight is stored less one; computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, self._eps)


class Trunk(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["layer_types"])
        self.norm = Norm(width, config["rms_norm_eps"])
        self._config = config

    def forward(self, x: Tensor) -> Tensor:
        rope = rope_table(self._config, x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)


class Layer(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self._is_delta = kind == "linear_attention"
        if self._is_delta:
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(width, config["intermediate_size"])

    @property
    def mixer_out(self) -> nn.Linear:
        return self.linear_attn.out_proj if self._is_delta else self.self_attn.o_proj

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.linear_attn(normed) if self._is_delta else self.self_attn(normed, rope))
        return x + self.mlp(self.post_attention_layernorm(x))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with norms of q and k, partial RoPE and an output gate."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.dim, heads = config["head_dim"], config["num_attention_heads"]
        kv_width = config["num_key_value_heads"] * self.dim
        self._share = heads // config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, 2 * heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, width, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim, eps), Norm(self.dim, eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """[B, T, hidden] -> q, k, v [B, H, T, D] and the gate [B, T, H * D]."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.dim)).unbind(-2)
        k, v = (proj(x).unflatten(-1, (-1, self.dim)) for proj in (self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        k, v = (each.repeat_interleave(self._share, dim=2) for each in (k, v))
        q, k, v = (each.to(gate.dtype).transpose(1, 2) for each in (q, k, v))
        return q, k, v, gate.flatten(-2)

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v, gate = self.project(x, rope)
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


class DeltaNet(nn.Module):
    """Gated delta net: out(norm(delta(conv(q, k, v), b, a)) * silu(z))."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        keys, self._values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self._key_dim, self._eps = config["linear_key_head_dim"], config["rms_norm_eps"]
        self._value_dim = config["linear_value_head_dim"]
        inner = self._values * self._value_dim
        self._widths = (keys * self._key_dim, keys * self._key_dim, inner)
        channels, taps = sum(self._widths), config["linear_conv_kernel_dim"]
        self.in_proj_qkv = nn.Linear(width, channels, bias=False)
        self.in_proj_z = nn.Linear(width, inner, bias=False)
        self.in_proj_b = nn.Linear(width, self._values, bias=False)
        self.in_proj_a = nn.Linear(width, self._values, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)
        # Decay rates of 1 to 16 and steps of 0.001 to 0.1, spread evenly by their logarithm.
        step = torch.exp(torch.empty(self._values).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self._values).uniform_(1, 16).log())
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self._value_dim))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self._convolve(self.in_proj_qkv(x))
        q, k, v = mixed.split(self._widths, dim=-1)
        q, k = (each.unflatten(-1, (-1, self._key_dim)).float() for each in (q, k))
        v = v.unflatten(-1, (-1, self._value_dim)).float()
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q, k = (each.repeat_interleave(self._values // q.shape[2], dim=2) for each in (q, k))
        beta = self.in_proj_b(x).sigmoid().float()
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        # The recurrence is fp32 in every engine: its sums are long and its products differences.
        with torch.autocast(x.device.type, enabled=False):
            y = delta_rule(q * self._key_dim**-0.5, k, v, decay, beta)
            y = F.rms_norm(y, self.norm.weight.shape, self.norm.weight, self._eps)
        z = self.in_proj_z(x).unflatten(-1, (-1, self._value_dim))
        return self.out_proj((y.to(z.dtype) * F.silu(z)).flatten(-2))

    def _convolve(self, u: Tensor) -> Tensor:
        """Each channel with the ones before it, [B, T, channels]; a product a tap."""
        taps = self.conv1d.weight[:, 0].to(u.dtype).unbind(1)
        length, padded = u.shape[1], F.pad(u, (0, 0, len(taps) - 1, 0))
        return F.silu(sum(padded[:, j : j + length] * tap for j, tap in enumerate(taps)))


class MTP(nn.Module):
    """norm(layer(fc([norm(embedding of the next token) | norm(hidden)])))."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(width, eps), Norm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = Norm(width, eps)
        self._config = config

    def forward(self, embedded: Tensor, hidden: Tensor, count: int) -> list[Tensor]:
        """See `TinyModel.drafts`.

        A later draft of position t sees what the cache of an engine holds by then: the first
        drafts' keys up to t, which are of true states, and a key of each draft behind t.
        """
        layer, length = self.layers[0], hidden.shape[1]
        cos, sin = rope_table(self._config, length + count - 1, hidden.device)
        embedded = self.pre_fc_norm_embedding(embedded)
        diagonal = torch.eye(length, dtype=torch.bool, device=hidden.device)
        masks: list[Tensor] = [torch.ones_like(diagonal).tril()]
        keys, values, states = [], [], []
        for k in range(count):
            tokens = slice(k, k + length)
            pairs = torch.cat((embedded[:, tokens], self.pre_fc_norm_hidden(hidden)), dim=-1)
            stream = self.fc(pairs).float()
            rope = cos[tokens], sin[tokens]
            q, key, value, gate = layer.self_attn.project(layer.input_layernorm(stream), rope)
            keys.append(key)
            values.append(value)
            if k:
                masks.append(diagonal)
            seen = {"attn_mask": torch.cat(masks, 1)} if k else {"is_causal": True}
            mixed = F.scaled_dot_product_attention(
                q, torch.cat(keys, 2), torch.cat(values, 2), **seen
            )
            stream = stream + layer.self_attn.finish(mixed, gate)
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
            hidden = self.norm(stream)
            states.append(hidden)
        return states


def rope_table(config: dict[str, Any], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, half] of the rotated part of a head."""
    rope = config["rope_parameters"]
    width = int(config["head_dim"] * rope["partial_rotary_factor"])
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, rope["rope_theta"] ** -steps)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """[B, T, H, D], of which the first channels turn, in pairs half of them apart."""
    cos, sin = rope
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """S <- e^decay S; S <- S + k (beta (v - S^T k))^T; o = S^T q, over chunks; all fp32.

    q, k [B, T, H, Dk], v [B, T, H, Dv], decay and beta [B, T, H] -> [B, T, H, Dv].
    `ops/reference/delta_rule.py` has the formula of a chunk. As the state behind a chunk is a
    linear map of the state before it, all maps are made at once and the loop has one product.
    """
    q, k, v = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4).contiguous() for x in (q, k, v))
    decay, beta = (
        x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).contiguous() for x in (decay, beta)
    )
    total = decay.cumsum(-1)  # [B, H, chunks, C]
    apart = total[..., :, None] - total[..., None, :]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal it would overflow.
    kept = apart.masked_fill(~lower, -torch.inf).exp()
    weighted = k * beta[..., None]
    inverse = invert_unit_lower((weighted @ k.mT * kept).tril(-1))
    from_values = inverse @ (v * beta[..., None])
    from_state = inverse @ (weighted * total.exp()[..., None])
    last = total[..., -1:]
    leaving = (k * (last - total).exp()[..., None]).mT
    keeps = torch.eye(q.shape[-1], device=q.device) * last.exp()[..., None] - leaving @ from_state
    adds = leaving @ from_values
    state, states = torch.zeros_like(adds[:, :, 0]), []
    for keep, add in zip(keeps.unbind(2), adds.unbind(2), strict=True):
        states.append(state)
        state = add + keep @ state
    before = torch.stack(states, 2)
    updates = from_values - from_state @ before
    y = (q * total.exp()[..., None]) @ before + (q @ k.mT * kept) @ updates
    return y.permute(0, 2, 3, 1, 4).flatten(1, 2)


def invert_unit_lower(strict: Tensor) -> Tensor:
    """(I + strict)^-1 for strictly lower triangles [..., C, C] of C = 64.

    Blocks on the diagonal by (I - A)(I + A^2)(I + A^4)..., then twice as wide ones from pairs.
    """
    width = _BLOCK
    power = -_diagonal_blocks(strict, width)
    inverse = torch.eye(width, device=strict.device) + power
    for _ in range(width.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    while width < strict.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        between = _diagonal_blocks(strict, 2 * width)[..., width:, :width]
        corner = -second @ between @ first
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        inverse = torch.cat((upper, torch.cat((corner, second), -1)), -2)
        width *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(x: Tensor, width: int) -> Tensor:
    """[..., C, C] -> [..., C / width, width, width]."""
    blocks = x.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
