"""Finds the op at fault: runs the two settings again with every op watched, and compares.

Within a rank count each rank must return the bits that it returns in the plain setting, so the
first other checksum names op and rank, up to the one that chooses the token.

Between rank counts only what every rank holds whole can be compared: norms and sums over ranks. The
first of them that is off says that it, or an op since the one before, is at fault; where none is
off but the answers are apart, it is an op behind the last of them. Shards are not put side by side:
key heads may lie on several ranks, and delta nets and experts are cut in other ways again. Instead
the count runs once more with all of those ops as references. An op of a rank that is off from what
it returns there is suspected; the greater count is looked at first. Of the suspects, in the order
of the forward, the first is named whose reference alone makes the difference go away: those behind
it are off for its sake. So a finer measure may be taken where the bound finds nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.launcher.trace import (
    REPLICATED,
    Parting,
    RankTrace,
    ops_before,
    read_trace,
    where_bits_part,
    where_ranks_part,
    where_references_part,
)
from unisono.launcher.verify.bounds import RANK_TOLERANCE, rank_bound
from unisono.launcher.verify.compare import Verdict, judge_ranks, with_margin
from unisono.launcher.verify.plan import Reach, Setting, engine_options, interruptions, limits
from unisono.launcher.verify.run import (
    NUM_TOP,
    Answer,
    Channel,
    Run,
    ask,
    order_of,
    params_of,
)
from unisono.launcher.verify.task import Task
from unisono.runtime.protocol import EngineError
from unisono.workers.protocol import logprob_width

KV_CACHE = "kv_cache"
"""What a trace calls cached keys and values: they have no reference."""
SAMPLER = "sampler"
"""The part of the model, in a trace, whose ops choose tokens."""
_NOWHERE = Reach(
    longest_prompt=0, num_cached_tokens=0, num_preemptions=0, num_replays=0, num_drafted=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How ranks are watched: fields of WorkerConfig of the same names."""

    trace_dir: str
    trace_values: tuple[str, ...] = ()
    reference_ops: tuple[str, ...] = ()


OpenWatched = Callable[[Mapping[str, Any], Watch], AbstractContextManager[Channel]]
"""From the options of an engine to a running one whose ranks are watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the bisection says of one setting."""

    text: str
    verdict: Verdict
    """With the margin at the first difference, where it could be measured."""
    parting: Parting | None = None
    is_gone: bool | None = None
    """Whether the op's reference makes the difference go away; None: there is none to try."""


def bisect(task: Task, verdict: Verdict, open_watched: OpenWatched) -> Finding:
    """Run the setting of `verdict` and what it was compared with again, watched."""
    search = _Search(task, verdict, open_watched)
    try:
        seen = search.look()
        if not seen.differs:
            return Finding(text=search.no_difference(), verdict=verdict)
        verdict = with_margin(verdict, seen.want, seen.got)
        culprit = search.culprit(seen)
    except EngineError as error:
        return Finding(text=f"bisection failed: {error}", verdict=verdict)
    parting = culprit or seen.parting
    if parting is None:
        text = "the answer differs again, though no op does: look at what lies between ops"
        return Finding(text=text, verdict=verdict)
    is_gone = None if parting.op == KV_CACHE else culprit is not None
    text = (
        f"first difference: {parting}; "
        + {
            None: "a block holds the keys and values of other tokens: the cache is at fault",
            True: "with its reference the difference is gone: the kernel is at fault",
            False: "with its reference the difference stays: look at what the op is given",
        }[is_gone]
    )
    return Finding(text=text, verdict=verdict, parting=parting, is_gone=is_gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What the two runs showed."""

    base: Sequence[RankTrace]
    parting: Parting | None
    """Where their ops part."""
    hint: Parting | None
    """Where they do by less than they may, if nothing else does and the answers are apart."""
    want: Answer
    got: Answer
    are_apart: bool
    """Whether the answers do, whatever ops returned."""

    @property
    def differs(self) -> bool:
        return self.are_apart or self.parting is not None


class _Search:
    """Two settings, and the request whose answers differ."""

    def __init__(self, task: Task, verdict: Verdict, open_watched: OpenWatched) -> None:
        self._task = task
        self._open = open_watched
        self._setting = verdict.setting
        self._between_counts = verdict.bound is not None
        self._base = task.base_of(self._setting) if self._between_counts else self._setting.plain
        first = verdict.first
        self._request = 0 if first is None else first.request
        self._token = 0 if first is None else first.token
        self._bound = rank_bound(task.model, self._setting.dtype)
        # Of a row, where the same bits are not promised; and what is tried where nothing is found.
        self._tolerance, *self._finer = (
            self._bound * RANK_TOLERANCE / part for part in (1, 2, 4, 8)
        )

    @property
    def _end(self) -> int:
        """The position from which on the two may have other tokens."""
        prompt = self._order(self._setting)[self._request]
        return len(self._task.prompts[prompt]) + self._token

    def look(self, references: tuple[str, ...] = ()) -> _Sight:
        """Run the two where these ops are references."""
        both = (self._base, self._setting)
        apart = self._options_of(self._base) != self._options_of(self._setting)
        engines = [(each,) for each in both] if apart else [both]
        with _folders() as new:
            values = REPLICATED if self._between_counts else ()
            found = []
            for settings in engines:
                found += self._watched(settings, new(), values, references)
            (base, want), (other, got) = found
            are_apart, hint = self._are_apart(want, got), None
            if self._between_counts:
                part = partial(where_ranks_part, base[0], other, self._end)
                parting = part(self._tolerance)
                if are_apart and parting is None:
                    hint = next(filter(None, map(part, self._finer)), None)
            else:
                if self._setting.speculate != "off":
                    other = [trace.settled() for trace in other]
                parting = where_bits_part(base, other, self._end)
        return _Sight(
            base=base, parting=parting, hint=hint, want=want, got=got, are_apart=are_apart
        )

    def culprit(self, seen: _Sight) -> Parting | None:
        """The first suspect whose reference makes the difference go away."""
        tried = {KV_CACHE}
        for parting in self._suspects(seen):
            if parting.op not in tried and not self.look((parting.op,)).differs:
                return parting
            tried.add(parting.op)
        return None

    def _suspects(self, seen: _Sight) -> Iterator[Parting]:
        if self._between_counts:
            yield from self._since_the_last(seen.base[0], seen.parting)
        if seen.parting is not None:
            yield seen.parting
        if seen.hint is not None:
            yield from self._since_the_last(seen.base[0], seen.hint)

    def _since_the_last(self, base: RankTrace, parting: Parting | None) -> Iterator[Parting]:
        """Ops that are off since the last replicated value before `parting`, or of all."""
        numbers: dict[int, str] = {}
        keys: dict[int, str] = {}
        for order, name in ops_before(base, parting).items():
            if _op(name) != KV_CACHE:
                (keys if name.startswith(f"{SAMPLER} ") else numbers)[order] = name
        # Keys that name tokens are no numbers that may be a little off: their ops are tried last,
        # on the very logits.
        for part, values in ((numbers, tuple(numbers.values())), (keys, ())):
            for setting in (self._setting, self._base) if part else ():
                yield from self._off_from_references(setting, part, values)

    def no_difference(self) -> str:
        """What it means that nothing differs this time."""
        if self._setting.graphs:
            return "op by op, without graphs, nothing differs: a graph is at fault"
        if not self._between_counts:
            return "no op returned something else this time: the difference comes and goes"
        most = f"{self._tolerance:.2g} of its size"
        return f"this time no op is off by more than {most}, nor the answer by more than the bound"

    def _off_from_references(
        self, setting: Setting, ops: Mapping[int, str], values: tuple[str, ...]
    ) -> list[Parting]:
        """Which of `ops`, by their places in the forward, return something else than their
        references in a run of `setting`. Of `values` numbers are compared."""
        references = tuple(dict.fromkeys(map(_op, ops.values())))
        with _folders() as new:
            [(got, _)] = self._watched((setting,), new(), values)
            [(want, _)] = self._watched((setting,), new(), values, references)
            for tolerance in (self._tolerance, *self._finer):
                if found := where_references_part(want, got, self._end, tolerance, ops):
                    return found
        return []

    def _are_apart(self, want: Answer, got: Answer) -> bool:
        """Whether the answers differ by more than is allowed, up to where they first did."""
        if self._between_counts:
            plain, run = (
                Run(setting=setting, answers=[_until_other(each, want, got)], reach=_NOWHERE)
                for setting, each in ((self._base, want), (self._setting, got))
            )
            mine, theirs = ([each.answers[0].logprobs] for each in (run, plain))
            return not judge_ranks(run, plain, mine, theirs, self._bound).ok
        here = slice(self._token + 1)
        return (want.token_ids[here], want.checksums[here]) != (
            got.token_ids[here],
            got.checksums[here],
        )

    def _watched(
        self,
        settings: Sequence[Setting],
        directory: Path,
        values: tuple[str, ...],
        references: tuple[str, ...] = (),
    ) -> list[tuple[list[RankTrace], Answer]]:
        """Run settings that can share an engine on one; what its ranks recorded of each."""
        watch = Watch(trace_dir=str(directory), trace_values=values, reference_ops=references)
        found = []
        with self._open(self._options_of(settings[0]), watch) as engine:
            for setting in settings:
                bounds = limits(setting, self._task.sizes)
                engine.reschedule(bounds)
                answer = self._answer(engine, setting)
                engine.reschedule(bounds)  # returns once no step is under way
                found.append((read_trace(directory, setting.tp), answer))
                for path in directory.glob("*.jsonl"):
                    path.unlink()
        return found

    def _options_of(self, setting: Setting) -> Mapping[str, Any]:
        # What a graph replays cannot be watched.
        return engine_options(replace(setting, graphs=False), self._task.sizes)

    def _answer(self, engine: Channel, setting: Setting) -> Answer:
        """The marked request in the company that it had: all that came before, and its wave."""
        order = self._order(setting)
        request = self._request
        if setting == self._base:
            request = order.index(self._order(self._setting)[self._request])
        params = params_of(setting, self._task.max_tokens)
        marked = replace(params, logprobs=NUM_TOP)
        prompts = self._task.prompts
        begin = 0 if setting != self._base else request
        for start in range(begin, len(order), setting.batch):
            wave = order[start : start + setting.batch]
            place = request - start
            asked = [
                (number, prompts[number], marked if at == place else params)
                for at, number in enumerate(wave)
            ]
            answers = ask(engine, asked, place, interruptions(setting, self._task.again))
            if place < len(wave):
                return answers[place]
        raise AssertionError("the request is in no wave")

    def _order(self, setting: Setting) -> Sequence[int]:
        return order_of(setting, len(self._task.prompts))


@contextmanager
def _folders() -> Iterator[Callable[[], Path]]:
    """Makes new folders that last as long as the body."""
    with tempfile.TemporaryDirectory(prefix="unisono-trace-") as place:
        yield lambda: Path(tempfile.mkdtemp(dir=place))


def _until_other(answer: Answer, *both: Answer) -> Answer:
    """`answer` up to where `both` have another token, that included: behind it is another text."""
    pairs = enumerate(zip(*(each.token_ids for each in both), strict=False), 1)
    count = next((at for at, (want, got) in pairs if want != got), len(both[0].token_ids))
    logprobs = answer.logprobs[: count * logprob_width(NUM_TOP)]
    return replace(answer, token_ids=answer.token_ids[:count], logprobs=logprobs)


def _op(name: str) -> str:
    return name.rpartition(" ")[2]
