"""A fake worker whose next token is a hash of the prefix it was told of, and requests for it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any
from zlib import crc32

from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.protocol import Delta, SamplingParams, Tokens
from unisono.runtime.request import Request
from unisono.runtime.scheduler import Scheduler
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import NUM_STOP_IDS, Phase, StepPlan, unpack_sampling

MAX_LEN = 400
VOCABULARY = 1000
RUBBISH = (-1, -1)


def next_token(prefix: list[int], weights: int = 0) -> int:
    return _hash(prefix, weights) % VOCABULARY


class FakeWorker:
    """Keeps tokens where a real one keeps KV: in blocks, by the slot's table.

    Beside each token lies the hash of all up to it, as real KV depends on all before it. A state
    of a hybrid model is such a hash, too. Plans run when they are sent, whatever the scheduler
    knows of earlier results. A rejected draft leaves rubbish in its place. Every hash begins with
    the `weights`. An answer ends where its slot's recipe says so, within accepted drafts too, and a
    row behind that does nothing; the device knows the first NUM_STOP_IDS of the stop ids.
    """

    def __init__(self, num_slots: int, num_states: int = 0, weights: int = 0) -> None:
        self.weights = weights
        self.tokens: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.tables: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.memory: dict[int, tuple[int, int]] = {}
        self.written: dict[int, int] = {}
        """The last step that wrote to a block."""
        self.num_steps = 0
        self.num_states = num_states
        self.states: dict[int, tuple[int, int]] = {}
        """Of each state slot: how many tokens it has seen, and their hash."""
        self.state_of = [0] * (num_slots + 1)
        self.limits = [0] * (num_slots + 1)
        self.stop_ids: list[tuple[int, ...]] = [()] * (num_slots + 1)
        self.num_in_vain = 0
        self.drafted = [0] * (num_slots + 1)
        """Drafts that lie behind the newest token of each slot."""

    def step(self, plan: StepPlan) -> list[int]:
        """Run `plan`, which has no drafts, and no row in vain; the tokens of its sampling rows."""
        tokens, counts = self.run(plan, repeat(0))
        assert 0 not in counts, "a row of an answer that has ended"
        return tokens

    def has_ended(self, slot: int) -> bool:
        return len(self.tokens[slot]) >= self.limits[slot]

    def run(self, plan: StepPlan, accept: Iterator[int]) -> tuple[list[int], list[int]]:
        """Run `plan`; of each row's drafts `accept` says how many are right. Tokens and counts."""
        start = 0
        self.num_steps = plan.step
        shared = dict(zip(plan.open_slot, plan.num_shared, strict=True))
        for slot, length in zip(plan.open_slot, plan.open_length, strict=True):
            self.tokens[slot] = list(plan.open_tokens[start : start + length])
            self.tables[slot] = []
            self.drafted[slot] = 0
            start += length
        for slot, recipe in zip(plan.open_slot, unpack_sampling(plan.open_sampling), strict=True):
            self.limits[slot] = recipe.max_length
            self.stop_ids[slot] = recipe.stop_ids[:NUM_STOP_IDS]
            assert not self.has_ended(slot), "an answer that has ended is opened again"
        for slot, block in zip(plan.block_slot, plan.block_id, strict=True):
            if len(self.tables[slot]) >= shared.get(slot, 0):
                self._clear(block)
            self.tables[slot].append(block)
        if self.num_states:
            self._open_states(plan)
        rows = plan.rows
        assert len(set(rows.slot)) == len(rows.slot), "a slot is in a step twice"
        drafts = rows.drafts or [0] * len(rows)
        saves: dict[int, list[tuple[int, int]]] = {slot: [] for slot in rows.slot}
        for slot, *save in zip(plan.save_slot, plan.save_length, plan.save_state, strict=True):
            assert slot in saves, "a state is saved that no row computes"
            saves[slot].append((save[0], save[1]))
        answers = [
            self._row(*row, accept, saves[row[0]])
            for row in zip(rows.slot, rows.start, rows.count, rows.phase, drafts, strict=True)
        ]
        for slot, answer in zip(rows.slot, answers, strict=True):
            self.drafted[slot] = plan.num_proposals if answer else 0
        each = zip(answers, rows.phase, strict=True)
        told = [answer for answer, phase in each if phase != Phase.CHUNK]
        return [token for answer in told for token in answer], [len(answer) for answer in told]

    def _row(
        self,
        slot: int,
        start: int,
        count: int,
        phase: int,
        drafts: int,
        accept: Iterator[int],
        saves: list[tuple[int, int]],
    ) -> list[int]:
        assert slot > 0
        assert count > 0
        tokens = self.tokens[slot]
        if self.has_ended(slot):
            assert phase == Phase.DECODE, "a prompt of what has ended"
            self.num_in_vain += 1
            return []
        if phase == Phase.DECODE:
            assert count == 1
            assert start <= len(tokens) - 1, "a row starts behind the newest token"
            assert drafts <= self.drafted[slot], "drafts are checked that nobody made"
            start = len(tokens) - 1
        for at in range(start, start + count):
            self._write(slot, at)
        self._keep_state(slot, start, start + count, saves)
        if phase == Phase.CHUNK:
            return []
        assert len(tokens) == start + count
        state = self._read(slot, start + count)
        tokens.append(state % VOCABULARY)
        right = min(next(accept), drafts) if drafts else 0
        for at in range(start + count, start + count + right):
            if self._end(slot):
                break
            state = _hash(tokens[at : at + 1], state)
            tokens.append(state % VOCABULARY)
            self._write(slot, at)
            self._keep_state(slot, at, at + 1, [])
        self._end(slot)
        for at in range(len(tokens) - 1, start + count + drafts):
            assert self._is_unwritten(self._place(slot, at)), "a place is written twice"
            self.memory[self._place(slot, at)] = RUBBISH
        return tokens[start + count :]

    def _end(self, slot: int) -> bool:
        """End the answer of a slot if its newest token does; whether it has ended."""
        tokens = self.tokens[slot]
        if tokens[-1] in self.stop_ids[slot]:
            self.limits[slot] = len(tokens)
        return self.has_ended(slot)

    def _write(self, slot: int, at: int) -> None:
        place = self._place(slot, at)
        assert self._is_unwritten(place), "a place is written twice"
        before = self.memory[self._place(slot, at - 1)] if at else (0, self.weights)
        assert before is not RUBBISH, "a rejected draft is read"
        token = self.tokens[slot][at]
        self.written[place // 64] = self.num_steps
        self.memory[place] = token, _hash([token], before[1])

    def _is_unwritten(self, place: int) -> bool:
        return self.memory.get(place, RUBBISH) is RUBBISH

    def _read(self, slot: int, length: int) -> int:
        """The hash of the first `length` tokens as they lie in the blocks, each block checked."""
        state = self.weights
        for begin in range(0, length, 64):
            places = range(self._place(slot, begin), self._place(slot, min(begin + 64, length) - 1))
            kept = [self.memory[place] for place in (*places, places.stop)]
            state = _hash([token for token, _ in kept], state)
            assert kept[-1][1] == state, "a block of another prefix"
        return state

    def _open_states(self, plan: StepPlan) -> None:
        """Each slot's own state starts as a snapshot of exactly what it shares, or empty."""
        opened = zip(
            plan.open_slot, plan.open_state, plan.open_restore, plan.num_shared, strict=True
        )
        for slot, state, restore, num_shared in opened:
            assert 0 < state <= self.num_states
            assert state != restore
            self.state_of[slot] = state
            length = num_shared * 64
            wanted = length, _hash(self.tokens[slot][:length], self.weights)
            self.states[state] = self.states[restore] if restore else (0, self.weights)
            assert self.states[state] == wanted, "a snapshot of another prefix"

    def _keep_state(self, slot: int, start: int, end: int, saves: list[tuple[int, int]]) -> None:
        """Take tokens [start, end) into the slot's state, and save it on the way."""
        if not self.num_states:
            return
        count, state = self.states[self.state_of[slot]]
        assert count == start, "a state lost its place"
        for length, snapshot in saves:
            assert length % 64 == 0
            assert start < length <= end, "a state is saved that the row does not compute"
            self.states[snapshot] = length, _hash(self.tokens[slot][start:length], state)
        self.states[self.state_of[slot]] = end, _hash(self.tokens[slot][start:end], state)

    def _clear(self, block: int) -> None:
        for place in range(block * 64, block * 64 + 64):
            self.memory.pop(place, None)

    def _place(self, slot: int, position: int) -> int:
        block = self.tables[slot][position // 64]
        assert block > 0, "block 0 is scratch"
        return block * 64 + position % 64


class Scripted:
    """A policy that says one number after the other."""

    def __init__(self, script: Iterator[int]) -> None:
        self._script = script

    def choose(self, num_rows: int) -> int:
        return next(self._script)

    def note(self, num_rows: int, drafts: int, counts: Sequence[int], seconds: float) -> None:
        pass


def request(
    number: int,
    length: int,
    max_tokens: int,
    *,
    family: int | None = None,
    priority: int = 0,
    **params: object,
) -> Request:
    """Request `number`; prompts of one family are prefixes of each other (default: its own)."""
    seed = number if family is None else family
    return Request(
        client="c",
        request_id=number,
        prompt_ids=array("i", [(seed * 31 + i * 7) % VOCABULARY for i in range(length)]),
        priority=priority,
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        max_tokens=min(max_tokens, MAX_LEN - length),
        arrived_s=0.0,
    )


def scheduler(
    num_blocks: int = 20,
    max_requests: int = 4,
    max_step_tokens: int = 128,
    eos: int = -1,
    prefix_cache: bool = True,
    kind: type[Scheduler] = Scheduler,
    **ahead: Any,
) -> Scheduler:
    return kind(
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_model_len=MAX_LEN,
        max_step_tokens=max_step_tokens,
        eos_token_ids=[eos],
        prefix_cache=prefix_cache,
        **ahead,
    )


def expected(asked: Request, eos: int = -1, weights: Sequence[int] = ()) -> tuple[list[int], str]:
    """The answer of the model alone, by the definition of stopping; with weights by token."""
    prefix, answer = list(asked.prompt_ids), []
    while True:
        now = weights[len(answer)] if weights else 0
        answer.append(next_token(prefix + answer, now))
        if answer[-1] == eos and not asked.params.ignore_eos:
            return answer, "stop"
        if answer[-1] in asked.params.stop_token_ids:
            return answer, "stop"
        if len(answer) == asked.max_tokens:
            return answer, "length"


def orders_of(worker: WorkerConfig) -> RuntimeOrders:
    """Orders of a runtime that nobody starts."""
    return RuntimeOrders(
        config=RuntimeConfig(worker=worker),
        client_endpoint="",
        worker_endpoint="",
        session="s" * 32,
        private_dir="",
        version="0.0.7",
    )


def told(messages: Iterable[object], number: int) -> list[int]:
    """The tokens that an engine has told of request `number`, in order."""
    tokens: list[int] = []
    for message in messages:
        if isinstance(message, Delta) and message.request_id == number:
            tokens += message.token_ids
        if isinstance(message, Tokens):
            pairs = zip(message.request_ids, message.token_ids, strict=True)
            tokens += [token for request_id, token in pairs if request_id == number]
    return tokens


def drain(plans: Scheduler, worker: FakeWorker) -> dict[int, list[int]]:
    """Run as the engine does until nothing is left; the tokens that came, by request."""
    answers: dict[int, list[int]] = {}
    due: deque[tuple[list[int], list[int]]] = deque()
    while plans.has_work:
        while (plan := plans.next_plan()) is not None:
            plans.audit()
            due.append(worker.run(plan, repeat(0)))
        for news in plans.apply(*due.popleft()):
            answers.setdefault(news.request.request_id, []).append(news.token_id)
        plans.audit()
    return answers


def _hash(tokens: list[int], before: int) -> int:
    """crc32 goes on where it stopped: of the parts it is the same as of the whole."""
    return crc32(array("i", tokens).tobytes(), before)
