"""`unisono inspect MODEL`: what each rank would hold, and how fast a card could decode at best.

Reads the config and the headers of the weight files, no weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import click

from unisono.launcher.console import Console
from unisono.launcher.options import config_options, given, make_launch_config
from unisono.launcher.roofline import CARDS, ITEM_BYTES, kv_bytes, weight_bytes
from unisono.models.config import ModelConfig
from unisono.models.partition import ModelPartition, legal_rank_counts

OPTIONS = ("tp", "dtype", "max_model_len", "load_format", "overlay")
CONTEXT_TOKENS = 1024
"""Tokens already in the KV cache where the decode ceiling is computed."""
WIDTH = 100
LEFT = ("rank", "card", "source")
"""Columns of words; the others hold numbers."""

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, names of the columns, rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank holds. Ranges are half-open; bytes are in the chosen dtype."""

    rank: int
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    kv_replicated: bool
    """Another rank holds one of these KV heads too."""
    mlp_channels: tuple[int, int]
    vocab_rows: tuple[int, int]
    weight_bytes: int
    kv_bytes_per_token: int
    streamed_bytes: int
    """Weights and KV that one decode step reads at `CONTEXT_TOKENS`, or the model's length."""


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
    ranks: tuple[RankShare, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_of_max_model_len: int
    legal_rank_counts: tuple[int, ...]
    context_tokens: int
    ceilings: tuple[dict[str, Any], ...]


@click.command("inspect")
@click.argument("model")
@config_options(*OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object on stdout.")
def command(model: str, as_json: bool, **options: Any) -> int:
    """Show what each rank would hold of MODEL, and the fastest that cards could decode it.

    The ceiling is memory bandwidth over the bytes that the fullest rank reads for one token of
    one request. Only the config and the headers of the weight files are read; of a shape nothing.
    """
    from unisono.launcher.model_source import read_source_config, resolve_model
    from unisono.launcher.resolve import (
        check_checkpoint,
        host_facts,
        resolve_device,
        resolve_dtype,
        resolve_max_model_len,
    )
    from unisono.models.overlay import parse_overlay

    with Console().fetching() as fetched:
        source = resolve_model(model, fetched)
    config = read_source_config(source, options["load_format"] or "auto")
    asked = make_launch_config(
        given(options, OPTIONS), model_path=str(source.path), model=config
    ).runtime.worker
    partition = ModelPartition.of(config, asked.tp)
    parts = parse_overlay(asked.overlay, config)
    is_random = source.kind == "shape" or asked.load_format == "random"
    if not is_random:
        check_checkpoint(source.path, partition, weights_required=False)
    device = resolve_device(asked.device, host_facts(os.environ))
    # A dtype that is asked for is a plan for some other machine; "auto" is what this one would do.
    report = make_report(
        model,
        partition,
        dtype=asked.dtype if asked.dtype != "auto" else resolve_dtype("auto", device, config),
        max_model_len=resolve_max_model_len(asked.max_model_len, config),
        weights_from="random" if is_random else _with_random("files", parts),
    )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
    elif sys.stdout.isatty():
        print_rich(report)
    else:
        click.echo("\n".join(plain_lines(report)))
    return 0


def make_report(
    name: str,
    partition: ModelPartition,
    *,
    dtype: str,
    max_model_len: int,
    weights_from: str = "files",
) -> Report:
    """Compute the report from numbers alone."""
    config = partition.config
    context = min(CONTEXT_TOKENS, max_model_len)
    ranks = tuple(
        _share_of(partition, rank, ITEM_BYTES[dtype], context) for rank in range(partition.ranks)
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
        ranks=ranks,
        weight_bytes=sum(share.weight_bytes for share in ranks),
        kv_bytes_per_token=per_token,
        kv_bytes_of_max_model_len=per_token * max_model_len,
        legal_rank_counts=legal_rank_counts(config),
        context_tokens=context,
        ceilings=tuple(
            {**dataclasses.asdict(card), "tokens_per_s": card.bandwidth_tb_s * 1e12 / slowest}
            for card in CARDS
        ),
    )


def plain_lines(report: Report) -> list[str]:
    """Return the report as text lines of at most `WIDTH` columns."""
    lines = [f"{label:<20}{value}" for label, value in _summary(report)]
    for title, header, rows in _tables(report):
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines += ["", title]
        for row in (header, *rows):
            cells = [
                cell.ljust(width) if name in LEFT else cell.rjust(width)
                for name, cell, width in zip(header, row, widths, strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
    return lines


def print_rich(report: Report) -> None:
    """Print the report with tables that fit the terminal."""
    from rich.console import Console as RichConsole
    from rich.table import Table as RichTable
    from rich.text import Text

    console = RichConsole(highlight=False)
    for label, value in _summary(report):
        console.print(Text.assemble((f"{label:<20}", "dim"), value))
    for title, header, rows in _tables(report):
        table = RichTable(title=title, title_justify="left")
        for name in header:
            table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _share_of(partition: ModelPartition, rank: int, item_bytes: int, context: int) -> RankShare:
    config = partition.config
    elements = sum(spec.num_elements for spec in partition.weights(rank))
    start, stop = partition.kv_heads.ranges[rank]
    kv_per_token = 2 * config.num_layers * (stop - start) * config.head_dim * item_bytes
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
        vocab_rows=partition.vocab.ranges[rank],
        weight_bytes=elements * item_bytes,
        kv_bytes_per_token=kv_per_token,
        streamed_bytes=weight_bytes(partition, rank, item_bytes)
        + int(kv_bytes(partition, rank, item_bytes, context)),
    )


def _facts(config: ModelConfig) -> dict[str, Any]:
    return {
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "checkpoint_dtype": config.dtype,
    }


def _summary(report: Report) -> list[tuple[str, str]]:
    facts = report.facts
    return [
        ("model", report.model),
        ("family", f"{facts['family']}, checkpoint in {facts['checkpoint_dtype']}"),
        (
            "shape",
            f"{facts['layers']} layers, hidden {facts['hidden_size']:,}, "
            f"MLP {facts['intermediate_size']:,}",
        ),
        (
            "attention",
            f"{facts['query_heads']} query heads, {facts['kv_heads']} KV heads, "
            f"head_dim {facts['head_dim']}",
        ),
        (
            "vocabulary",
            f"{facts['vocab_size']:,} rows, head "
            + ("tied to the embedding" if facts["tied_embeddings"] else "of its own"),
        ),
        ("context", f"{facts['context_length']:,} tokens, used up to {report.max_model_len:,}"),
        ("dtype", report.dtype),
        ("weights", f"{_size(report.weight_bytes)} on {_ranks(report.tp)}, {_origin(report)}"),
        (
            "KV cache",
            f"{_size(report.kv_bytes_per_token)} a token, "
            f"{_size(report.kv_bytes_of_max_model_len)} for {report.max_model_len:,} tokens",
        ),
        ("legal rank counts", _runs(report.legal_rank_counts)),
    ]


def _tables(report: Report) -> list[Table]:
    header = (
        "rank",
        "query heads",
        "KV heads",
        "MLP channels",
        "vocabulary",
        "weights",
        "KV/token",
    )
    shares: list[tuple[str, ...]] = [
        (
            str(share.rank),
            _range(share.query_heads),
            _range(share.kv_heads) + ("*" if share.kv_replicated else ""),
            _range(share.mlp_channels),
            _range(share.vocab_rows),
            _size(share.weight_bytes),
            _size(share.kv_bytes_per_token),
        )
        for share in report.ranks
    ]
    replicated = any(share.kv_replicated for share in report.ranks)
    cards: list[tuple[str, ...]] = [
        (
            card["name"],
            f"{card['bandwidth_tb_s']:g} TB/s",
            card["source"],
            f"{card['tokens_per_s']:,.0f}",
        )
        for card in report.ceilings
    ]
    slowest = max(share.streamed_bytes for share in report.ranks)
    return [
        (
            "Ranks (half-open ranges" + ("; *: also on another rank)" if replicated else ")"),
            header,
            shares,
        ),
        (
            f"Decode ceiling: one request at {report.context_tokens:,} tokens, one card a rank, "
            f"{_size(slowest)} a token on the fullest",
            ("card", "bandwidth", "source", "tok/s"),
            cards,
        ),
    ]


def _with_random(origin: str, parts: Collection[str]) -> str:
    return origin + "".join(f", {part} random" for part in sorted(parts))


def _origin(report: Report) -> str:
    """How the summary says where weights come from."""
    return "random" if report.weights_from == "random" else f"from {report.weights_from}"


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}-{bounds[1]} ({bounds[1] - bounds[0]})"


def _ranks(count: int) -> str:
    return f"{count} rank" + ("" if count == 1 else "s")


def _runs(numbers: Sequence[int]) -> str:
    """Return "1-3, 6" for 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _size(count: int) -> str:
    """Bytes with a binary unit and three significant digits."""
    if count < 1024:
        return f"{count} B"
    value, unit = float(count), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        value /= 1024
        if value < 1024:
            break
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
