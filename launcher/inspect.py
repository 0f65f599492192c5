"""`unisono inspect MODEL`: what each rank would hold, and how fast a card could decode at best.

Reads the config and the headers of the weight files, no weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import click

from unisono.launcher.console import Console
from unisono.launcher.inspect_report import Report, make_report
from unisono.launcher.options import config_options, given, make_launch_config
from unisono.models.headers import describe_ignored, group_ignored
from unisono.models.partition import ModelPartition

OPTIONS = ("tp", "dtype", "max_model_len", "load_format", "overlay", "state_dtype")
WIDTH = 100
LEFT = ("rank", "card", "source")
"""Columns of words; the others hold numbers."""

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, names of the columns, rows."""


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
        check_states,
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
    check_states(options, config)
    parts = parse_overlay(asked.overlay, config)
    is_random = source.kind == "shape" or asked.load_format == "random"
    ignored: tuple[str, ...] = ()
    if not is_random:
        ignored = check_checkpoint(source.path, partition, weights_required=False)
    # What only those read who draft has a line of its own.
    drafting = ModelPartition.of(config, asked.tp, drafts=True)
    of_drafts = {spec.name for spec in drafting.weights(0)}
    device = resolve_device(asked.device, host_facts(os.environ))
    # A dtype that is asked for is a plan for some other machine; "auto" is what this one would do.
    report = make_report(
        model,
        partition,
        dtype=asked.dtype if asked.dtype != "auto" else resolve_dtype("auto", device, config),
        max_model_len=resolve_max_model_len(asked.max_model_len, config),
        state_dtype=asked.state_dtype,
        weights_from="random" if is_random else _with_random("files", parts),
        ignored=group_ignored(name for name in ignored if name not in of_drafts),
    )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
    elif sys.stdout.isatty():
        print_rich(report)
    else:
        click.echo("\n".join(plain_lines(report)))
    return 0


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


def _summary(report: Report) -> list[tuple[str, str]]:
    facts = report.facts
    return [
        ("model", report.model),
        ("family", f"{facts['family']}, checkpoint in {facts['checkpoint_dtype']}"),
        ("shape", _shape(facts)),
        (
            "attention",
            f"{facts['query_heads']} query heads, {facts['kv_heads']} KV heads, "
            f"head_dim {facts['head_dim']}",
        ),
        *_mixtures(facts),
        *_drafter(report),
        (
            "vocabulary",
            f"{facts['vocab_size']:,} rows, head "
            + ("tied to the embedding" if facts["tied_embeddings"] else "of its own"),
        ),
        ("context", f"{facts['context_length']:,} tokens, used up to {report.max_model_len:,}"),
        ("dtype", report.dtype),
        ("weights", f"{_size(report.weight_bytes)} on {_ranks(report.tp)}, {_origin(report)}"),
        *([("ignored", describe_ignored(report.ignored))] if report.ignored else []),
        (
            "KV cache",
            f"{_size(report.kv_bytes_per_token)} a token, "
            f"{_size(report.kv_bytes_of_max_model_len)} for {report.max_model_len:,} tokens",
        ),
        *(
            [("state", f"{_size(report.state_bytes_per_request)} a request, of any length")]
            if report.state_bytes_per_request
            else []
        ),
        ("legal rank counts", _runs(report.legal_rank_counts)),
    ]


def _shape(facts: Mapping[str, Any]) -> str:
    """Layers by kind, and widths."""
    layers = f"{facts['layers']} layers"
    if facts["delta_layers"]:
        layers += (
            f" ({facts['delta_layers']} gated delta nets, {facts['attention_layers']} attention)"
        )
    mlp = f", MLP {facts['intermediate_size']:,}" * (facts["expert_layers"] < facts["layers"])
    return f"{layers}, hidden {facts['hidden_size']:,}{mlp}"


def _mixtures(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a model may have beside attention and an MLP."""
    if delta := facts["delta"]:
        yield (
            "delta nets",
            f"{delta['num_value_heads']} value heads of {delta['value_head_dim']}, "
            f"{delta['num_key_heads']} key heads of {delta['key_head_dim']}, "
            f"convolution over {delta['conv_width']} tokens",
        )
    if experts := facts["experts"]:
        shared = (
            f", and one of {experts['shared_width']:,} for all" if experts["shared_width"] else ""
        )
        yield (
            "experts",
            f"{experts['num_experts_per_tok']} of {experts['num_experts']} a token, each of "
            f"{experts['width']:,} channels{shared}; in {facts['expert_layers']} layers",
        )


def _drafter(report: Report) -> Iterator[tuple[str, str]]:
    """What drafting would take, where the model can."""
    if count := report.facts["mtp_layers"]:
        yield (
            "MTP layers",
            f"{count}; drafting takes {_size(report.draft_weight_bytes)} more of weights and "
            f"{_size(report.draft_kv_bytes_per_token)} more of KV a token",
        )


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
    extra = _mixture_shares(report)
    return [
        (
            "Ranks (half-open ranges" + ("; *: also on another rank)" if replicated else ")"),
            header,
            shares,
        ),
        *([("Delta nets and experts of each rank", *extra)] if extra[1] else []),
        (
            f"Decode ceiling: one request at {report.context_tokens:,} tokens, one card a rank, "
            f"{_size(slowest)} a token on the fullest",
            ("card", "bandwidth", "source", "tok/s"),
            cards,
        ),
    ]


def _mixture_shares(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of what only hybrids have; no rows for others."""
    columns = {
        "key heads": [_range(share.key_heads) for share in report.ranks],
        "value heads": [_range(share.value_heads) for share in report.ranks],
        "state/request": [_size(share.state_bytes_per_request) for share in report.ranks],
    }
    if not report.state_bytes_per_request:
        columns = {}
    if report.facts["experts"]:
        columns["expert channels"] = [_range(share.expert_channels) for share in report.ranks]
        if report.facts["experts"]["shared_width"]:
            shared = [_range(share.shared_expert_channels) for share in report.ranks]
            columns["shared expert"] = shared
    if not columns:
        return (), []
    numbers = [str(share.rank) for share in report.ranks]
    return ("rank", *columns), list(zip(numbers, *columns.values(), strict=True))


def _with_random(origin: str, parts: Collection[str]) -> str:
    return origin + "".join(f", {part} random" for part in sorted(parts))


def _origin(report: Report) -> str:
    """How the summary says where weights come from."""
    return "random" if report.weights_from == "random" else f"from {report.weights_from}"


def _range(bounds: tuple[int, int]) -> str:
    if bounds == (0, 0):
        return "-"
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
