"""Pairs of runs: their order, the interval, whether answers had to be equal, and refusals."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.fakes import write_checkpoint
from tests.paths import ROOT
from unisono.launcher import cli
from unisono.launcher.bench import compare as bench_compare
from unisono.launcher.bench.compare import (
    Pair,
    Side,
    interval,
    judge_answers,
    run,
    t_quantile,
    t_share,
)
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError

EXACT = "cpu float32 tp=1 attn=tiled numerics=exact unisono 0.1.0"
FAST = EXACT.replace("exact", "fast")


@pytest.mark.parametrize(
    ("dof", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_tables(dof, quantile):
    assert t_quantile(dof) == pytest.approx(quantile, abs=6e-4)
    assert t_share(quantile, dof) == pytest.approx(0.95, abs=1e-4)


def test_an_interval_by_hand():
    """Logarithms of 1, 2, 3, 4 tenths: mean 0.25, deviation 0.129099, t 3.18245, root of 4."""
    found = interval([math.exp(each / 10) for each in (1, 2, 3, 4)])
    assert math.log(found.mean) == pytest.approx(0.25)
    assert math.log(found.high) - 0.25 == pytest.approx(3.18245 * 0.1290994 / 2, rel=1e-5)
    assert found.verdict == "A is faster"


ratios = st.lists(st.floats(0.1, 10), min_size=2, max_size=8)


@given(ratios, st.floats(0.1, 10))
def test_intervals_hold_the_mean_and_do_not_care_for_units_or_sides(ratios, unit):
    found = interval(ratios)
    assert found.low <= found.mean * (1 + 1e-12)
    assert found.mean <= found.high * (1 + 1e-12)
    scaled = interval([unit * each for each in ratios])
    assert scaled == pytest.approx([unit * each for each in found], rel=1e-6)
    turned = interval([1 / each for each in ratios])
    assert turned == pytest.approx([1 / found.mean, 1 / found.high, 1 / found.low], rel=1e-6)


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """2,000 draws of four normal logarithms; 95 % within two standard errors of the share."""
    generator = random.Random(0)
    held = 0
    for _ in range(2000):
        found = interval([2.0 ** generator.gauss(0.3, 0.05) for _ in range(4)])
        held += found.low <= 2.0**0.3 <= found.high
    assert abs(held / 2000 - 0.95) < 0.01


def result(tokens="x", numerics=EXACT, seconds=1.0, name="batch 1", workload="seed 0"):
    return {
        "unisono": "0.1.0",
        "commit": "abc",
        "torch": "",
        "triton": "",
        "driver": "",
        "device": "cpu",
        "cpu": "a cpu",
        "machine": "cpu",
        "numerics_of": numerics,
        "workload": workload,
        "lines": [{"name": name, "seconds": seconds, "tokens": tokens}],
    }


@pytest.mark.parametrize(
    ("a", "b", "numerics", "same_code", "text", "broken"),
    [
        ("xx", "xx", (EXACT, EXACT), True, "equal in all 4 runs", False),
        ("xx", "xx", (EXACT, FAST), True, "equal in all 4 runs", False),
        ("xx", "yy", (EXACT, EXACT), True, "A and B differ, and one answer is promised", True),
        ("xy", "xx", (EXACT, FAST), True, "runs of A differ, and one answer is promised", True),
        ("xx", "xy", (EXACT, EXACT), False, "runs of B differ, and one answer is promised", True),
        ("xx", "xy", (EXACT, FAST), True, "A and B differ, which no promise forbids: A com", False),
        ("xx", "yy", (EXACT, EXACT), False, "A and B differ, .*: commits may differ", False),
        ("xx", "xy", (FAST, FAST), True, "A and B differ, .*: numerics are fast", False),
    ],
)
def test_answers_are_judged_by_what_is_promised(a, b, numerics, same_code, text, broken):
    pairs = [
        Pair("A", result(x, numerics[0]), result(y, numerics[1])) for x, y in zip(a, b, strict=True)
    ]
    found = judge_answers(pairs, same_code=same_code)
    assert found.broken is broken
    assert re.match(text, found.text)


def test_other_requests_may_have_other_answers():
    pair = Pair("A", result("x"), result("y", workload="seed 1"))
    found = judge_answers([pair, pair], same_code=True)
    assert not found.broken
    assert found.text.endswith("no promise forbids: A answers 'seed 0', B 'seed 1'")


@pytest.fixture
def model(tmp_path):
    return str(write_checkpoint(tmp_path / "model", max_position_embeddings=4096))


@pytest.fixture
def bench(model, monkeypatch, capsys):
    """Run `unisono bench step MODEL ...` with fake runs; return code, stdout, stderr, sides run."""
    sides = []

    def fake(side):
        sides.append(side)
        return result(seconds=1.0 if side.name == "A" else 0.5 + 0.01 * len(sides))

    monkeypatch.setattr(bench_compare, "run", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*arguments):
        code = cli.run(["bench", "step", model, "--batch", "1", *arguments])
        return code, *capsys.readouterr(), sides

    return call


def test_pairs_begin_with_either_side_in_turns(bench, model):
    code, out, err, sides = bench("--dtype", "float32", "--compare", "--tp 2 --no-graphs")
    assert (code, err) == (0, "")
    assert "".join(side.name for side in sides) == "ABBAABBA"
    a, b = sides[0], sides[1]
    assert a.arguments == ("step", model, "--batch", "1", "--dtype", "float32")
    assert b.arguments == (*a.arguments, "--tp", "2", "--no-graphs")
    *table, last = out.splitlines()
    assert max(map(len, table)) <= 100
    found = json.loads(last)
    assert [pair["first"] for pair in found["pairs"]] == ["A", "B", "A", "B"]
    ratio = found["ratios"]["batch 1"]
    assert 0.5 < ratio["low"] < ratio["mean"] < ratio["high"] < 0.6
    assert ratio["verdict"] == "B is faster"
    assert table[-1] == "answers: equal in all 8 runs"
    assert any(line.startswith("batch 1: B takes 0.54") for line in table)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--batch", "1", "--temperature", "0.7"), "batch 1"),
        (("--prompt-tokens", "256", "--context", "64"), "256 prompt tokens"),
    ],
)
def test_every_kind_of_step_can_be_compared(model, monkeypatch, capsys, options, name):
    sides = []
    monkeypatch.setattr(bench_compare, "run", lambda side: sides.append(side) or result(name=name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    more = ["--compare", "--tp 2", "--pairs", "2"]
    assert cli.run(["bench", "step", model, *options, *more]) == 0
    assert sides[0].arguments[:2] == ("step", model)
    given = dict(zip(sides[0].arguments[2::2], sides[0].arguments[3::2], strict=True))
    wanted = dict(zip(options[::2], options[1::2], strict=True))
    assert {flag: float(value) for flag, value in given.items()} == {
        flag: float(value) for flag, value in wanted.items()
    }
    assert sides[1].arguments == (*sides[0].arguments, "--tp", "2")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"][name]["mean"] == 1.0


def test_only_json_if_that_is_wanted(bench):
    code, out, _, sides = bench("--compare", "", "--pairs", "2", "--json")
    assert (code, len(out.splitlines()), len(sides)) == (0, 1, 4)
    assert sides[0].arguments == sides[1].arguments
    assert "--json" not in sides[0].arguments


def test_another_checkout_is_run_in_its_place(bench, tmp_path):
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "__main__.py").write_text("")
    code, _, _, sides = bench("--compare-checkout", str(tmp_path), "--pairs", "2")
    assert code == 0
    a, b = sides[0], sides[1]
    assert (b.arguments, b.root) == (a.arguments, tmp_path)
    environ = b.environ({"PYTHONPATH": "/else", "HOME": "/h"})
    assert environ == {"PYTHONPATH": f"{tmp_path}{os.pathsep}/else", "HOME": "/h"}
    assert (a.root / "unisono" / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "--tp 99"], "tp=99: 9 query heads"),
        (["--compare", "--gone"], "No such option"),
        (["--compare", "--batch 2"], "--compare --batch 2: A measures batch 1 and B batch 2"),
        (
            ["--compare", "--prompt-tokens 256"],
            "--batch 1: with --prompt-tokens 256 a step has as many prompts",
        ),
        (["--compare", "--temperature 101"], "--temperature 101.0: must be at least 0 and at most"),
        (["--compare", "--help"], "--compare --help: --help measures nothing"),
        (["--compare-checkout", str(ROOT), "--compare", "--batch 2"], "A measures batch 1 and B"),
        (["--compare", "--json"], "--compare --json: --json is for both; give it outside"),
        (["--compare", "--compare x"], "--compare --compare x: --compare is for both"),
        (["--compare", "'"], "--compare ': No closing quotation"),
        (["--pairs", "4"], "--pairs 4: needs --compare or --compare-checkout"),
        (
            ["--compare", "", "--trace", "t.json"],
            "--trace t.json: every run would write it anew; trace one without --compare, or those",
        ),
        (["--compare", "", "--pairs", "1"], "--pairs 1: must be at least 2"),
        (["--compare-checkout", "/nowhere"], "--compare-checkout /nowhere: unisono/__main__.py"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_run(bench, arguments, message):
    code, out, err, sides = bench(*arguments)
    assert (code, out, len(err.splitlines()), sides) == (2, "", 1, [])
    assert message in err


def test_other_answers_than_promised_end_with_1(bench, monkeypatch):
    count = iter(range(99))
    monkeypatch.setattr(bench_compare, "run", lambda side: result(tokens=str(next(count) > 2)))
    code, out, err, _ = bench("--compare", "", "--pairs", "2")
    assert (code, err) == (1, "unisono: answers: runs of A differ, and one answer is promised\n")
    assert json.loads(out.splitlines()[-1])["answers"].startswith("runs of A differ")


def side(monkeypatch, code):
    """A side whose command is this Python code."""
    monkeypatch.setattr(Side, "command", lambda self: [sys.executable, "-c", code])
    return Side(name="B", arguments=(), root=Path("/nowhere"))


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("import sys; sys.exit('unisono: error: --tp 9: no')", EngineError, "B: --tp 9: no"),
        (
            "import sys; print('x\\nunisono: error: --tp 9: no', file=sys.stderr); sys.exit(2)",
            ConfigError,
            "B: --tp 9: no",
        ),
        ("import sys; sys.exit(3)", EngineError, "B: it ended with code 3"),
    ],
)
def test_a_run_that_fails_hands_on_its_own_words(monkeypatch, code, error, message):
    with pytest.raises(error) as caught:
        run(side(monkeypatch, code))
    assert str(caught.value) == message


def test_a_run_ends_with_json(monkeypatch):
    assert run(side(monkeypatch, "print('table'); print('{\"lines\": []}')")) == {"lines": []}


def test_the_command_of_a_side_finds_its_own_package(tmp_path):
    """The package of the working directory must not come in its place."""
    for name in ("here", "there"):
        (tmp_path / name / "unisono").mkdir(parents=True)
        (tmp_path / name / "unisono" / "__main__.py").write_text(f"print({name!r})")
    b = Side(name="B", arguments=("step",), root=tmp_path / "there")
    done = subprocess.run(
        b.command(),
        env=b.environ(os.environ),
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
    )
    assert done.stdout == "there\n"
