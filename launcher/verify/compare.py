"""Judges the runs of `unisono verify`. Pure.

Within a rank count every token and every bit of every logit is promised to be that of the plain
setting. Another rank count, and another program, is held to a bound (launcher/verify/bounds.py);
there a token may differ only at a near tie. What an answer says after such a token is another text
and is not compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.launcher.verify.bounds import (
    Closeness,
    Entry,
    closeness,
    entries,
    largest_between,
    margin_between,
    margin_to_best,
    oracle_tie,
    rank_tie,
)
from unisono.launcher.verify.plan import Setting, what_was_missed
from unisono.launcher.verify.run import NUM_TOP, Answer, Run

ORACLE = "transformers"
BASE = "-"
"""Stands for what the plain run is compared with: the others are compared with it."""
MISSING = -1
"""Stands for a token that did not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A place where an answer is another one than promised."""

    prompt: int
    request: int
    """Its place among the requests of the run."""
    token: int
    """Number of the token in the answer; below 0: in the prompt, counted from its end."""
    want: int
    got: int
    """Token ids; equal ones: only the logits have other bits."""
    margin: float | None = None
    """Between the two candidates of what it is compared with, in units of logits; None: not
    measured."""
    largest: float | None = None
    """Largest difference of log-probabilities at that place; None: not measured."""

    @property
    def is_token(self) -> bool:
        return self.want != self.got


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One request of a run."""

    prompt: int
    num_tokens: int
    """Compared ones."""
    num_other: int = 0
    """Tokens that differ."""
    first: Difference | None = None
    """Where it begins to differ; of near ties, which may differ, the one of the widest margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one setting."""

    setting: Setting
    against: str
    """What it was compared with: nothing, plain, a rank count or another program."""
    requests: tuple[Compared, ...] = ()
    num_other_logits: int = 0
    first: Difference | None = None
    """The first difference of all requests, or the one of the widest margin."""
    closeness: Closeness | None = None
    """Of log-probabilities, where the same bits are not promised."""
    bound: float | None = None
    """Of its relative rms."""
    note: str = ""
    ok: bool = True
    is_lost: bool = False
    """The engine was lost, here or where it is compared with."""
    is_promise: bool = True
    """Whether anything was compared: not of the plain run that others are compared with, nor of
    what was out of reach."""
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Compared ones."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_other_tokens(self) -> int:
        return sum(request.num_other for request in self.requests)


def judge(run: Run, plain: Run, unasked: frozenset[str] = frozenset()) -> Verdict:
    """Compare a run with the plain one of its rank count and dtype, bit by bit.

    `unasked`: axes that are tried by default, and may be out of reach.
    """
    by_prompt = {answer.prompt: answer for answer in plain.answers}
    requests: list[Compared] = []
    num_other_logits = 0
    for place, answer in enumerate(run.answers):
        want = by_prompt.get(answer.prompt)
        if want is None:
            continue
        found = list(_differences(want, answer, place))
        if answer.is_summed:
            pairs = zip(want.checksums, answer.checksums, strict=False)
            num_other_logits += sum(a != b for a, b in pairs)
        requests.append(
            Compared(
                prompt=answer.prompt,
                num_tokens=len(answer.token_ids),
                num_other=sum(each.is_token for each in found),
                first=found[0] if found else None,
            )
        )
    firsts = [request.first for request in requests if request.first is not None]
    missed = what_was_missed(run.setting, run.reach)
    fault = _fault(run, plain)
    note = fault or (f"not reached: {', '.join(missed.values())}" if missed else "")
    # What nobody asked for may be out of reach of these prompts: then it says nothing.
    is_void = not fault and bool(missed) and missed.keys() <= unasked
    return Verdict(
        setting=run.setting,
        against=BASE if run is plain else "plain",
        requests=tuple(requests),
        num_other_logits=num_other_logits,
        first=min(firsts, key=lambda each: each.token, default=None),
        note=note,
        ok=not firsts and (not note or is_void),
        is_promise=run is not plain and not is_void,
        is_lost=bool(fault),
    )


def judge_ranks(
    run: Run,
    base: Run,
    forced: Sequence[array[int]],
    base_forced: Sequence[array[int]],
    bound: float,
) -> Verdict:
    """Compare the plain run of a rank count with that of the least one, within `bound`.

    `forced`: for each prompt the log-probabilities, as they travel, of the prompt and the base's
    answer from the second token on.
    """
    pairs = [
        (list(entries(mine, NUM_TOP)), list(entries(theirs, NUM_TOP)))
        for mine, theirs in zip(forced, base_forced, strict=True)
    ]
    firsts = first_tokens(run, base)
    for place, first in firsts.items():
        if MISSING not in (first.want, first.got):
            # The last entries are those of the answer.
            at = len(pairs[place][1]) - len(base.answers[place].token_ids) + first.token
            mine, theirs = pairs[place][0][at], pairs[place][1][at]
            first = _measured(first, mine, theirs)
            # What it chose must be what its own logits say, too.
            own = margin_to_best(mine, first.got)
            firsts[place] = replace(first, margin=max(_width(first), own))
    return _of_ranks(run, base, firsts, closeness(pairs), bound)


def judge_drawn(
    run: Run, base: Run, margins: Mapping[int, float], near: Closeness, bound: float
) -> Verdict:
    """Compare what a rank count draws with what the least one does.

    `margins`: by request, at its first other token (`first_tokens`), between the two candidates
    with their noise, in units of logits. `near`: of the greedy answers of the two.
    """
    firsts = {
        place: replace(first, margin=margins.get(place))
        for place, first in first_tokens(run, base).items()
    }
    return _of_ranks(run, base, firsts, near, bound)


def first_tokens(run: Run, base: Run) -> dict[int, Difference]:
    """By request: the first token that is another one than that of `base`."""
    found = {}
    for place, (want, got) in enumerate(zip(base.answers, run.answers, strict=True)):
        for each in _differences(want, got, place):
            if each.is_token:
                found[place] = each
                break
    return found


def ranks_name(setting: Setting) -> str:
    """How a rank count is called where another one is judged against it."""
    return f"{setting.tp} rank" + ("s" if setting.tp > 1 else "")


def judge_oracle(
    run: Run,
    prompts: Sequence[Sequence[int]],
    forced: Sequence[array[int]],
    oracle: Sequence[array[int]],
    bound: float,
) -> Verdict:
    """Compare a plain run with what another program says of the same tokens, within `bound`.

    `oracle`: as `forced`, at each place its own likeliest id first and then the ids of `forced`.
    Everywhere, in prompt and answer, the likeliest id must be the same one, or a near tie.
    """
    pairs = [
        (list(entries(mine, NUM_TOP)), list(entries(theirs, NUM_TOP + 1)))
        for mine, theirs in zip(forced, oracle, strict=True)
    ]
    requests = []
    for place, (answer, (mine, theirs)) in enumerate(zip(run.answers, pairs, strict=True)):
        found = []
        begin = 1 - len(prompts[answer.prompt])
        for number, (own, base) in enumerate(zip(mine, theirs, strict=True), start=begin):
            want, got = next(iter(base[1])), next(iter(own[1]))
            if want != got:
                other = Difference(
                    prompt=answer.prompt, request=place, token=number, want=want, got=got
                )
                found.append(_measured(other, own, base))
        requests.append(
            Compared(
                prompt=answer.prompt,
                num_tokens=len(mine),
                num_other=len(found),
                first=max(found, key=_width, default=None),
            )
        )
    near = closeness(pairs)
    return _within(run.setting, ORACLE, requests, near, bound, oracle_tie(near, bound))


def with_margin(verdict: Verdict, plain: Answer, other: Answer) -> Verdict:
    """The same with what the two answers' log-probabilities say of the first difference."""
    first = verdict.first
    if first is None or first.margin is not None or verdict.bound is not None:
        return verdict
    want, got = (list(entries(each.logprobs, NUM_TOP)) for each in (plain, other))
    if first.token >= min(len(want), len(got)):
        return verdict
    return replace(verdict, first=_measured(first, got[first.token], want[first.token]))


def _within(
    setting: Setting,
    against: str,
    requests: Sequence[Compared],
    near: Closeness,
    bound: float,
    tie: float,
) -> Verdict:
    """The verdict where only closeness is promised: what differs must be nearer than `tie`."""
    firsts = [request.first for request in requests if request.first is not None]
    worst = max(firsts, key=_width, default=None)
    note = ""
    if worst is not None and worst.margin is None:
        note = "an answer has another length"
    elif worst is not None and not _width(worst) <= tie:
        note = f"a token differs at a margin of {worst.margin:.2g}: {tie:.2g} would be a near tie"
    if not near.relative_rms <= bound:
        off = f"{near.relative_rms:.2g}; {bound:.2g} is allowed"
        note = f"log-probabilities are off by {off}"
    return Verdict(
        setting=setting,
        against=against,
        requests=tuple(requests),
        first=worst,
        closeness=near,
        bound=bound,
        note=note,
        ok=not note,
    )


def _of_ranks(
    run: Run, base: Run, firsts: Mapping[int, Difference], near: Closeness, bound: float
) -> Verdict:
    """Of each request up to its first other token: behind it everything may be another."""
    requests = [
        Compared(
            prompt=want.prompt,
            num_tokens=firsts[place].token + 1 if place in firsts else len(want.token_ids),
            num_other=place in firsts,
            first=firsts.get(place),
        )
        for place, want in enumerate(base.answers)
    ]
    against, tie = ranks_name(base.setting), rank_tie(near, bound)
    return _within(run.setting, against, requests, near, bound, tie)


def _differences(want: Answer, got: Answer, place: int) -> Iterator[Difference]:
    """Places where a token or its logits' checksum is another one, or is missing."""
    both = min(len(want.token_ids), len(got.token_ids))
    for number in range(max(len(want.token_ids), len(got.token_ids))):
        a, b = (
            answer.token_ids[number] if number < len(answer.token_ids) else MISSING
            for answer in (want, got)
        )
        at = slice(number, number + 1)
        other_sum = got.is_summed and want.checksums[at] != got.checksums[at]
        if a != b or other_sum:
            yield Difference(prompt=want.prompt, request=place, token=number, want=a, got=b)
        if number == both:
            return


def _measured(difference: Difference, mine: Entry, base: Entry) -> Difference:
    margin = margin_between(base, difference.want, difference.got)
    return replace(difference, margin=margin, largest=largest_between(mine, base))


def _width(difference: Difference) -> float:
    """Its margin; one that has none is the worst."""
    return float("inf") if difference.margin is None else difference.margin


def _fault(run: Run, plain: Run) -> str:
    if run.fault:
        return f"failed: {run.fault}"
    return f"nothing to compare with: {plain.fault}" if plain.fault else ""
