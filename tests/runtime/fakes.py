"""A fake worker whose next token is a hash of the prefix it was told of, and requests for it."""

from __future__ import annotations

from array import array
from zlib import crc32

from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.runtime.scheduler import Scheduler
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import Phase, StepPlan

MAX_LEN = 400
VOCABULARY = 1000


def next_token(prefix: list[int]) -> int:
    return _hash(prefix, 0) % VOCABULARY


class FakeWorker:
    """Keeps tokens where a real one keeps KV: in blocks, by the slot's table.

    Beside each token lies the hash of all up to it, as real KV depends on all before it.
    """

    def __init__(self, num_slots: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.tables: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.memory: dict[int, tuple[int, int]] = {}

    def step(self, plan: StepPlan) -> list[int]:
        start = 0
        shared = dict(zip(plan.open_slot, plan.num_shared, strict=True))
        for slot, length in zip(plan.open_slot, plan.open_length, strict=True):
            self.tokens[slot] = list(plan.open_tokens[start : start + length])
            self.tables[slot] = []
            start += length
        for slot, block in zip(plan.block_slot, plan.block_id, strict=True):
            if len(self.tables[slot]) >= shared.get(slot, 0):
                self._clear(block)
            self.tables[slot].append(block)
        rows = plan.rows
        assert len(set(rows.slot)) == len(rows.slot), "a slot is in a step twice"
        return [
            token
            for row in zip(rows.slot, rows.start, rows.count, rows.phase, strict=True)
            for token in self._row(*row)
        ]

    def _row(self, slot: int, start: int, count: int, phase: int) -> list[int]:
        assert slot > 0
        assert count > 0
        state = self.memory[self._place(slot, start - 1)][1] if start else 0
        for at in range(start, start + count):
            place = self._place(slot, at)
            assert place not in self.memory, "a place is written twice"
            state = _hash(self.tokens[slot][at : at + 1], state)
            self.memory[place] = self.tokens[slot][at], state
        if phase == Phase.CHUNK:
            return []
        token = self._read(slot, start + count) % VOCABULARY
        assert len(self.tokens[slot]) == start + count
        self.tokens[slot].append(token)
        return [token]

    def _read(self, slot: int, length: int) -> int:
        """The hash of the first `length` tokens as they lie in the blocks, each block checked."""
        state = 0
        for begin in range(0, length, 64):
            places = range(self._place(slot, begin), self._place(slot, min(begin + 64, length) - 1))
            kept = [self.memory[place] for place in (*places, places.stop)]
            state = _hash([token for token, _ in kept], state)
            assert kept[-1][1] == state, "a block of another prefix"
        return state

    def _clear(self, block: int) -> None:
        for place in range(block * 64, block * 64 + 64):
            self.memory.pop(place, None)

    def _place(self, slot: int, position: int) -> int:
        block = self.tables[slot][position // 64]
        assert block > 0, "block 0 is scratch"
        return block * 64 + position % 64


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
) -> Scheduler:
    return kind(
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_model_len=MAX_LEN,
        max_step_tokens=max_step_tokens,
        eos_token_ids=[eos],
        prefix_cache=prefix_cache,
    )


def expected(asked: Request, eos: int = -1) -> tuple[list[int], str]:
    """The answer of the model alone, by the definition of stopping."""
    prefix, answer = list(asked.prompt_ids), []
    while True:
        answer.append(next_token(prefix + answer))
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


def drain(plans: Scheduler, worker: FakeWorker) -> dict[int, list[int]]:
    """Run until nothing is left; the tokens that came, by request."""
    answers: dict[int, list[int]] = {}
    while plans.has_work:
        plan = plans.next_plan()
        assert plan is not None
        plans.audit()
        for news in plans.apply(worker.step(plan)):
            answers.setdefault(news.request.request_id, []).append(news.token_id)
        plans.audit()
    return answers


def _hash(tokens: list[int], before: int) -> int:
    """crc32 goes on where it stopped: of the parts it is the same as of the whole."""
    return crc32(array("i", tokens).tobytes(), before)
