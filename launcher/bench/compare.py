"""Two settings, or two commits, of a benchmark against each other: `--compare`.

Each run is a process of its own, `unisono bench ... --json`. A pair is one run of A and one of B;
pairs begin with A and with B in turns, so that a machine that slows down or speeds up favours
neither. The ratio of a pair is B's time over A's. What is reported is the geometric mean of the
ratios, with Student's t interval of their logarithms: it holds the true ratio in 95 % of cases if
these are normally distributed.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
from click.core import ParameterSource

import unisono
from unisono.launcher.bench.engine import EXACT, AnswersDiffer
from unisono.launcher.bench.report import Command, Report, versions, versions_line
from unisono.launcher.option_kinds import WHOLE
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError

PAIRS, LEAST_PAIRS = 4, 2
LEVEL = 0.95
OWN = ("compare", "compare_checkout", "pairs", "as_json", "output")
"""Parameters that are not for the runs."""
_GRACE_S = 10.0


class Planned(Protocol):
    """What is needed of the plan of a benchmark."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the lines of its result."""
        ...


class Interval(NamedTuple):
    """A ratio, and between which values it lies."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """In words."""
        if self.low <= 1 <= self.high:
            return "no difference shown"
        return "B is faster" if self.high < 1 else "A is faster"


class Pair(NamedTuple):
    """The results of one run of either side."""

    first: str
    """Which was run first."""
    a: dict[str, Any]
    b: dict[str, Any]

    def seconds(self, name: str) -> tuple[float, float]:
        """Of the lines called `name`. Raises EngineError where one has none."""
        found = [
            each["seconds"]
            for side in (self.a, self.b)
            for each in side["lines"]
            if each["name"] == name
        ]
        if len(found) != 2:
            raise EngineError(f"A and B measured other things: only one of them has {name}")
        return found[0], found[1]

    def ratio(self, name: str) -> float:
        """The time of B over that of A."""
        a, b = self.seconds(name)
        return b / a


class Answers(NamedTuple):
    """How the answers of all runs compare. `broken`: other than was promised."""

    text: str
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two that are compared."""

    name: str
    arguments: tuple[str, ...]
    root: Path
    """Where its `unisono` lies."""

    def command(self) -> list[str]:
        # -P: what lies in the working directory is not to be run in its place.
        return [sys.executable, "-P", "-m", "unisono", "bench", *self.arguments, "--json"]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        paths = [str(self.root), *filter(None, [environ.get("PYTHONPATH")])]
        return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def compare_options(command: Command) -> Command:
    """A decorator that gives a click command what `compare` needs."""
    for option in (
        click.option("--pairs", type=WHOLE, metavar="N", help=f"Of runs.  [default: {PAIRS}]"),
        click.option(
            "--compare-checkout",
            metavar="DIR",
            help="Compare with the unisono of another checkout, B, in the same way.",
        ),
        click.option(
            "--compare",
            metavar="OPTIONS",
            help="Compare with the same command and further OPTIONS, B, in --pairs pairs of runs, "
            "AB and BA in turns: the ratio of the times, with a 95 % interval.",
        ),
    ):
        command = option(command)
    return command


def is_wanted(values: Mapping[str, Any]) -> bool:
    """Whether the command is to compare.

    Raises ConfigError for pairs of nothing, and for a file that every run would write anew.
    """
    wanted = values["compare"] is not None or values["compare_checkout"] is not None
    if values["pairs"] is not None and not wanted:
        raise ConfigError(f"--pairs {values['pairs']}: needs --compare or --compare-checkout")
    if values["trace"] is not None and wanted:
        raise ConfigError(
            f"--trace {values['trace']}: every run would write it anew; trace one without "
            "--compare, or those of B, of which the last stays: --compare '--trace FILE'"
        )
    return wanted


def compare(make_plan: Callable[..., Planned], report: Report) -> int:
    """Run the command that is under way in pairs. Raises ConfigError for what a user got wrong."""
    context = click.get_current_context()
    num_pairs = PAIRS if context.params["pairs"] is None else context.params["pairs"]
    if num_pairs < LEAST_PAIRS:
        raise ConfigError(f"--pairs {num_pairs}: must be at least {LEAST_PAIRS}")
    sides = _sides(context, make_plan)
    pairs: list[Pair] = []
    for number in range(num_pairs):
        turn = sides if number % 2 == 0 else sides[::-1]
        results = {side.name: run(side) for side in turn}
        pairs.append(Pair(turn[0].name, results["A"], results["B"]))
        for text in _lines_of(pairs, sides):
            report.line(text)
    found = {
        each["name"]: interval([pair.ratio(each["name"]) for pair in pairs])
        for each in pairs[0].a["lines"]
    }
    for name, ratio in found.items():
        report.line(
            f"{name}: B takes {ratio.mean:.4f} of the time of A (95 %: {ratio.low:.4f} to "
            f"{ratio.high:.4f}, {num_pairs} pairs): {ratio.verdict}"
        )
    answers = judge_answers(pairs, same_code=sides[0].root == sides[1].root)
    report.line(f"answers: {answers.text}")
    report.end(
        {
            **versions(),
            "bench": f"compare {sides[0].arguments[0]}",
            "sides": {side.name: list(side.arguments) for side in sides},
            "pairs": [pair._asdict() for pair in pairs],
            "ratios": {
                name: {**ratio._asdict(), "verdict": ratio.verdict} for name, ratio in found.items()
            },
            "answers": answers.text,
        }
    )
    if answers.broken:
        raise AnswersDiffer(f"answers: {answers.text}")
    return 0


def run(side: Side) -> dict[str, Any]:
    """Run one side once. Raises ConfigError and EngineError with the message that it ended with."""
    with subprocess.Popen(
        side.command(),
        env=side.environ(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            child.kill()
            raise
    if child.returncode == 0:
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result
    said = (err.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
    message = said.removeprefix("unisono: ").removeprefix("error: ")
    raise (ConfigError if child.returncode == 2 else EngineError)(f"{side.name}: {message}")


def interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of at least two ratios, and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = t_quantile(len(logs) - 1) * error
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def t_quantile(dof: int) -> float:
    """Between minus and plus which value 95 % of Student's t with `dof` degrees of freedom lie.

    By bisection of `t_share`.
    """
    low, high = 0.0, 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, dof) < LEVEL else (low, middle)
    return high


def t_share(t: float, dof: int) -> float:
    """The part of Student's t within -t to t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = dof % 2
    term = total = cosine if is_odd else 1.0
    for number in range(2 + is_odd, dof - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    if not is_odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if dof > 1 else 0.0))


def judge_answers(pairs: Sequence[Pair], *, same_code: bool) -> Answers:
    """Say whether all runs had the same answers, and whether they had to.

    Runs of the same requests with the same numerics had, unless these are "fast" or the code is
    another.
    """
    of_a = [_tokens(pair.a) for pair in pairs]
    of_b = [_tokens(pair.b) for pair in pairs]
    a, b = pairs[0].a["numerics_of"], pairs[0].b["numerics_of"]
    if all(each == of_a[0] for each in (*of_a, *of_b)):
        return Answers(f"equal in all {2 * len(pairs)} runs", broken=False)
    for name, numerics, each in (("A", a, of_a), ("B", b, of_b)):
        if EXACT in numerics and any(other != each[0] for other in each):
            return Answers(f"runs of {name} differ, and one answer is promised", broken=True)
    asked = pairs[0].a["workload"], pairs[0].b["workload"]
    if asked[0] != asked[1]:
        why = f"A answers {asked[0]!r}, B {asked[1]!r}"
    elif a != b:
        why = f"A computes as {a!r}, B as {b!r}"
    elif EXACT not in a:
        why = "numerics are fast"
    elif not same_code:
        why = "commits may differ"
    else:
        return Answers("A and B differ, and one answer is promised", broken=True)
    return Answers(f"A and B differ, which no promise forbids: {why}", broken=False)


def _sides(context: click.Context, make_plan: Callable[..., Planned]) -> tuple[Side, Side]:
    text, checkout = context.params["compare"] or "", context.params["compare_checkout"]
    try:
        more = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--compare {text}: {error}; quote OPTIONS as for a shell") from None
    home = Path(unisono.__file__).resolve().parent.parent
    other = home if checkout is None else Path(checkout).expanduser().absolute()
    if not (other / "unisono" / "__main__.py").is_file():
        raise ConfigError(
            f"--compare-checkout {checkout}: unisono/__main__.py is not there; choose the root of "
            "a checkout"
        )
    mine = (str(context.info_name), *_given(context))
    if more:
        try:
            _check(context, make_plan, text, [*mine[1:], *more])
        except click.NoSuchOption:
            # Another checkout may have it.
            if checkout is None:
                raise
    a = Side(name="A", arguments=mine, root=home)
    return a, Side(name="B", arguments=(*mine, *more), root=other)


def _check(
    context: click.Context, make_plan: Callable[..., Planned], text: str, arguments: list[str]
) -> None:
    """Refuse a B that cannot run, or would measure something else."""
    if "--help" in arguments:
        raise ConfigError(f"--compare {text}: --help measures nothing; choose other options")
    with context.command.make_context(context.info_name, arguments, parent=context.parent) as b:
        for name in OWN:
            if b.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                flag = "--json" if name == "as_json" else "--" + name.replace("_", "-")
                raise ConfigError(f"--compare {text}: {flag} is for both; give it outside")
        names = make_plan(**context.params).names, make_plan(**b.params).names
    if names[0] != names[1]:
        raise ConfigError(
            f"--compare {text}: A measures {', '.join(names[0])} and B {', '.join(names[1])}"
        )


def _given(context: click.Context) -> list[str]:
    """What was given on the command line, but for what is not for the runs."""
    arguments = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not ParameterSource.COMMANDLINE or name in OWN:
            continue
        if isinstance(parameter, click.Argument):
            arguments.append(str(context.params[name]))
        elif getattr(parameter, "is_flag", False):
            arguments.append(parameter.opts[0])
        else:
            arguments += [parameter.opts[0], str(context.params[name])]
    return arguments


def _lines_of(pairs: Sequence[Pair], sides: Sequence[Side]) -> Iterator[str]:
    pair = pairs[-1]
    if len(pairs) == 1:
        device = pair.a["cpu"] if pair.a["device"] == "cpu" else pair.a["machine"]
        yield str(device)
        yield versions_line(pair.a)
        for side, result in zip(sides, (pair.a, pair.b), strict=True):
            commit = f" (commit {result['commit']})" if result["commit"] else ""
            yield f"{side.name}: unisono bench {shlex.join(side.arguments)}{commit}"
        yield ""
        yield f"{'pair':>5}  {'first':<6}{'':<28}{'A ms':>14}{'B ms':>14}{'B/A':>10}"
    for each in pair.a["lines"]:
        name = each["name"]
        a, b = pair.seconds(name)
        yield (
            f"{len(pairs):>5}  {pair.first:<6}{name:<28}{1e3 * a:>14.3f}{1e3 * b:>14.3f}"
            f"{pair.ratio(name):>10.4f}"
        )


def _tokens(result: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["tokens"] for each in result["lines"]}
