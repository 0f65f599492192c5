"""Runs everything a task of `unisono verify` asks for, and keeps what has been judged so far."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from unisono.launcher.diagnosis import asks_too_much
from unisono.launcher.verify.bisect import Finding, Watch, bisect
from unisono.launcher.verify.bounds import entries, oracle_bound, rank_bound
from unisono.launcher.verify.compare import (
    MISSING,
    ORACLE,
    Verdict,
    first_tokens,
    judge,
    judge_drawn,
    judge_oracle,
    judge_ranks,
    ranks_name,
)
from unisono.launcher.verify.drawing import noise
from unisono.launcher.verify.plan import Setting
from unisono.launcher.verify.run import (
    NUM_TOP,
    SEED,
    TEMPERATURE,
    Channel,
    Run,
    ask,
    lost,
    run_setting,
)
from unisono.launcher.verify.task import Task
from unisono.runtime.protocol import EngineError, RequestRejected, SamplingParams
from unisono.runtime.sampling_wire import noise_seed
from unisono.workers.protocol import int32s

OpenEngine = Callable[[Mapping[str, Any], Watch | None], AbstractContextManager[Channel]]
"""From the options of an engine, and how its ranks are watched, to a running one."""
AskOracle = Callable[[Sequence[Sequence[int]], Sequence["array[int]"]], Iterator["array[int]"]]
"""From token ids, and their log-probabilities here, to those there (`ask_oracle` of oracle.py)."""


class News(Protocol):
    """Who is told how far it is."""

    def starting(self, setting: Setting) -> None: ...

    def started(self, setting: Setting, seconds: float) -> None: ...

    def running(self, setting: Setting, against: str = "") -> None: ...

    def judged(self, verdict: Verdict) -> None: ...

    def searching(self, setting: Setting) -> None: ...


class Course:
    """The way through a task. Whatever ends it early leaves `verdicts` and `findings` as they are.

    `verdicts`: in the order of the settings, then those of the oracle. `findings`: by setting.
    """

    def __init__(self, task: Task, open_engine: OpenEngine, news: News) -> None:
        self._task = task
        self._open_engine = open_engine
        self._news = news
        self.runs: dict[Setting, Run] = {}
        self._forced: dict[Setting, list[array[int]]] = {}
        self._margins: dict[Setting, dict[int, float]] = {}
        self._judged: dict[tuple[str, Setting], Verdict] = {}
        self.findings: dict[Setting, Finding] = {}

    @property
    def verdicts(self) -> list[Verdict]:
        order = list(self._task.settings)
        found = self._judged.values()
        return sorted(found, key=lambda each: (each.against == ORACLE, order.index(each.setting)))

    def run_settings(self) -> None:
        """Run every setting, each group on one engine, and judge it. Raises RequestRejected, and
        WorkerLost where ranks have no room for what they were asked for."""
        for options, settings in self._task.groups:
            left = list(settings)
            while left := self._without_lost(left):
                with self._opened(options, left) as engine:
                    while engine is not None and left:
                        if not self._run(engine, left.pop(0)):
                            break

    def _without_lost(self, settings: Sequence[Setting]) -> list[Setting]:
        """Those whose plain run is not lost: of the others it is all that there is to say."""
        left = []
        for setting in settings:
            plain = self.runs.get(replace(setting.plain, seeded=False))
            if plain is None or not plain.fault:
                left.append(setting)
            else:
                self.runs[setting] = lost(setting, plain.fault)
                self._take(self._verdict(self.runs[setting]))
        return left

    def ask_oracle(self, ask_about: AskOracle) -> None:
        """Compare the plain answers of each dtype with another program's opinion of them."""
        for base in self._task.bases:
            run, forced = self.runs[base], self._forced.get(base)
            if forced is None:
                self._take(
                    Verdict(setting=base, against=ORACLE, note="nothing to compare", ok=False)
                )
                continue
            self._news.running(base, ORACLE)
            began = time.monotonic()
            bound = oracle_bound(self._task.model, base.dtype)
            try:
                there = list(ask_about(self._sequences(run), forced))
                verdict = judge_oracle(run, self._task.prompts, forced, there, bound)
            except EngineError as error:
                verdict = Verdict(setting=base, against=ORACLE, note=f"failed: {error}", ok=False)
            self._take(replace(verdict, seconds=time.monotonic() - began))

    def find_faults(self) -> None:
        """Bisect the first setting of each rank count and dtype that does not hold its promise.

        Others are most likely off for the same reason, and each search starts engines.
        """
        for (against, setting), verdict in list(self._judged.items()):
            is_known = any(
                (each.tp, each.dtype) == (setting.tp, setting.dtype) for each in self.findings
            )
            is_off = verdict.first is not None or verdict.bound is not None
            if verdict.ok or not is_off or verdict.is_lost or is_known or against == ORACLE:
                continue
            self._news.searching(setting)
            finding = bisect(self._task, verdict, self._open_engine)
            self.findings[setting] = finding
            self._judged[against, setting] = finding.verdict

    def _run(self, engine: Channel, setting: Setting) -> bool:
        """Run a setting; False if the engine is lost."""
        task = self._task
        self._news.running(setting)
        began = time.monotonic()
        run = run_setting(engine, setting, task)
        self.runs[setting] = run
        base = self.runs.get(task.base_of(setting))
        if setting == setting.plain and base is not None and not (run.fault or base.fault):
            try:
                if setting in task.forced:
                    self._forced[setting] = self._likelihoods(engine, base)
                elif base is not run:
                    self._margins[setting] = self._draw_margins(engine, run, base)
            except RequestRejected:
                raise
            except EngineError as error:
                run = self.runs[setting] = replace(run, fault=str(error))
        self._take(replace(self._verdict(run), seconds=time.monotonic() - began))
        return not run.fault

    def _likelihoods(self, engine: Channel, base: Run) -> list[array[int]]:
        """The log-probabilities of every prompt with the base's answer behind it."""
        asked = zip(base.answers, self._sequences(base), strict=True)
        return [_likelihoods_of(engine, answer.prompt, ids) for answer, ids in asked]

    def _draw_margins(self, engine: Channel, run: Run, base: Run) -> dict[int, float]:
        """By request whose draws differ: how far the two candidates are from each other here."""
        found = {}
        for place, first in first_tokens(run, base).items():
            prompt = self._task.prompts[first.prompt]
            before = [*prompt, *base.answers[place].token_ids[: first.token]]
            scores = []
            for token_id in (first.want, first.got):
                if token_id == MISSING:
                    break
                items = _likelihoods_of(engine, first.prompt, [*before, token_id])
                *_, (logprob, _) = entries(items, NUM_TOP)
                seed = noise_seed(SEED, int32s(prompt))
                luck = noise(seed, len(before), token_id)
                scores.append(logprob + TEMPERATURE * luck)
            if len(scores) == 2:
                found[place] = abs(scores[0] - scores[1])
        return found

    def _sequences(self, run: Run) -> list[list[int]]:
        prompts = self._task.prompts
        return [[*prompts[answer.prompt], *answer.token_ids] for answer in run.answers]

    def _verdict(self, run: Run) -> Verdict:
        setting, base = run.setting, self._task.base_of(run.setting)
        if setting == base or setting != setting.plain:
            return judge(run, self.runs[setting.plain], self._task.unasked)
        if run.fault or self.runs[base].fault:
            return judge(run, self.runs[base])
        bound = rank_bound(self._task.model, setting.dtype)
        if not setting.seeded:
            mine, theirs = self._forced[setting], self._forced[base]
            return judge_ranks(run, self.runs[base], mine, theirs, bound)
        greedy = self._judged[ranks_name(base), replace(setting, seeded=False)]
        assert greedy.closeness is not None, "greedy answers are judged first"
        return judge_drawn(run, self.runs[base], self._margins[setting], greedy.closeness, bound)

    def _take(self, verdict: Verdict) -> None:
        self._judged[verdict.against, verdict.setting] = verdict
        self._news.judged(verdict)

    @contextmanager
    def _opened(self, options: Mapping[str, Any], left: list[Setting]) -> Iterator[Channel | None]:
        """An engine; None if it is lost at its start, which is then the fate of those left."""
        with ExitStack() as stack:
            self._news.starting(left[0])
            began = time.monotonic()
            try:
                engine: Channel | None = stack.enter_context(self._open_engine(options, None))
                self._news.started(left[0], time.monotonic() - began)
            except EngineError as error:
                if asks_too_much(error):
                    raise
                for setting in left:
                    self.runs[setting] = lost(setting, str(error))
                    self._take(self._verdict(self.runs[setting]))
                left.clear()
                engine = None
            yield engine


def _likelihoods_of(engine: Channel, prompt: int, ids: Sequence[int]) -> array[int]:
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=NUM_TOP)
    return ask(engine, [(prompt, ids, params)])[0].prompt_logprobs
