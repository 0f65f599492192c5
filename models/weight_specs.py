"""Which tensors a model has, and the part of each that a rank reads. Torch-free.

Names are those of the transformers classes, with experts one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from unisono.models.config import DeltaConfig, ModelConfig

Range = tuple[int, int]
"""Half-open."""
MTP_EMBEDDING, MTP_HEAD = "mtp.embed_tokens.weight", "mtp.lm_head.weight"
"""Of a layer that drafts, where it has its own."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the checkpoint, and the part of it that one rank reads.

    `dim` is the cut dimension (None: the whole tensor is read) and [start, stop) the rows or
    columns of this rank in it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    more: tuple[Range, ...] = ()
    """Further ranges of `dim`, which follow [start, stop) in memory without a gap."""
    keeps_fp32: bool = False
    """Held in fp32, whatever the dtype of the model."""
    zero_centred: bool = False
    """A norm that multiplies by 1 + weight."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """All ranges of `dim`, in the order of memory."""
        return ((self.start, self.stop), *self.more)

    @property
    def local_shape(self) -> tuple[int, ...]:
        size = sum(stop - start for start, stop in self.ranges)
        return tuple(size if axis == self.dim else whole for axis, whole in enumerate(self.shape))

    @property
    def num_elements(self) -> int:
        whole = math.prod(self.shape)
        if self.dim is None:
            return whole
        return whole // self.shape[self.dim] * sum(stop - start for start, stop in self.ranges)

    def nbytes(self, item_bytes: int) -> int:
        """Return the bytes of the part in memory, in a model whose numbers take `item_bytes`."""
        return self.num_elements * (4 if self.keeps_fp32 else item_bytes)

    def pieces(self) -> Iterator[tuple[WeightSpec, tuple[slice, ...]]]:
        """Yield a spec of one range for each range, and the index of its place in the part."""
        if self.dim is None:
            yield self, ()
            return
        end = 0
        for start, stop in self.ranges:
            begin, end = end, end + stop - start
            place = (slice(None),) * self.dim + (slice(begin, end),)
            yield replace(self, start=start, stop=stop, more=()), place


class Held(NamedTuple):
    """What one rank holds of each dimension that is cut; (0, 0) where the model has none."""

    vocab: Range
    heads: Range
    kv_heads: Range
    mlp: Range
    key_heads: Range
    value_heads: Range
    experts: Range
    """Channels of every expert."""
    shared_expert: Range


def weight_specs(config: ModelConfig, held: Held, drafts: bool) -> Iterator[WeightSpec]:
    """Yield every tensor that a rank reads, in the order of the layers; `drafts`: the MTP's too."""
    table = (config.vocab_size, config.hidden_size)
    yield WeightSpec("model.embed_tokens.weight", table, 0, *held.vocab)
    for layer in range(config.num_layers):
        mixer = _delta_net if config.is_delta(layer) else _attention
        yield from _layer(config, f"model.layers.{layer}.", held, mixer, layer)
    yield _norm(config, "model.norm", config.hidden_size)
    if not config.tie_word_embeddings:
        yield WeightSpec("lm_head.weight", table, 0, *held.vocab)
    if drafts:
        yield from _mtp(config, held)


def _mtp(config: ModelConfig, held: Held) -> Iterator[WeightSpec]:
    """Of several layers the first, which drafts the whole chain; its MLP is that of layer 0.

    Embedding and head are the model's unless the checkpoint has others for it.
    """
    hidden = config.hidden_size
    for name, is_there in ((MTP_EMBEDDING, config.mtp_embedding), (MTP_HEAD, config.mtp_head)):
        if is_there:
            yield WeightSpec(name, (config.vocab_size, hidden), 0, *held.vocab)
    yield WeightSpec("mtp.fc.weight", (hidden, 2 * hidden))
    yield _norm(config, "mtp.pre_fc_norm_embedding", hidden)
    yield _norm(config, "mtp.pre_fc_norm_hidden", hidden)
    yield from _layer(config, "mtp.layers.0.", held, _attention, 0)
    yield _norm(config, "mtp.norm", hidden)


def _layer(
    config: ModelConfig,
    prefix: str,
    held: Held,
    mixer: Callable[[ModelConfig, str, Held], Iterator[WeightSpec]],
    layer: int,
) -> Iterator[WeightSpec]:
    """A mixer and the MLP that `layer` has."""
    yield _norm(config, prefix + "input_layernorm", config.hidden_size)
    yield from mixer(config, prefix, held)
    yield _norm(config, prefix + "post_attention_layernorm", config.hidden_size)
    if config.has_experts(layer):
        yield from _experts(config, prefix + "mlp.", held)
    else:
        size, bias = config.intermediate_size, config.mlp_bias
        yield from _gated_mlp(prefix + "mlp.", config.hidden_size, size, held.mlp, bias)


def _attention(config: ModelConfig, prefix: str, held: Held) -> Iterator[WeightSpec]:
    name, hidden, dim = prefix + "self_attn.", config.hidden_size, config.head_dim
    # With an output gate the rows of a head are its query and then its gate.
    widths = {"q_proj": (1 + config.attn_output_gate) * dim, "k_proj": dim, "v_proj": dim}
    for part, width in widths.items():
        heads = config.num_heads if part == "q_proj" else config.num_kv_heads
        rows = _scaled(held.heads if part == "q_proj" else held.kv_heads, width)
        yield from _column(name + part, hidden, heads * width, rows, config.qkv_bias)
    if config.qk_norm:
        yield _norm(config, name + "q_norm", dim)
        yield _norm(config, name + "k_norm", dim)
    columns = _scaled(held.heads, dim)
    yield from _row(name + "o_proj", hidden, config.num_heads * dim, columns, config.o_bias)


def _delta_net(config: ModelConfig, prefix: str, held: Held) -> Iterator[WeightSpec]:
    """Cut by key head, the value heads that read it with it; of a replicated one, some of them."""
    delta, hidden, name = config.delta, config.hidden_size, prefix + "linear_attn."
    assert delta is not None
    heads, width = delta.num_value_heads, delta.value_head_dim
    channels = tuple(_mixed(delta, held))
    if delta.is_grouped:
        rows = delta.conv_channels + heads * width
        by_head = _grouped(delta, held, 2 * delta.key_head_dim, width)
        yield _segments(name + "in_proj_qkvz.weight", (rows, hidden), by_head)
        by_head = _grouped(delta, held, 0, 1)
        yield _segments(name + "in_proj_ba.weight", (2 * heads, hidden), by_head)
    else:
        yield _segments(name + "in_proj_qkv.weight", (delta.conv_channels, hidden), channels)
        for part, each in (("z", width), ("b", 1), ("a", 1)):
            rows_held = _scaled(held.value_heads, each)
            yield from _column(f"{name}in_proj_{part}", hidden, heads * each, rows_held)
    taps = (delta.conv_channels, 1, delta.conv_width)
    yield _segments(name + "conv1d.weight", taps, channels)
    for part in ("A_log", "dt_bias"):
        yield WeightSpec(name + part, (heads,), 0, *held.value_heads, keeps_fp32=True)
    yield WeightSpec(name + "norm.weight", (width,), keeps_fp32=True)
    columns = _scaled(held.value_heads, width)
    yield from _row(name + "out_proj", hidden, heads * width, columns)


def _experts(config: ModelConfig, prefix: str, held: Held) -> Iterator[WeightSpec]:
    """Each expert is cut like an MLP of its own; whom a token goes to, every rank decides."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    yield WeightSpec(prefix + "gate.weight", (experts.num_experts, hidden))
    for expert in range(experts.num_experts):
        name = f"{prefix}experts.{expert}."
        yield from _gated_mlp(name, hidden, experts.width, held.experts)
    if experts.shared_width:
        name = prefix + "shared_expert."
        yield from _gated_mlp(name, hidden, experts.shared_width, held.shared_expert)
        yield WeightSpec(prefix + "shared_expert_gate.weight", (1, hidden))


def _gated_mlp(
    prefix: str, hidden: int, size: int, held: Range, bias: bool = False
) -> Iterator[WeightSpec]:
    for name in ("gate_proj", "up_proj"):
        yield from _column(prefix + name, hidden, size, held, bias)
    yield from _row(prefix + "down_proj", hidden, size, held, bias)


def _norm(config: ModelConfig, name: str, width: int) -> WeightSpec:
    # 1 + weight needs more digits than a narrow dtype has.
    zero = config.zero_centred_norms
    return WeightSpec(name + ".weight", (width,), keeps_fp32=zero, zero_centred=zero)


def _column(
    name: str, hidden: int, size: int, held: Range, bias: bool = False
) -> Iterator[WeightSpec]:
    """Output rows are cut, the bias with them."""
    yield WeightSpec(name + ".weight", (size, hidden), 0, *held)
    if bias:
        yield WeightSpec(name + ".bias", (size,), 0, *held)


def _row(
    name: str, hidden: int, size: int, held: Range, bias: bool = False
) -> Iterator[WeightSpec]:
    """Input columns are cut; every rank reads the whole bias, added once after the all-reduce."""
    yield WeightSpec(name + ".weight", (hidden, size), 1, *held)
    if bias:
        yield WeightSpec(name + ".bias", (hidden,))


def _mixed(delta: DeltaConfig, held: Held) -> Iterator[Range]:
    """Rows of what passes the convolution: queries, keys and values of all heads, one by one."""
    keys = delta.num_key_heads * delta.key_head_dim
    start, stop = _scaled(held.key_heads, delta.key_head_dim)
    yield start, stop
    yield keys + start, keys + stop
    start, stop = _scaled(held.value_heads, delta.value_head_dim)
    yield 2 * keys + start, 2 * keys + stop


def _grouped(delta: DeltaConfig, held: Held, own: int, each: int) -> Iterator[Range]:
    """Rows of what lies by key head: `own` rows of it, then twice `each` rows a value head."""
    ratio = delta.num_value_heads // delta.num_key_heads
    first, last = held.value_heads
    for head in range(*held.key_heads):
        base = head * (own + 2 * ratio * each)
        yield base, base + own
        inside = max(first - head * ratio, 0), min(last - head * ratio, ratio)
        for half in (base + own, base + own + ratio * each):
            yield half + inside[0] * each, half + inside[1] * each


def _segments(name: str, shape: tuple[int, ...], ranges: Iterable[Range]) -> WeightSpec:
    """A spec of these rows, neighbours read as one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return WeightSpec(name, shape, 0, *joined[0], tuple(joined[1:]))


def _scaled(held: Range, width: int) -> Range:
    return held[0] * width, held[1] * width
