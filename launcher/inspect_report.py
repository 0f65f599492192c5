"""What each rank of a model would hold, in numbers; `launcher/inspect.py` shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unisono.launcher.roofline import (
    CARDS,
    Items,
    kv_bytes,
    read_bytes,
    weight_sizes,
)
from unisono.models.config import ModelConfig
from unisono.models.partition import ModelPartition, legal_rank_counts

CONTEXT_TOKENS = 1024
"""Tokens already in the KV cache where the decode ceiling is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank holds. Ranges are half-open; bytes are in the chosen dtype."""

    rank: int
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    kv_replicated: bool
    """Another rank holds one of these KV heads too."""
    mlp_channels: tuple[int, int]
    expert_channels: tuple[int, int]
    """Of every expert; (0, 0) here and below where the model has none."""
    shared_expert_channels: tuple[int, int]
    key_heads: tuple[int, int]
    """Of the gated delta nets."""
    value_heads: tuple[int, int]
    vocab_rows: tuple[int, int]
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int
    """Recurrent state beside the KV, whatever the length."""
    streamed_bytes: int
    """Weights and KV that one decode step reads at `CONTEXT_TOKENS`, or the model's length; of the
    experts those that one token takes; the recurrent state read and written back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything `unisono inspect` says; its JSON output has these names."""

    model: str
    facts: dict[str, Any]
    tp: int
    dtype: str
    max_model_len: int
    weights_from: str
    """What the weights are: those of the files, or random, or which parts are."""
    ignored: dict[str, int]
    """Tensors of the files that no rank reads: how many under each prefix, or of each name."""
    ranks: tuple[RankShare, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_of_max_model_len: int
    state_bytes_per_request: int
    draft_weight_bytes: int
    """Of the MTP layer, which is there where it drafts; 0 if the model has none."""
    draft_kv_bytes_per_token: int
    legal_rank_counts: tuple[int, ...]
    context_tokens: int
    ceilings: tuple[dict[str, Any], ...]


def make_report(
    name: str,
    partition: ModelPartition,
    *,
    dtype: str,
    max_model_len: int,
    weights_from: str = "files",
    state_dtype: str = "float32",
    ignored: Mapping[str, int] | None = None,
) -> Report:
    """Compute the report from numbers alone."""
    config = partition.config
    context, items = min(CONTEXT_TOKENS, max_model_len), Items.of(dtype, state_dtype)
    drafting = replace(partition, drafts=config.num_mtp_layers > 0)
    sizes = [weight_sizes(drafting, rank, items.model) for rank in range(partition.ranks)]
    ranks = tuple(
        _share_of(partition, rank, items, context, each) for rank, each in enumerate(sizes)
    )
    per_token = sum(share.kv_bytes_per_token for share in ranks)
    slowest = max(share.streamed_bytes for share in ranks)
    return Report(
        model=name,
        facts=_facts(config),
        tp=partition.ranks,
        dtype=dtype,
        max_model_len=max_model_len,
        weights_from=weights_from,
        ignored=dict(ignored or {}),
        ranks=ranks,
        weight_bytes=sum(share.weight_bytes for share in ranks),
        kv_bytes_per_token=per_token,
        kv_bytes_of_max_model_len=per_token * max_model_len,
        state_bytes_per_request=sum(share.state_bytes_per_request for share in ranks),
        draft_weight_bytes=sum(sum(_split(each)[1].values()) for each in sizes),
        draft_kv_bytes_per_token=per_token // partition.num_kv_layers * bool(config.num_mtp_layers),
        legal_rank_counts=legal_rank_counts(config),
        context_tokens=context,
        ceilings=tuple(
            {**dataclasses.asdict(card), "tokens_per_s": card.bandwidth_tb_s * 1e12 / slowest}
            for card in CARDS
        ),
    )


def _share_of(
    partition: ModelPartition, rank: int, items: Items, context: int, sizes: Mapping[str, int]
) -> RankShare:
    """`sizes`: of the weights, those of the MTP layer among them if the model has one."""
    config = partition.config
    held = sizes if partition.drafts else _split(sizes)[0]
    start, stop = partition.kv_heads.ranges[rank]
    kv_per_token = partition.num_kv_layers * partition.kv_elements(rank) * items.model
    state = partition.state_bytes(rank, *items)
    streamed = read_bytes(config, held) + 2 * state
    return RankShare(
        rank=rank,
        query_heads=partition.heads.ranges[rank],
        kv_heads=(start, stop),
        kv_replicated=any(
            first < stop and start < last
            for other, (first, last) in enumerate(partition.kv_heads.ranges)
            if other != rank
        ),
        mlp_channels=partition.mlp.ranges[rank],
        expert_channels=partition.experts.ranges[rank],
        shared_expert_channels=partition.shared_expert.ranges[rank],
        key_heads=partition.key_heads.ranges[rank],
        value_heads=partition.value_heads.ranges[rank],
        vocab_rows=partition.vocab.ranges[rank],
        weight_bytes=sum(held.values()),
        kv_bytes_per_token=kv_per_token,
        state_bytes_per_request=state,
        streamed_bytes=streamed + int(kv_bytes(partition, rank, items.model, context)),
    )


def _split(sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The model's own tensors, and those of its MTP layer."""
    mtp = {name: size for name, size in sizes.items() if name.startswith("mtp.")}
    return {name: size for name, size in sizes.items() if name not in mtp}, mtp


def _facts(config: ModelConfig) -> dict[str, Any]:
    return {
        "family": config.family,
        "layers": config.num_layers,
        "attention_layers": config.num_kv_layers,
        "delta_layers": sum(config.delta_layers),
        "expert_layers": sum(map(config.has_experts, range(config.num_layers))),
        "mtp_layers": config.num_mtp_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "checkpoint_dtype": config.dtype,
        "delta": config.delta and dataclasses.asdict(config.delta),
        "experts": config.experts and dataclasses.asdict(config.experts),
    }
