"""Judges the runs of `unisono verify`. Pure.

Within a rank count every token and every bit of every logit is promised to be that of the plain
setting. Another rank count adds the same numbers in another order; there the bound is this:

    sigma(dtype) = 4 sqrt(2 L + 2) (u(dtype) + u(float32) sqrt(K))

relative rms of the logits, with L layers, K terms in the longest product and u the unit roundoff
(2^-24, 2^-11 or 2^-8 for float32, float16, bfloat16). 2 L + 2 sums are cut (two a layer, embedding
and head); each is rounded once to the dtype, and its K terms in fp32, in another order; the errors
of sums add like a random walk, and 4 covers what norms and activations make of them. It is measured
with the plain answer as a prompt: then every rank count sees the same tokens, and the
log-probabilities of each token and of the likeliest ones at its place stand for the logits, which
they equal but for a constant. A token may differ only where the plain margin between its candidates
is below 6 sigma rms(log-probabilities): two logits, each wrong by sigma, four deviations out.
What comes after such a token is another text and is not compared.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.launcher.verify_plan import Setting, what_was_missed
from unisono.launcher.verify_run import NUM_TOP, Answer, Run
from unisono.models.config import ModelConfig
from unisono.workers.protocol import logprob_width

_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_WALK = 4
_TIE = 6
RANK_TOLERANCE = 8
"""How many sigma a single row of a replicated value may be off between rank counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where an answer is another one than promised."""

    prompt: int
    request: int
    """Its place among the requests of the run."""
    token: int
    """Number of the token in the answer."""
    want: int
    got: int
    """Token ids; equal ones: only the logits have other bits."""
    margin: float | None = None
    """Between the plain answer's two candidates, in units of logits; None: not measured."""
    largest: float | None = None
    """Largest difference of log-probabilities at that place; None: not measured."""

    @property
    def is_token(self) -> bool:
        return self.want != self.got


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one setting."""

    setting: Setting
    against: str
    """What it was compared with; "": it is what others are compared with."""
    num_tokens: int
    """Compared ones."""
    num_other_tokens: int = 0
    num_other_logits: int = 0
    first: Difference | None = None
    relative_rms: float | None = None
    """Of log-probabilities, between rank counts."""
    bound: float | None = None
    note: str = ""
    ok: bool = True
    is_lost: bool = False
    """The engine was lost, here or where it is compared with."""


def judge(run: Run, plain: Run) -> Verdict:
    """Compare a run with the plain one of its rank count and dtype, bit by bit."""
    by_prompt = {answer.prompt: answer for answer in plain.answers}
    compared = tokens = logits = 0
    first: Difference | None = None
    for place, answer in enumerate(run.answers):
        want = by_prompt.get(answer.prompt)
        if want is None:
            continue
        compared += len(answer.token_ids)
        tokens += _count(want.token_ids, answer.token_ids)
        logits += _count(want.checksums, answer.checksums)
        found = _first_difference(want, answer, place)
        if found and (first is None or found.token < first.token):
            first = found
    missed = what_was_missed(run.setting, run.reach)
    note = _fault(run, plain) or (f"not reached: {missed}" if missed else "")
    return Verdict(
        setting=run.setting,
        against="itself" if run is plain else "plain",
        num_tokens=compared,
        num_other_tokens=tokens,
        num_other_logits=logits,
        first=first,
        note=note,
        ok=first is None and not note,
        is_lost=bool(_fault(run, plain)),
    )


def judge_ranks(
    run: Run,
    base: Run,
    forced: Sequence[array[int]],
    base_forced: Sequence[array[int]],
    num_top: int,
    bound: float,
) -> Verdict:
    """Compare the plain run of a rank count with that of the least one, within `bound`.

    `forced`: for each prompt the log-probabilities, as they travel, of the prompt and the base's
    answer from the second token on.
    """
    pairs = [
        (list(_entries(mine, num_top)), list(_entries(theirs, num_top)))
        for mine, theirs in zip(forced, base_forced, strict=True)
    ]
    rms, scale = _relative_rms(pairs)
    first, tokens, compared, note = None, 0, 0, ""
    for place, (want, got) in enumerate(zip(base.answers, run.answers, strict=True)):
        found = _first_token(want, got, place)
        compared += len(got.token_ids) if found is None else found.token + 1
        if found is None:
            continue
        tokens += 1
        # The last entries are those of the answer.
        at = len(pairs[place][1]) - len(want.token_ids) + found.token
        margin, largest = (
            _margin(pairs[place][1][at]),
            _largest(pairs[place][0][at], pairs[place][1][at]),
        )
        found = replace(found, margin=margin, largest=largest)
        if first is None or (margin or 0.0) > (first.margin or 0.0):
            first = found
    if first is not None and (first.margin or 0.0) >= _TIE * bound * scale:
        note = f"a token differs at a margin of {first.margin:.2g}: more than a near tie"
    if not rms <= bound:
        note = f"log-probabilities are off by {rms:.2g}; rank counts may differ by {bound:.2g}"
    note = _fault(run, base) or note
    return Verdict(
        setting=run.setting,
        against=f"{base.setting.tp} rank" + ("s" if base.setting.tp > 1 else ""),
        num_tokens=compared,
        num_other_tokens=tokens,
        first=first,
        relative_rms=rms,
        bound=bound,
        note=note,
        ok=not note,
        is_lost=bool(_fault(run, base)),
    )


def rank_bound(model: ModelConfig, dtype: str) -> float:
    """Return sigma of the docstring above."""
    terms = max(model.hidden_size, model.intermediate_size)
    walk = _WALK * math.sqrt(2 * model.num_layers + 2)
    return walk * (_ROUNDOFF[dtype] + _ROUNDOFF["float32"] * math.sqrt(terms))


def with_margin(verdict: Verdict, plain: Answer, other: Answer) -> Verdict:
    """The same with what the two answers' log-probabilities say of the first difference."""
    first = verdict.first
    if first is None or first.margin is not None or verdict.bound is not None:
        return verdict
    want = list(_entries(plain.logprobs, NUM_TOP))[first.token]
    got = list(_entries(other.logprobs, NUM_TOP))[first.token]
    measured = replace(first, margin=_margin(want), largest=_largest(got, want))
    return replace(verdict, first=measured)


Entry = tuple[float, Mapping[int, float]]
"""Log-probability of a token, and of the likeliest ids at its place."""


def _entries(items: array[int], num_top: int) -> Iterator[Entry]:
    width = logprob_width(num_top)
    reals = array("f")
    reals.frombytes(items.tobytes())
    for at in range(0, len(items), width):
        yield (
            reals[at],
            {items[i]: reals[i + 1] for i in range(at + 2, at + width, 2) if items[i] >= 0},
        )


def _relative_rms(pairs: Sequence[tuple[Sequence[Entry], Sequence[Entry]]]) -> tuple[float, float]:
    """Of the differences, and the rms of what is compared."""
    off = total = 0.0
    count = 0
    for mine, theirs in pairs:
        if len(mine) != len(theirs):
            return math.inf, 1.0
        for (own, top), (base_own, base_top) in zip(mine, theirs, strict=True):
            values = [(own, base_own)]
            values += [(top[i], base_top[i]) for i in top.keys() & base_top.keys()]
            off += sum((a - b) ** 2 for a, b in values)
            total += sum(b * b for _, b in values)
            count += len(values)
    if not count:
        return math.inf, 1.0
    return math.sqrt(off / total), math.sqrt(total / count)


def _margin(entry: Entry) -> float:
    best, second, *_ = sorted(entry[1].values(), reverse=True)
    return best - second


def _largest(mine: Entry, base: Entry) -> float:
    both = mine[1].keys() & base[1].keys()
    return max((abs(mine[1][i] - base[1][i]) for i in both), default=math.inf)


def _first_token(want: Answer, got: Answer, place: int) -> Difference | None:
    for number, (a, b) in enumerate(zip(want.token_ids, got.token_ids, strict=False)):
        if a != b:
            return Difference(prompt=want.prompt, request=place, token=number, want=a, got=b)
    return None


def _first_difference(want: Answer, got: Answer, place: int) -> Difference | None:
    pairs = zip(want.token_ids, got.token_ids, want.checksums, got.checksums, strict=False)
    for number, (a, b, sum_a, sum_b) in enumerate(pairs):
        if a != b or sum_a != sum_b:
            return Difference(prompt=want.prompt, request=place, token=number, want=a, got=b)
    return None


def _count(want: Sequence[int], got: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(want, got, strict=False))


def _fault(run: Run, plain: Run) -> str:
    if run.fault:
        return f"failed: {run.fault}"
    return f"nothing to compare with: {plain.fault}" if plain.fault else ""
