"""Runs the settings of `unisono verify` on engines and keeps what they answered."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unisono.launcher.verify.plan import Reach, Setting, interruptions, limits
from unisono.launcher.verify.task import Task
from unisono.runtime.protocol import (
    Delta,
    EngineError,
    EngineState,
    Finished,
    Order,
    Rejected,
    RequestRejected,
    Reschedule,
    SamplingParams,
    Tokens,
)
from unisono.workers.protocol import int32s

POLL_S = 0.5
SEED = 7
TEMPERATURE = 0.8
NUM_TOP = 20
"""Likeliest ids that are compared where log-probabilities are."""
NOBODY = -1
"""No place in a wave."""


class Channel(Protocol):
    """What is needed of an engine."""

    @property
    def states(self) -> deque[EngineState]: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        checksums: bool = False,
        more: bool = False,
    ) -> int: ...

    def poll(self, timeout_s: float) -> Sequence[Delta | Tokens | Finished | Rejected]: ...

    def reschedule(self, limits: Reschedule) -> None: ...

    def order(self, wanted: Order) -> None: ...


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of one request."""

    prompt: int
    """Index of its prompt."""
    is_summed: bool = True
    """Whether checksums were asked for."""
    token_ids: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    """Of the logits of each token, if they were asked for."""
    logprobs: array[int] = field(default_factory=int32s)
    prompt_logprobs: array[int] = field(default_factory=int32s)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_replays: int = 0
    num_drafted: int = 0
    interrupted: set[str] = field(default_factory=set)
    """Axes whose orders were obeyed before its end, and after its first token or another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A setting and its answers, in the order of submission. `fault`: the engine was lost."""

    setting: Setting
    answers: list[Answer]
    reach: Reach
    fault: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def params_of(setting: Setting, max_tokens: int) -> SamplingParams:
    """How the answers of `setting` are chosen; all have the same length."""
    if not setting.seeded:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=TEMPERATURE, seed=SEED
    )


def order_of(setting: Setting, num_prompts: int) -> list[int]:
    """Return the prompts of the requests of `setting` in order of submission.

    Every prompt once, and again until a batch is full. Each wave, what is asked together, comes
    `times_asked`.
    """
    size = setting.batch
    order: list[int] = []
    for start in range(0, num_prompts, size):
        wave = [number % num_prompts for number in range(start, start + size)]
        order += wave * times_asked(setting)
    return order


def times_asked(setting: Setting) -> int:
    """How often each wave is asked.

    Twice with a prefix cache: what is asked together finds nothing of each other. Once more with
    graphs: logits that are summed up are no longer the business of a graph, so the last time none
    are, and tokens alone are compared.
    """
    return 1 + setting.prefix_cache + setting.graphs


def summed_place(setting: Setting, wave: int) -> int | None:
    """Whose logits are summed up in wave number `wave`: everybody's (None) or nobody's."""
    is_last = (wave + 1) % times_asked(setting) == 0
    return NOBODY if setting.graphs and is_last else None


def run_setting(engine: Channel, setting: Setting, task: Task) -> Run:
    """Run `setting` on an engine with its options. Raises RequestRejected."""
    prompts, params = task.prompts, params_of(setting, task.max_tokens)
    answers: list[Answer] = []
    order = order_of(setting, len(prompts))
    fault = ""
    try:
        engine.reschedule(limits(setting, task.sizes))
        for number, start in enumerate(range(0, len(order), setting.batch)):
            wave = [(at, prompts[at], params) for at in order[start : start + setting.batch]]
            marked = summed_place(setting, number)
            answers += ask(engine, wave, marked, interruptions(setting, task.again))
    except RequestRejected:
        raise
    except EngineError as error:
        fault = str(error)
    return Run(setting=setting, answers=answers, reach=_reach(answers, prompts), fault=fault)


def lost(setting: Setting, fault: str) -> Run:
    """The run of a setting whose engine was lost before it answered."""
    return Run(setting=setting, answers=[], reach=_reach([], []), fault=fault)


Asked = tuple[int, Sequence[int], SamplingParams]
"""Index of a prompt, its ids, how to answer."""
Interruptions = Sequence[tuple[str, Sequence[Order]]]
"""Orders to be obeyed together, and the axis that they are of."""


def ask(
    engine: Channel,
    asked: Sequence[Asked],
    marked: int | None = None,
    interruptions: Interruptions = (),
) -> list[Answer]:
    """Submit requests together; return their answers once all are there and the engine is awake.

    Checksums come with all, or with the one at place `marked` alone. The engine gets one of the
    `interruptions` after another, each when tokens have come since. Raises EngineError, also for
    an order that fails.
    """
    answers: dict[int, Answer] = {}
    for place, (number, prompt_ids, params) in enumerate(asked):
        wanted = marked is None or marked == place
        more = place + 1 < len(asked)
        request_id = engine.submit(prompt_ids, params, checksums=wanted, more=more)
        answers[request_id] = Answer(prompt=number, is_summed=wanted)
    left, due, told = set(answers), deque(interruptions), _Told(engine)
    while left or told.num_due:
        events = engine.poll(POLL_S)
        for event in events:
            if isinstance(event, Tokens):
                for request_id, token_id in zip(event.request_ids, event.token_ids, strict=True):
                    answers[request_id].token_ids.append(token_id)
                continue
            _take(answers[event.request_id], event)
            if not isinstance(event, Delta):
                left.discard(event.request_id)
        axis = told.obeyed()
        for request_id in left if axis else ():
            answers[request_id].interrupted.add(axis)
        if due and left and events and not told.num_due:
            told.order(*due.popleft())
    return list(answers.values())


class _Told:
    """Orders under way."""

    def __init__(self, engine: Channel) -> None:
        self._engine = engine
        self._axis = ""
        self.num_due = 0
        """Of their answers."""

    def order(self, axis: str, orders: Sequence[Order]) -> None:
        self._axis, self.num_due = axis, len(orders)
        for wanted in orders:
            self._engine.order(wanted)

    def obeyed(self) -> str:
        """Take what has been answered; the axis, if that was the last. Raises EngineError."""
        states, num_due = self._engine.states, self.num_due
        while states:
            self.num_due -= 1
            if error := states.popleft().error:
                raise EngineError(error)
        return self._axis if num_due and not self.num_due else ""


def _take(answer: Answer, event: Delta | Finished | Rejected) -> None:
    match event:
        case Delta():
            answer.token_ids += event.token_ids
            answer.checksums += event.checksums or ()
            answer.logprobs += event.logprobs or int32s()
            answer.prompt_logprobs += event.prompt_logprobs or int32s()
        case Finished():
            answer.num_cached_tokens = event.num_cached_tokens
            answer.num_preemptions = event.num_preemptions
            answer.num_replays = event.num_replays
            answer.num_drafted = sum(event.drafted)
        case Rejected():
            raise RequestRejected(event.message)


def _reach(answers: Sequence[Answer], prompts: Sequence[Sequence[int]]) -> Reach:
    replays = [answer.num_replays for answer in answers]
    return Reach(
        longest_prompt=max((len(prompt) for prompt in prompts), default=0),
        num_cached_tokens=sum(answer.num_cached_tokens for answer in answers),
        num_preemptions=sum(answer.num_preemptions for answer in answers),
        num_replays=max(replays, default=0) - min(replays, default=0),
        num_drafted=sum(answer.num_drafted for answer in answers),
        interrupted=frozenset().union(*(answer.interrupted for answer in answers)),
    )
