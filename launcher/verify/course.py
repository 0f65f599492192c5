"""Runs everything a task of `unisono verify` asks for, and keeps what has been judged so far."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from unisono.launcher.verify.bisect import Finding, Watch, bisect
from unisono.launcher.verify.bounds import oracle_bound, rank_bound
from unisono.launcher.verify.compare import ORACLE, Verdict, judge, judge_oracle, judge_ranks
from unisono.launcher.verify.plan import Setting
from unisono.launcher.verify.run import NUM_TOP, Channel, Run, ask, lost, run_setting
from unisono.launcher.verify.task import Task
from unisono.runtime.protocol import EngineError, RequestRejected, SamplingParams

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
        self._judged: dict[tuple[str, Setting], Verdict] = {}
        self.findings: dict[Setting, Finding] = {}

    @property
    def verdicts(self) -> list[Verdict]:
        order = list(self._task.settings)
        found = self._judged.values()
        return sorted(found, key=lambda each: (each.against == ORACLE, order.index(each.setting)))

    def run_settings(self) -> None:
        """Run every setting, each group on one engine, and judge it. Raises RequestRejected."""
        for options, settings in self._task.groups:
            left = list(settings)
            while left:
                with self._opened(options, left) as engine:
                    while engine is not None and left:
                        if not self._run(engine, left.pop(0)):
                            break

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
        if setting in task.forced and not (run.fault or self.runs[task.base_of(setting)].fault):
            run = self._force(engine, run)
            self.runs[setting] = run
        self._take(replace(self._verdict(run), seconds=time.monotonic() - began))
        return not run.fault

    def _force(self, engine: Channel, run: Run) -> Run:
        """Take the log-probabilities of every prompt with the base's answer behind it.

        Returns `run`, with a fault if the engine is lost meanwhile.
        """
        base = self.runs[self._task.base_of(run.setting)]
        params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=NUM_TOP)
        asked = zip(base.answers, self._sequences(base), strict=True)
        try:
            self._forced[run.setting] = [
                ask(engine, [(answer.prompt, ids, params)])[0].prompt_logprobs
                for answer, ids in asked
            ]
        except RequestRejected:
            raise
        except EngineError as error:
            return replace(run, fault=str(error))
        return run

    def _sequences(self, run: Run) -> list[list[int]]:
        prompts = self._task.prompts
        return [[*prompts[answer.prompt], *answer.token_ids] for answer in run.answers]

    def _verdict(self, run: Run) -> Verdict:
        setting, base = run.setting, self._task.base_of(run.setting)
        if setting == base or setting not in self._task.forced:
            return judge(run, self.runs[setting.plain])
        mine, theirs = self._forced.get(setting), self._forced.get(base)
        if mine is None or theirs is None:
            return judge(run, self.runs[base])
        bound = rank_bound(self._task.model, setting.dtype)
        return judge_ranks(run, self.runs[base], mine, theirs, bound)

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
                for setting in left:
                    self.runs[setting] = lost(setting, str(error))
                    self._take(self._verdict(self.runs[setting]))
                left.clear()
                engine = None
            yield engine
