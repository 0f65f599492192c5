"""The page that `unisono verify --html` writes: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.launcher.verify.compare import Compared, Verdict
from unisono.launcher.verify.report import (
    COLUMNS,
    Report,
    cells,
    closing_line,
    difference_text,
    finding_text,
    outcome_text,
)

_WIDTH, _LEFT, _BOTTOM, _TOP = 720.0, 56.0, 34.0, 16.0
_SPAN = _WIDTH - _LEFT - 12.0
_ROW_HEIGHT, _MOST_HEIGHT, _HISTOGRAM_HEIGHT = 8.0, 240.0, 120.0
_BITS_PER_DIGIT = math.log2(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A rectangle of a plot. `kind`: equal, other or count."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A labelled place on an axis; `kind` "" for a tick, otherwise a line through the plot."""

    at: float
    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What the template draws."""

    height: float
    shapes: Sequence[Shape]
    marks: Sequence[Mark]
    x_label: str
    y_label: str
    y_most: str
    """What stands at the top of the vertical axis."""

    width = _WIDTH
    left = _LEFT
    top = _TOP

    @property
    def base(self) -> float:
        """Where the horizontal axis lies."""
        return self.height - _BOTTOM


def page(report: Report, made: str) -> str:
    """Return the page. `made`: when it was."""
    from jinja2 import Environment, StrictUndefined

    # Names of models and messages of errors are text, whatever they hold.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE).render(
        report=report,
        made=made,
        columns=COLUMNS,
        rows=[(verdict, cells(verdict)) for verdict in report.verdicts],
        figures=[
            (verdict, outcome_text(verdict), _caption(verdict), _plot_of(verdict))
            for verdict in report.verdicts
        ],
        findings=[finding_text(finding) for finding in report.findings.values()],
        closing=closing_line(report),
    )


def write_page(path: Path, text: str) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.absolute().parent, prefix=".unisono-", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _caption(verdict: Verdict) -> str:
    near = verdict.closeness
    if near is not None and near.spread:
        count = near.num_equal + sum(number for _, number in near.spread)
        return (
            f"Differences of {count:,} log-probabilities, as a share of their rms; "
            f"{near.num_equal:,} are equal. The largest is {near.largest:.2g}."
        )
    off = [request for request in verdict.requests if request.first is not None]
    if not verdict.requests:
        return "Nothing was compared."
    requests = f"{len(verdict.requests):,} requests"
    if not off:
        return f"All tokens of {requests} compared, no difference."
    texts = [difference_text(each.first) for each in off[:8] if each.first is not None]
    more = f"; and {len(off) - 8} more" if len(off) > 8 else ""
    return f"{len(off):,} of {requests} differ: {'; '.join(texts)}{more}."


def _plot_of(verdict: Verdict) -> Plot | None:
    if verdict.closeness is not None:
        return _histogram(verdict)
    return _strips(verdict) if verdict.num_tokens else None


def _strips(verdict: Verdict) -> Plot:
    """A row for each request, along its tokens; from its first difference on it is another."""
    requests = verdict.requests
    longest = max(request.num_tokens for request in requests)
    step = min(_ROW_HEIGHT, _MOST_HEIGHT / len(requests))
    shapes = list(_rows(requests, _SPAN / longest, step))
    every = max(1, longest // 8)
    return Plot(
        height=_TOP + step * len(requests) + _BOTTOM,
        shapes=shapes,
        marks=[
            Mark(at=_LEFT + token * _SPAN / longest, text=str(token))
            for token in range(0, longest + 1, every)
        ],
        x_label="token of the answer",
        y_label="requests",
        y_most="0",
    )


def _rows(requests: Sequence[Compared], unit: float, step: float) -> Iterator[Shape]:
    """Rectangles; neighbours that are alike make one."""
    place = 0
    for alike, group in itertools.groupby(requests, key=_extent):
        members = list(group)
        first, count = alike
        y, height = _TOP + place * step, step * len(members)
        name = (
            f"request {place}"
            if len(members) == 1
            else f"requests {place} to {place + len(members) - 1}"
        )
        place += len(members)
        if first:
            text = f"{name}: {first} tokens equal"
            yield Shape(x=_LEFT, y=y, width=first * unit, height=height, kind="equal", title=text)
        if first < count:
            x, width = _LEFT + first * unit, (count - first) * unit
            text = f"{name}: other from token {first} on"
            yield Shape(x=x, y=y, width=width, height=height, kind="other", title=text)


def _extent(request: Compared) -> tuple[int, int]:
    """Tokens before the first difference, and in all."""
    count = request.num_tokens
    return (count if request.first is None else min(request.first.token, count)), count


def _histogram(verdict: Verdict) -> Plot | None:
    """How many differences there are of each size, beside the bound on their rms."""
    near, bound = verdict.closeness, verdict.bound
    if near is None or bound is None or not near.spread:
        return None
    lines = {"bound": math.log2(bound), "rms": math.log2(near.relative_rms)}
    powers = [power for power, _ in near.spread]
    low = math.floor(min(*powers, *lines.values()))
    high = math.ceil(max(*(power + 1 for power in powers), *lines.values())) + 1
    unit = _SPAN / (high - low)
    most = max(count for _, count in near.spread)
    height = _TOP + _HISTOGRAM_HEIGHT + _BOTTOM
    shapes = [
        Shape(
            x=_LEFT + (power - low) * unit + 0.5,
            y=_TOP + _HISTOGRAM_HEIGHT * (1 - count / most),
            width=unit - 1,
            height=_HISTOGRAM_HEIGHT * count / most,
            kind="count",
            title=f"{count:,} from {2.0**power:.1e} to {2.0 ** (power + 1):.1e}",
        )
        for power, count in near.spread
    ]
    digits = range(math.ceil(low / _BITS_PER_DIGIT), math.floor(high / _BITS_PER_DIGIT) + 1)
    marks = [
        Mark(at=_LEFT + (digit * _BITS_PER_DIGIT - low) * unit, text=f"1e{digit}")
        for digit in digits
    ]
    marks += [
        Mark(at=_LEFT + (power - low) * unit, text=f"{name} {2.0**power:.1e}", kind=name)
        for name, power in lines.items()
    ]
    return Plot(
        height=height,
        shapes=shapes,
        marks=marks,
        x_label="difference / rms",
        y_label="count",
        y_most=f"{most:,}",
    )


TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>unisono verify: {{ report.facts.model }}</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1f24; --soft: #5c6670; --line: #d5dae0; --panel: #f5f7f9;
  --good: #2e7d5b; --bad: #c0392b; --calm: #a9c3dc; --bar: #3b6ea5; --bound: #b36b00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e4e8ec; --soft: #9aa5b0; --line: #333a41; --panel: #1c2126;
    --good: #57b98c; --bad: #ef7568; --calm: #37536e; --bar: #7aaee0; --bound: #e0a24a;
  }
}
body {
  margin: 2rem auto; padding: 0 1rem; max-width: 60rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.verdict { font-size: 1.1rem; font-weight: 600; margin: .4rem 0 1.2rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: .88em ui-monospace, monospace; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  padding: .3rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line);
}
th { color: var(--soft); font-weight: 600; } td:not(:nth-child(3), :last-child) {
  white-space: nowrap;
}
figure { margin: 0 0 1.4rem; padding: .8rem 1rem; background: var(--panel); border-radius: 6px; }
figcaption { color: var(--soft); } figcaption b { color: var(--ink); }
svg { display: block; width: 100%; height: auto; margin-top: .5rem; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .axis { stroke: var(--soft); } svg rect { shape-rendering: crispEdges; }
svg .equal { fill: var(--calm); } svg .other { fill: var(--bad); }
svg .count { fill: var(--bar); }
svg .bound, svg .rms { stroke-width: 1.5; }
svg line.bound { stroke: var(--bound); stroke-dasharray: 5 3; }
svg text.bound { fill: var(--bound); }
svg line.rms { stroke: var(--ink); } svg text.rms { fill: var(--ink); }
@media print {
  :root {
    color-scheme: light;
    --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --panel: #fff;
    --good: #2e7d5b; --bad: #c0392b; --calm: #a9c3dc; --bar: #3b6ea5; --bound: #b36b00;
  }
  body { margin: 0; max-width: none; font-size: 11px; }
  figure, tr { break-inside: avoid; } figure { border: 1px solid var(--line); }
  svg * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
</style>
</head>
<body>
<h1>unisono verify: {{ report.facts.model }}</h1>
<p class="verdict {{ 'good' if report.ok else 'bad' }}">{{ closing }}</p>
<dl>
<dt>made</dt><dd>{{ made }}</dd>
<dt>machine</dt><dd>{{ report.facts.machine }}</dd>
<dt>versions</dt>
<dd>{% for name, version in report.facts.versions.items() %}{{ name }} {{ version }}\
{{ ", " if not loop.last }}{% endfor %}</dd>
{% for each in report.facts.fingerprints %}
<dt>bits</dt><dd><code>{{ each.digest }}</code> {{ each.numerics }}</dd>
{% endfor %}
</dl>
<h2>Promises</h2>
<div class="scroll"><table>
<thead><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for verdict, row in rows %}
<tr>{% for cell in row %}<td{% if loop.last %} class="{{ 'good' if verdict.ok else 'bad' }}"\
{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% if findings %}
<h2>What is at fault</h2>
<ul>{% for text in findings %}<li>{{ text }}</li>{% endfor %}</ul>
{% endif %}
<h2>What was compared</h2>
{% for verdict, title, caption, plot in figures %}
<figure>
<figcaption><b class="{{ '' if verdict.ok else 'bad' }}">{{ title }}</b><br>{{ caption }}\
</figcaption>
{% if plot %}
<svg viewBox="0 0 {{ plot.width }} {{ plot.height }}" role="img">
<title>{{ title }}</title>
{% for shape in plot.shapes %}
<rect class="{{ shape.kind }}" x="{{ shape.x|round(2) }}" y="{{ shape.y|round(2) }}" \
width="{{ shape.width|round(2) }}" height="{{ shape.height|round(2) }}">\
<title>{{ shape.title }}</title></rect>
{% endfor %}
<path class="axis" fill="none" \
d="M{{ plot.left }} {{ plot.top }}V{{ plot.base }}H{{ plot.width }}"/>
<text x="{{ plot.left - 6 }}" y="{{ plot.top + 4 }}" text-anchor="end">{{ plot.y_most }}</text>
<text x="{{ plot.left - 6 }}" y="{{ plot.base }}" text-anchor="end">{{ plot.y_label }}</text>
<text x="{{ plot.width }}" y="{{ plot.height - 4 }}" text-anchor="end">{{ plot.x_label }}</text>
{% for mark in plot.marks %}
{% if mark.kind %}
<line class="{{ mark.kind }}" x1="{{ mark.at|round(2) }}" x2="{{ mark.at|round(2) }}" \
y1="{{ plot.top }}" y2="{{ plot.base }}"/>
<text class="{{ mark.kind }}" x="{{ (mark.at + 4)|round(2) }}" \
y="{{ plot.top + (10 if mark.kind == 'rms' else -4) }}">\
{{ mark.text }}</text>
{% else %}
<text x="{{ mark.at|round(2) }}" y="{{ plot.base + 13 }}" text-anchor="middle">\
{{ mark.text }}</text>
{% endif %}
{% endfor %}
</svg>
{% endif %}
</figure>
{% endfor %}
</body>
</html>
"""
"""Colours are variables, so that one drawing serves light, dark and paper."""
