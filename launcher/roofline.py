"""The floor of a step: what it reads and computes at least, and how fast the machine does either.

Every step reads every weight once, but of an embedding that is not the head as well only the rows
of its tokens, and of experts those that one token takes, which all its rows may share. Where its
rows decode it reads for each the keys and values that the row may see, and reads and writes its
recurrent state; what else is written, activations, the embedding's rows and all arithmetic are left
out. Where they are whole prompts it writes their keys, values and states, and computes products:
every weight with every token, and those of attention. The true time is never less than the floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.models.config import ModelConfig
from unisono.models.partition import ModelPartition

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_MTP_EMBEDDING = "mtp.embed_tokens.weight"
_EXPERTS = ".mlp.experts."


class Items(NamedTuple):
    """Bytes of one number: of weights, keys and values, and of a recurrent state."""

    model: int
    state: int

    @classmethod
    def of(cls, dtype: str, state_dtype: str) -> Items:
        """Those of the dtypes by name, as `WorkerConfig` has them."""
        return cls(ITEM_BYTES[dtype], ITEM_BYTES[state_dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A memory bandwidth to compare with."""

    name: str
    bandwidth_tb_s: float
    """10^12 bytes a second."""
    source: str


H200_COPY = Card(name="H200, large copy", bandwidth_tb_s=4.3, source="measured")
CARDS = (
    Card(name="H200", bandwidth_tb_s=4.8, source="vendor specification"),
    H200_COPY,
    Card(name="H100 SXM", bandwidth_tb_s=3.35, source="vendor specification"),
    Card(name="A100 80 GB SXM", bandwidth_tb_s=2.04, source="vendor specification"),
    Card(name="RTX 4090", bandwidth_tb_s=1.008, source="vendor specification"),
    Card(name="CPU, 2 channels of DDR5", bandwidth_tb_s=0.08, source="vendor specification"),
)
MEASURED = {"NVIDIA H200": H200_COPY}
"""What a large copy was seen to reach, by the driver's name of the card."""


def weight_bytes(partition: ModelPartition, rank: int, item_bytes: int) -> int:
    """Bytes of weights that `rank` reads in a step."""
    return read_bytes(partition.config, weight_sizes(partition, rank, item_bytes))


def weight_sizes(partition: ModelPartition, rank: int, item_bytes: int) -> dict[str, int]:
    """Bytes of each tensor's part on `rank`. Of many experts on many ranks it takes seconds."""
    return {spec.name: spec.nbytes(item_bytes) for spec in partition.weights(rank)}


def read_bytes(config: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Bytes of the tensors with these `weight_sizes` that a step reads."""
    unread = 0 if config.tie_word_embeddings else sizes[_EMBEDDING]
    unread += sizes.get(_MTP_EMBEDDING, 0)
    if experts := config.experts:
        mixture = sum(size for name, size in sizes.items() if _EXPERTS in name)
        unread += mixture - mixture * experts.num_experts_per_tok // experts.num_experts
    return sum(sizes.values()) - unread


def kv_bytes(partition: ModelPartition, rank: int, item_bytes: int, num_keys: float) -> float:
    """Bytes of keys and values that `rank` reads for a row that may see `num_keys` keys."""
    windows = _windows(partition.config)
    seen = sum(min(num_keys, window) if window else num_keys for window in windows)
    return seen * partition.kv_elements(rank) * item_bytes


def step_bytes(
    partition: ModelPartition, items: Items, num_rows: int, num_keys: float, num_drafts: int = 0
) -> list[float]:
    """Bytes that each rank reads in a step of `num_rows` rows of `num_keys` keys each, `num_drafts`
    drafts behind each row included. Of a `partition` without the layer that drafts."""
    return [
        weight_bytes(partition, rank, items.model)
        + num_rows * kv_bytes(partition, rank, items.model, num_keys)
        + num_rows * 2 * partition.state_bytes(rank, *items)
        + (
            num_drafts
            and num_drafts * draft_bytes(partition, rank, items.model, num_rows, num_keys)
        )
        for rank in range(partition.ranks)
    ]


def draft_bytes(
    partition: ModelPartition, rank: int, item_bytes: int, num_rows: int, num_keys: float
) -> float:
    """Bytes that `rank` reads to draft one token behind each of `num_rows` rows: the layer that
    drafts, its keys and values, and the head once more unless it has its own."""
    config = partition.config
    sizes = weight_sizes(ModelPartition.of(config, partition.ranks, drafts=True), rank, item_bytes)
    head = 0 if config.mtp_head else sizes[_EMBEDDING if config.tie_word_embeddings else _HEAD]
    layer = read_bytes(config, sizes) - weight_bytes(partition, rank, item_bytes)
    return layer + head + num_rows * num_keys * partition.kv_elements(rank) * item_bytes


def answers_bytes(
    partition: ModelPartition,
    items: Items,
    lengths: Sequence[tuple[int, int]],
    num_drafts: int = 0,
) -> list[float]:
    """Bytes that each rank reads at least to decode requests of (prompt, answer) tokens.

    The first token of an answer comes with the prompt, which is not counted. With `num_drafts`
    behind each row as many tokens share what their step reads, if all are right; what making them
    reads is left out.
    """
    shared = 1 + num_drafts
    num_steps = -(-(max(answer for _, answer in lengths) - 1) // shared)
    windows = Counter(_windows(partition.config))
    num_tokens = sum(answer - 1 for _, answer in lengths)
    seen = sum(
        count * (_keys_up_to(prompt + answer - 1, window) - _keys_up_to(prompt, window))
        for prompt, answer in lengths
        for window, count in windows.items()
    )
    return [
        num_steps * weight_bytes(partition, rank, items.model)
        + seen / shared * partition.kv_elements(rank) * items.model
        + num_tokens / shared * 2 * partition.state_bytes(rank, *items)
        for rank in range(partition.ranks)
    ]


def prompt_bytes(
    partition: ModelPartition, items: Items, num_prompts: int, length: int
) -> list[float]:
    """Bytes that each rank reads and writes at least in a step of whole prompts of `length`
    tokens: weights once, keys and values of each token, and a state for each prompt."""
    return [
        weight_bytes(partition, rank, items.model)
        + num_prompts
        * (
            length * partition.num_kv_layers * partition.kv_elements(rank) * items.model
            + partition.state_bytes(rank, *items)
        )
        for rank in range(partition.ranks)
    ]


def prompt_flops(partition: ModelPartition, num_prompts: int, length: int) -> list[float]:
    """Floating point operations of each rank in the products of such a step: weights with every
    token, the head with the last of each prompt, queries with keys and probabilities with values.

    What recurrences take is left out.
    """
    config = partition.config
    head = _EMBEDDING if config.tie_word_embeddings else _HEAD
    seen = sum(_keys_up_to(length, window) for window in _windows(config))
    flops = []
    for rank in range(partition.ranks):
        # Numbers of matrices stand for bytes: those of experts that no token takes fall away.
        sizes = {
            spec.name: spec.num_elements for spec in partition.weights(rank) if len(spec.shape) > 1
        }
        last = sizes[head]
        every = read_bytes(config, sizes) - last
        attention = 2 * partition.heads.size(rank) * config.head_dim * seen
        flops.append(2.0 * num_prompts * (length * every + last + attention))
    return flops


def floor_s(of_ranks: list[float], per_s: float, *, share: bool) -> float:
    """Seconds until all ranks are through with their bytes or operations, at `per_s` of them a
    second: each with a device of its own, unless they `share` one."""
    return (sum(of_ranks) if share else max(of_ranks)) / per_s


def card_here(root: Path = Path("/")) -> Card | None:
    """What is known of the GPUs of this host, if all are of one kind that is known."""
    names = set()
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "Model":
                names.add(value.strip())
    return MEASURED.get(names.pop()) if len(names) == 1 else None


def _windows(config: ModelConfig) -> list[int]:
    """Of the layers with a KV cache."""
    layers = range(config.num_layers)
    return [config.window_of(layer) for layer in layers if not config.is_delta(layer)]


def _keys_up_to(last: int, window: int) -> int:
    """The sum of 1, 2, ..., `last`, each cut to `window` unless that is 0."""
    short = min(last, window) if window else last
    return short * (short + 1) // 2 + (last - short) * window
