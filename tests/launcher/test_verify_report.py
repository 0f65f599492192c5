"""What `unisono verify` shows: the table, JSON, the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from unisono.launcher.verify.bisect import Finding
from unisono.launcher.verify.bounds import Closeness
from unisono.launcher.verify.compare import MISSING, Compared, Difference, Verdict
from unisono.launcher.verify.facts import Facts, fingerprint, read_facts
from unisono.launcher.verify.html import page, write_page
from unisono.launcher.verify.plan import Reach, Setting
from unisono.launcher.verify.report import (
    WIDTH,
    Report,
    as_json,
    closing_line,
    difference_text,
    outcome_text,
    table_text,
)
from unisono.launcher.verify.run import Answer, Run

PLAIN = Setting(tp=1, dtype="float32")
WIDEST = Setting(
    tp=2,
    dtype="bfloat16",
    batch=64,
    chunk=256,
    prefix_cache=True,
    pre_empt=True,
    graphs=True,
    sleep=True,
    reload=True,
    seeded=True,
)
FACTS = Facts(model="a <model>", machine="a CPU, 2 cores", versions={"unisono": "0.1.0"})
FIRST = Difference(prompt=3, request=1, token=17, want=1234, got=56789, margin=0.01)
NEAR = Closeness(
    relative_rms=2e-6, scale=8.0, largest=9e-5, num_equal=7, spread=((-21, 5), (-19, 40), (-16, 2))
)
EQUAL = Verdict(
    setting=PLAIN,
    against="plain",
    requests=tuple(Compared(prompt=number, num_tokens=1000) for number in range(2)),
)
OTHER = Verdict(
    setting=WIDEST,
    against="plain",
    requests=(
        Compared(prompt=0, num_tokens=20),
        Compared(prompt=3, num_tokens=20, num_other=3, first=FIRST),
    ),
    first=FIRST,
    ok=False,
    seconds=4.125,
)
CLOSE = Verdict(
    setting=replace(PLAIN, tp=2),
    against="1 rank",
    requests=(Compared(prompt=0, num_tokens=1000, num_other=1),),
    closeness=NEAR,
    bound=7.5e-5,
)


def report(*verdicts: Verdict, total: int = 0) -> Report:
    findings = {OTHER.setting: Finding(text="first difference: layers.3 & more", verdict=OTHER)}
    return Report(
        facts=FACTS,
        verdicts=verdicts,
        findings=findings if OTHER in verdicts else {},
        num_verdicts=total or len(verdicts),
        num_promises=total or len(verdicts),
        seconds=9.6,
    )


def test_the_table_fits_and_json_says_the_same() -> None:
    table = table_text([EQUAL, OTHER, CLOSE])
    assert max(map(len, table.splitlines())) <= WIDTH
    assert "equal" in table
    assert "56789 for" in " ".join(table.split())
    assert "1 near tie" in " ".join(table.split())
    said = as_json(report(EQUAL, OTHER, CLOSE))
    assert (said["ok"], said["complete"], said["model"]) == (False, True, "a <model>")
    equal, other, close = said["settings"]
    assert (equal["ok"], equal["tokens"], equal["first"]) == (True, 2000, None)
    assert (other["first"]["got"], other["other_tokens"], other["seconds"]) == (56789, 3, 4.125)
    assert other["finding"] == "first difference: layers.3 & more"
    assert (close["relative_rms"], close["bound"], close["finding"]) == (2e-6, 7.5e-5, None)


def test_json_has_no_infinity() -> None:
    far = replace(CLOSE, closeness=replace(NEAR, relative_rms=float("inf")), ok=False)
    assert '"relative_rms": null' in json.dumps(as_json(report(far)), allow_nan=False)


def test_a_line_says_what_became_of_a_setting() -> None:
    assert outcome_text(EQUAL) == "1 rank, float32, plain: equal; 2,000 tokens, 0.0 s"
    assert outcome_text(CLOSE).startswith("2 ranks, float32, plain against 1 rank: within 7.5e-05,")
    assert "prompt 3, token 17: 56789 for 1234, margin 0.01; 40 tokens, 4.1 s" in outcome_text(
        OTHER
    )
    assert difference_text(replace(FIRST, got=MISSING)).startswith(
        "prompt 3, token 17: nothing for"
    )


def test_the_last_line_counts_promises_and_says_what_is_lacking() -> None:
    line = closing_line(report(EQUAL, OTHER))
    assert line == "1 of 2 promises hold: 2,040 tokens and their logits compared in 10 s"
    early = report(EQUAL, total=14)
    assert closing_line(early).startswith("interrupted: 1 of 1 promises hold, of 14 to be tested:")
    assert not early.ok
    assert report(EQUAL).ok
    assert not report(replace(EQUAL, is_promise=False)).ok, "nothing was compared"


def test_a_fingerprint_is_over_tokens_and_logits_and_how_they_came() -> None:
    reach = Reach(
        longest_prompt=0, num_cached_tokens=0, num_preemptions=0, num_replays=0, num_drafted=0
    )

    def digest(tokens: list[int], sums: list[int], numerics: str = "cpu") -> str:
        answers = [Answer(prompt=0, token_ids=tokens, checksums=sums)]
        return fingerprint(Run(setting=PLAIN, answers=answers, reach=reach), numerics).digest

    prints = [digest([1, 2], [-3, 4]), digest([1, 2], [-3, 5]), digest([1, 3], [-3, 4])]
    prints.append(digest([1, 2], [-3, 4], "cuda"))
    assert len(set(prints)) == 4
    assert prints[0] == digest([1, 2], [-3, 4])
    assert re.fullmatch("[0-9a-f]{32}", prints[0])


def test_facts_name_the_machine(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "driver/nvidia/gpus/0000:01").mkdir(parents=True)
    (proc / "cpuinfo").write_text("model name\t: A CPU\n")
    (proc / "driver/nvidia/gpus/0000:01/information").write_text("Model: \t\t A Card\nIRQ: 4\n")
    facts = read_facts("m", 2, tmp_path)
    assert re.fullmatch(r"A CPU, \d+ cores; 2 x A Card", facts.machine)
    assert {"unisono", "python", "torch"} <= facts.versions.keys()
    assert read_facts("m", 0, tmp_path).machine.endswith("cores")


class Page(HTMLParser):
    """What a browser would see of it, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []

    def of(self, tag: str, **attributes: str) -> Iterator[dict[str, Any]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return (had for name, had in self.tags if name == tag and wanted.items() <= had.items())


def test_the_page_holds_everything_and_loads_nothing() -> None:
    text = page(report(EQUAL, OTHER, CLOSE), "2026-11-30 12:00:00 +0000")
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|<iframe|src=", text)
    seen = Page(text)
    assert seen.open == []
    assert "unisono verify: a <model>" in seen.texts
    assert "first difference: layers.3 & more" in " ".join(seen.texts)
    for wanted in ("a CPU, 2 cores", "unisono 0.1.0", "2026-11-30 12:00:00 +0000", "equal"):
        assert wanted in seen.texts
    assert len(list(seen.of("svg"))) == 3
    assert all(name in text for name in ("prefers-color-scheme: dark", "@media print"))
    assert len(text) < 20_000


def test_plots_show_where_differences_begin_and_how_they_lie_to_the_bound() -> None:
    seen = Page(page(report(OTHER), ""))
    [whole, begun], [rest] = (
        list(seen.of("rect", class_="equal")),
        list(seen.of("rect", class_="other")),
    )
    share = float(begun["width"]) / float(whole["width"])
    assert share == pytest.approx(17 / 20, abs=1e-3)
    assert float(rest["x"]) == pytest.approx(float(begun["x"]) + float(begun["width"]), abs=0.02)
    assert "request 1: other from token 17 on" in seen.texts
    seen = Page(page(report(CLOSE), ""))
    bars = list(seen.of("rect", class_="count"))
    heights = [float(bar["height"]) for bar in bars]
    assert [height / max(heights) for height in heights] == pytest.approx(
        [5 / 40, 1, 2 / 40], rel=0.02
    )
    [rms], [bound] = list(seen.of("line", class_="rms")), list(seen.of("line", class_="bound"))
    # 2e-6 lies between 2^-19 and 2^-18.
    assert float(bars[1]["x"]) < float(rms["x1"]) < float(bound["x1"])
    assert "bound 7.5e-05" in seen.texts


def test_a_page_without_anything_to_draw_is_a_page() -> None:
    lost = Verdict(setting=PLAIN, against="itself", note="failed: rank 0 died", ok=False)
    far = replace(
        CLOSE,
        closeness=Closeness(
            relative_rms=float("inf"), scale=1.0, largest=float("inf"), num_equal=0, spread=()
        ),
    )
    seen = Page(page(report(lost, far), ""))
    assert list(seen.of("svg")) == []
    assert "failed: rank 0 died" in seen.texts


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    write_page(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(UnicodeEncodeError):
        write_page(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "né"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
