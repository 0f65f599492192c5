"""What `unisono verify` shows: a table, JSON, and one line at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.launcher.verify_bisect import Finding
from unisono.launcher.verify_compare import Difference, Verdict
from unisono.launcher.verify_plan import Setting

WIDTH = 100
COLUMNS = ("ranks", "dtype", "setting", "against", "tokens", "other tokens", "logits", "verdict")
_RIGHT = ("ranks", "tokens", "other tokens", "logits")


def table_text(verdicts: Sequence[Verdict]) -> str:
    """Return the table, at most `WIDTH` columns wide."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for verdict in verdicts:
        table.add_row(*cells(verdict))
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def cells(verdict: Verdict) -> tuple[str, ...]:
    """The texts of a row, in the order of `COLUMNS`."""
    setting = verdict.setting
    if verdict.relative_rms is None:
        logits = f"{verdict.num_other_logits:,} other"
    else:
        logits = f"off {verdict.relative_rms:.1e}"
    return (
        str(setting.tp),
        setting.dtype,
        setting.label,
        verdict.against,
        f"{verdict.num_tokens:,}",
        f"{verdict.num_other_tokens:,}",
        logits,
        verdict_text(verdict),
    )


def verdict_text(verdict: Verdict) -> str:
    """Say in a few words what was found."""
    if verdict.note:
        return verdict.note
    if verdict.first is not None and not verdict.ok:
        return difference_text(verdict.first)
    if verdict.bound is not None:
        ties = f", {verdict.num_other_tokens} near ties" if verdict.num_other_tokens else ""
        return f"within {verdict.bound:.1e}{ties}"
    return "equal"


def difference_text(first: Difference) -> str:
    """Say where the first difference is and how large it is."""
    what = f"{first.got} for {first.want}" if first.is_token else "other logits"
    text = f"prompt {first.prompt}, token {first.token}: {what}"
    if first.margin is not None:
        text += f", margin {first.margin:.2g}"
    if first.largest is not None:
        text += f", log-probabilities off by {first.largest:.2g}"
    return text


def closing_line(verdicts: Sequence[Verdict], seconds: float) -> str:
    """Count what was promised and held."""
    bad = sum(not verdict.ok for verdict in verdicts)
    tokens = sum(verdict.num_tokens for verdict in verdicts)
    held = f"{len(verdicts) - bad} of {len(verdicts)} promises hold"
    return f"{held}: {tokens:,} tokens and their logits compared in {seconds:.0f} s"


def as_json(
    model: str, verdicts: Sequence[Verdict], findings: Mapping[Setting, Finding]
) -> dict[str, Any]:
    """Return what `--json` writes."""
    return {
        "model": model,
        "ok": all(verdict.ok for verdict in verdicts),
        "settings": [
            {
                **dataclasses.asdict(verdict.setting),
                "label": verdict.setting.label,
                "against": verdict.against,
                "tokens": verdict.num_tokens,
                "other_tokens": verdict.num_other_tokens,
                "other_logits": verdict.num_other_logits,
                "first": None if verdict.first is None else dataclasses.asdict(verdict.first),
                "relative_rms": verdict.relative_rms,
                "bound": verdict.bound,
                "note": verdict.note,
                "ok": verdict.ok,
                "finding": _finding(findings, verdict.setting),
            }
            for verdict in verdicts
        ],
    }


def ranks_text(setting: Setting) -> str:
    """Rank count and dtype in words."""
    return f"{setting.tp} rank{'s' if setting.tp > 1 else ''}, {setting.dtype}"


def _finding(findings: Mapping[Setting, Finding], setting: Setting) -> str | None:
    return findings[setting].text if setting in findings else None
