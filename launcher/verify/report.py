"""What `unisono verify` shows: a table, JSON, and one line at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.launcher.verify.bisect import Finding
from unisono.launcher.verify.compare import BASE, MISSING, Difference, Verdict
from unisono.launcher.verify.facts import Facts
from unisono.launcher.verify.plan import Setting

WIDTH = 100
COLUMNS = ("ranks", "dtype", "setting", "against", "tokens", "other", "logits", "verdict")
_RIGHT = ("ranks", "tokens", "other", "logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is known at the end, or when it was interrupted."""

    facts: Facts
    verdicts: Sequence[Verdict]
    findings: Mapping[Setting, Finding]
    num_verdicts: int
    """That there were to be."""
    num_promises: int
    """Of them, that compare something."""
    seconds: float

    @property
    def is_complete(self) -> bool:
        return len(self.verdicts) == self.num_verdicts

    @property
    def ok(self) -> bool:
        """Whether every promise was put to the test and holds, and there was one."""
        is_tested = any(verdict.is_promise for verdict in self.verdicts)
        return self.is_complete and is_tested and all(verdict.ok for verdict in self.verdicts)


def table_text(verdicts: Sequence[Verdict]) -> str:
    """Return the table, at most `WIDTH` columns wide."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for verdict in verdicts:
        table.add_row(*cells(verdict))
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def cells(verdict: Verdict) -> tuple[str, ...]:
    """The texts of a row, in the order of `COLUMNS`."""
    setting = verdict.setting
    return (
        str(setting.tp),
        setting.dtype,
        setting.label,
        verdict.against,
        f"{verdict.num_tokens:,}",
        f"{verdict.num_other_tokens:,}",
        logits_text(verdict),
        verdict_text(verdict),
    )


def logits_text(verdict: Verdict) -> str:
    """How many logits have other bits, or how far they are off where they may be."""
    if verdict.closeness is None:
        return f"{verdict.num_other_logits:,} other"
    return f"off {verdict.closeness.relative_rms:.1e}"


def verdict_text(verdict: Verdict) -> str:
    """Say in a few words what was found."""
    if verdict.note:
        return verdict.note
    if verdict.first is not None and not verdict.ok:
        return difference_text(verdict.first)
    if verdict.against == BASE:
        return "base"
    if verdict.bound is not None:
        count = verdict.num_other_tokens
        ties = f", {count} near tie{'s' if count > 1 else ''}" if count else ""
        return f"within {verdict.bound:.1e}{ties}"
    return "equal"


def difference_text(first: Difference) -> str:
    """Say where the first difference is and how large it is."""
    got = "nothing" if first.got == MISSING else first.got
    what = f"{got} for {first.want}" if first.is_token else "other logits"
    text = f"prompt {first.prompt}, token {first.token}: {what}"
    if first.margin is not None:
        text += f", margin {first.margin:.2g}"
    if first.largest is not None:
        text += f", log-probabilities off by {first.largest:.2g}"
    return text


def outcome_text(verdict: Verdict) -> str:
    """One line on one verdict."""
    setting = verdict.setting
    beside = "" if verdict.against in (BASE, "plain") else f" against {verdict.against}"
    return (
        f"{ranks_text(setting)}, {setting.label}{beside}: {verdict_text(verdict)}; "
        f"{verdict.num_tokens:,} tokens, {verdict.seconds:.1f} s"
    )


def closing_line(report: Report) -> str:
    """Count what was promised and held."""
    promises = [verdict for verdict in report.verdicts if verdict.is_promise]
    held = sum(verdict.ok for verdict in promises)
    tokens = sum(verdict.num_tokens for verdict in promises)
    text = f"{held} of {len(promises)} promises hold"
    if not report.is_complete:
        text = f"interrupted: {text}, of {report.num_promises} to be tested"
    return f"{text}: {tokens:,} tokens and their logits compared in {report.seconds:.0f} s"


def finding_text(finding: Finding) -> str:
    """Where a setting first differs, with the setting."""
    setting = finding.verdict.setting
    return f"{ranks_text(setting)}, {setting.label}: {finding.text}"


def as_json(report: Report) -> dict[str, Any]:
    """Return what `--json` writes."""
    return {
        **dataclasses.asdict(report.facts),
        "ok": report.ok,
        "complete": report.is_complete,
        "seconds": round(report.seconds, 3),
        "settings": [
            {
                **dataclasses.asdict(verdict.setting),
                "label": verdict.setting.label,
                "against": verdict.against,
                "tokens": verdict.num_tokens,
                "other_tokens": verdict.num_other_tokens,
                "other_logits": verdict.num_other_logits,
                "first": None if first is None else _finite(dataclasses.asdict(first)),
                "relative_rms": None if near is None else _number(near.relative_rms),
                "largest": None if near is None else _number(near.largest),
                "bound": verdict.bound,
                "note": verdict.note,
                "promise": verdict.is_promise,
                "ok": verdict.ok,
                "seconds": round(verdict.seconds, 3),
                "finding": _finding(report.findings, verdict),
            }
            for verdict in report.verdicts
            for first, near in ((verdict.first, verdict.closeness),)
        ],
    }


def ranks_text(setting: Setting) -> str:
    """Rank count and dtype in words."""
    return f"{setting.tp} rank{'s' if setting.tp > 1 else ''}, {setting.dtype}"


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in fields.items()}


def _number(value: Any) -> Any:
    """JSON has no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finding(findings: Mapping[Setting, Finding], verdict: Verdict) -> str | None:
    found = findings.get(verdict.setting)
    return None if found is None or found.verdict.against != verdict.against else found.text
