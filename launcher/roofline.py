"""The bandwidth floor: what decoding reads at least, and how fast memory gives it.

Every step reads every weight once, but of an embedding that is not the head as well only the rows
of its tokens, and of experts those that one token takes, which all its rows may share; for each of
its rows it reads the keys and values that the row may see, and reads and writes its recurrent
state. What else is written, activations and the embedding's rows are left out: the true time is
never less than the floor.
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


def floor_s(bytes_of_ranks: list[float], bytes_per_s: float, *, share_memory: bool) -> float:
    """Seconds until all ranks have read their bytes, each from its own memory unless they share."""
    read = sum(bytes_of_ranks) if share_memory else max(bytes_of_ranks)
    return read / bytes_per_s


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
