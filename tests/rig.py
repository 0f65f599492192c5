"""A whole engine inside one process: the real scheduler and model runners, ranks as threads.

Nothing is faked but the transport: a rank is a thread, and its collectives meet at a barrier.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.launcher.graph_options import buckets_up_to
from unisono.models.config import ModelConfig
from unisono.models.config_reader import read_model_config
from unisono.models.interface import Build, ForwardBatch, Model
from unisono.models.ledger import fill_weights
from unisono.models.overlay import parse_overlay
from unisono.models.partition import ModelPartition
from unisono.models.random_weights import open_weights
from unisono.models.registry import model_class
from unisono.ops import dispatch
from unisono.ops.attention import AttentionShape
from unisono.ops.comm import Group
from unisono.ops.table import Ops
from unisono.runtime.logprobs import take_prompt_logprobs
from unisono.runtime.protocol import SamplingParams
from unisono.runtime.request import Request
from unisono.runtime.sampling_wire import is_rejecting, with_seed
from unisono.runtime.scheduler import Scheduler
from unisono.runtime.speculation import DraftPolicy
from unisono.workers.batch_builder import BatchBuilder
from unisono.workers.decode_steps import DecodeSteps
from unisono.workers.device import torch_dtype
from unisono.workers.draft_steps import DraftSteps, used_places
from unisono.workers.graph_pool import GraphPool
from unisono.workers.kv_cache import KVCache
from unisono.workers.mixed_steps import MixedSteps
from unisono.workers.model_runner import ModelRunner, StepOutput
from unisono.workers.prompt_steps import PromptSteps
from unisono.workers.protocol import Phase, StepPlan
from unisono.workers.sampler import Sampler
from unisono.workers.slot_table import SlotTable
from unisono.workers.speculator import Speculator
from unisono.workers.state_pool import StatePool, caches_of
from unisono.workers.step_buffers import StepBuffers
from unisono.workers.step_parts import StepParts
from unisono.workers.tracer import SAMPLER, Tracer

T = TypeVar("T")
CPU = torch.device("cpu")


class Meeting:
    """Where the threads of one group exchange tensors.

    A thread computes in its turn only, until it waits for the others: threads that wrest the
    interpreter from each other take twice the processor time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.places: dict[int, Any] = {}
        self.is_broken = False

    def exchange(self, rank: int, value: T) -> list[T]:
        """In the turn of `rank`: what each rank gave, by rank."""
        places = self.places
        places[rank] = value
        if len(places) == self.size:
            self.places = {}
            self.turn.notify_all()
        elif not self.turn.wait_for(lambda: len(places) == self.size or self.is_broken, 60):
            raise threading.BrokenBarrierError
        if len(places) < self.size:
            raise threading.BrokenBarrierError
        return [places[each] for each in range(self.size)]

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """The body of one rank; if it fails, nobody waits for it any longer."""
        with self.turn:
            try:
                yield
            except BaseException:
                self.is_broken = True
                self.turn.notify_all()
                raise


class ThreadGroup(Group):
    """A rank of a Meeting: the sums and their order are the real Group's."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size, None)
        self.meeting = meeting

    def _gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x.clone()))


def run_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `body` as every rank of a group of `size`; return what each returned."""
    meeting = Meeting(size)

    def guarded(rank: int) -> T:
        with meeting.taking_turns():
            return body(ThreadGroup(rank, meeting))

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(guarded, r) for r in range(size)]]


@dataclass
class Rank:
    """One rank's model and buffers."""

    group: ThreadGroup
    ops: Ops
    model: Model
    cache: KVCache
    states: StatePool | None
    runner: ModelRunner
    pool: GraphPool
    build: Build
    logits: list[Tensor] = field(default_factory=list)


@dataclass
class Answer:
    """Tokens of one request and the fp32 logits that chose them, [tokens, vocabulary]."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    reason: str = ""
    logprobs: list[array[int] | None] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    """As they travel: `logprob_width` items a token."""


class LocalEngine:
    """A checkpoint on `tp` thread ranks; of a config alone, with random weights."""

    def __init__(
        self,
        model: Path | ModelConfig,
        *,
        tp: int = 1,
        dtype: str = "float32",
        max_model_len: int = 128,
        num_blocks: int = 64,
        max_requests: int = 16,
        max_step_tokens: int = 2048,
        prefix_cache: bool = True,
        overlay: str = "",
        device: torch.device = CPU,
        graphs: bool = False,
        graph_buckets: Sequence[int] = (),
        prompt_graphs: bool | None = None,
        forced: float = 0.0,
        max_in_flight: int = 2,
        attn: str = "auto",
        ops_of: Callable[[int, Ops], Ops] = lambda rank, ops: ops,
        tracer_of: Callable[[int], Tracer | None] = lambda rank: None,
        num_states: int | None = None,
        num_drafts: int = 0,
        accept: str = "coupled",
        policy_of: Callable[[], DraftPolicy | None] = lambda: None,
        state_dtype: str = "float32",
        random_padding: bool = False,
        num_token_ids: int = 0,
    ) -> None:
        self._attn, self.ops_of, self.tracer_of = attn, ops_of, tracer_of
        self.config = model if isinstance(model, ModelConfig) else read_model_config(model)
        self._padding_ids = self.config.vocab_size * random_padding
        self._load_format = "random" if isinstance(model, ModelConfig) else "auto"
        self._overlay = parse_overlay(overlay, self.config)
        self.partition = ModelPartition.of(self.config, tp, drafts=num_drafts > 0)
        self._num_drafts, self.policy_of, self._forced = num_drafts, policy_of, forced
        self._accept = accept
        self.max_model_len = max_model_len
        self._path = "" if isinstance(model, ModelConfig) else str(model)
        self.graph_buckets = tuple(graph_buckets or buckets_up_to(max_requests))
        self._dtype, self._device, self._graphs = torch_dtype(dtype), device, graphs
        on_gpu = device.type == "cuda"
        self._prompt_graphs = graphs and on_gpu if prompt_graphs is None else prompt_graphs
        self._scheduling: dict[str, Any] = {
            "num_blocks": num_blocks,
            "max_requests": max_requests,
            "max_model_len": max_model_len,
            "max_step_tokens": max_step_tokens,
            "prefix_cache": prefix_cache,
            "max_in_flight": max_in_flight,
            "num_drafts": num_drafts,
        }
        if self.config.is_hybrid:
            states = 2 * max_requests if num_states is None else num_states
            self._scheduling["num_states"] = states
        self._state_dtype = torch_dtype(state_dtype)
        self._num_token_ids = num_token_ids
        self.num_preemptions = 0
        self.num_cached_tokens: list[int] = []
        self.ranks = run_ranks(tp, self._build_rank)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        arrivals: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        before_step: Callable[[int], None] = lambda step: None,
        params: Sequence[SamplingParams] = (),
        priorities: Sequence[int] = (),
        aborts: Mapping[int, int] = MappingProxyType({}),
        scheduling: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Answer]:
        """Answer greedily, or request i by params[i], where max_tokens is the argument's.

        Request i arrives before step arrivals[i] (default: at once) and leaves before step
        aborts[i], if it is there and that is later. Results are applied as late as the real engine
        may: when `max_in_flight` steps have run. `scheduling` overrides, for this call, what the
        engine was made with; no more blocks and requests than that.
        """
        settings = {**self._scheduling, **scheduling}
        scheduler = Scheduler(eos_token_ids=eos_token_ids, policy=self.policy_of(), **settings)
        answers = [Answer() for _ in prompts]
        asked = [
            (arrivals[i] if arrivals else 0, self._request(i, prompt, max_tokens, params))
            for i, prompt in enumerate(prompts)
        ]
        for i, priority in enumerate(priorities):
            asked[i][1].priority = priority
        waiting = list(asked)
        due: deque[tuple[list[int], StepOutput, list[Tensor]]] = deque()
        step = 0
        while waiting or scheduler.has_work:
            for arrival, request in [entry for entry in waiting if entry[0] <= step]:
                scheduler.add(request)
                waiting.remove((arrival, request))
            for leaver in [i for i, last in aborts.items() if last == step]:
                scheduler.abort("test", leaver)
            before_step(step)
            step += 1
            plan = scheduler.next_plan()
            scheduler.audit()
            if plan is not None:
                due.append((_owners(plan, asked), *self.step(plan)))
            if due and (plan is None or len(due) == settings["max_in_flight"]):
                owners, output, logits = due.popleft()
                places = _places(owners, output.counts)
                for news in scheduler.apply(output.tokens, output.counts, output.logprobs):
                    answer = answers[news.request.request_id]
                    answer.token_ids.append(news.token_id)
                    answer.logits.append(logits[places[news.request.request_id].pop(0)])
                    answer.logprobs.append(news.logprobs)
                    answer.prompt_logprobs += take_prompt_logprobs(news.request) or []
                    answer.reason = news.reason or ""
                scheduler.audit()
        assert scheduler.ledger.num_free == scheduler.ledger.num_blocks
        self.num_preemptions = scheduler.num_preemptions
        self.num_cached_tokens = [request.num_cached_tokens for _, request in asked]
        self.drafted = [list(request.drafted) for _, request in asked]
        self.accepted = [list(request.accepted) for _, request in asked]
        return answers

    def step(self, plan: StepPlan) -> tuple[StepOutput, list[Tensor]]:
        """Run one plan on every rank; tokens, and the whole vocabulary's logits of their rows.

        A captured tail shows no logits: then they are empty. On a CPU nothing is captured.
        """

        def run(rank: Rank) -> StepOutput:
            rank.logits.clear()
            output = rank.runner.step(plan)
            if isinstance(output, StepOutput):
                return output
            runner = rank.runner
            kinds, is_mixed = runner._slots.sampling, runner._mixed and runner._mixed.serves(plan)
            if is_mixed or (
                runner._decode is not None
                and plan.rows.decode_only
                and kinds.want_only_tokens(plan.rows.slot)
            ):
                used = used_places(plan)
                is_shown = self._device.type == "cpu"
                logits = torch.cat(rank.logits)[used] if is_shown else torch.empty(len(used), 0)
                rank.logits[:] = [logits]
            return StepOutput(output.tokens, output.logprobs, counts=output.counts)

        outputs = self._everywhere(run)
        assert all(output == outputs[0] for output in outputs)
        digests = {rank.group.digest for rank in self.ranks}
        assert len(digests) == 1, "ranks ran different collectives"
        if not any(phase != Phase.CHUNK for phase in plan.rows.phase):
            return outputs[0], []
        # The last are the sampling rows'; before them lie those of prompts' log-probabilities.
        logits = torch.cat([rank.logits.pop() for rank in self.ranks], dim=1)
        return outputs[0], list(logits[_kept_rows(plan, outputs[0].counts)])

    @torch.inference_mode()
    def prompt_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits at every position of one whole prompt, [len(ids), vocabulary]."""
        blocks = -(-len(ids) // 64)
        table = torch.arange(1, blocks + 1, device=self._device)[None, :]
        positions = torch.arange(len(ids), device=self._device)

        def run(rank: Rank) -> Tensor:
            shape = self._shape(rank.group.rank)
            rank.cache.clear(range(1, blocks + 1))
            delta = None
            if self.config.is_hybrid:
                delta = rank.ops.plan_delta([0], [len(ids)], [len(ids)], [0], device=self._device)
            batch = ForwardBatch(
                torch.tensor(ids, device=self._device),
                positions,
                table[0, positions // 64] * 64 + positions % 64,
                {
                    window: rank.ops.plan_attention(shape, [0], [len(ids)], table, window)
                    for window in self._windows()
                },
                delta,
            )
            caches = caches_of(self.config, rank.cache, rank.states)
            return rank.model.head(rank.model.forward(batch, caches))

        return torch.cat(self._everywhere(torch.inference_mode()(run)), dim=1)

    def _everywhere(self, body: Callable[[Rank], T]) -> list[T]:
        if len(self.ranks) == 1:
            return [body(self.ranks[0])]

        def in_turn(rank: Rank) -> T:
            with rank.group.meeting.taking_turns():
                return body(rank)

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(in_turn, self.ranks))

    def _request(
        self,
        index: int,
        prompt: Sequence[int],
        max_tokens: int,
        params: Sequence[SamplingParams],
    ) -> Request:
        room = self.max_model_len - len(prompt)
        given = params[index] if params else SamplingParams()
        return Request(
            client="test",
            request_id=index,
            prompt_ids=array("i", prompt),
            params=with_seed(given),
            rejects=is_rejecting(given, self._accept),
            max_tokens=min(max_tokens, room),
            arrived_s=0.0,
        )

    @torch.inference_mode()
    def _build_rank(self, group: ThreadGroup) -> Rank:
        device = self._device
        ops = dispatch.resolve(device, self.config.head_dim, self._attn)
        ops = self.ops_of(group.rank, ops)
        tracer = self.tracer_of(group.rank)
        tap = None if tracer is None else tracer.tap
        build = Build(ops, group, self._dtype, device, tap=tap)
        model = self._load(build)
        mine = (self.partition, group.rank, self._dtype)
        cache = KVCache(*mine, device)
        cache.allocate(self._scheduling["num_blocks"])
        states = None
        if self.config.is_hybrid:
            states = StatePool(*mine, self._state_dtype, device, self._num_drafts)
            states.allocate(self._scheduling["num_states"])
        most = (self._scheduling["max_requests"], self.max_model_len)
        slots = SlotTable(*most, device, self._num_drafts)
        owners = (cache, states, slots) if states is not None else (cache, slots)
        pool = GraphPool(device, group, owners, "" if self._graphs else "eager")
        ops = build.within(SAMPLER).ops
        sampler = Sampler(ops, group, self.partition, self._num_token_ids)
        owned = (model, cache, states, slots, sampler, pool)
        shape, windows = self._shape(group.rank), sorted(self._windows())
        parts = StepParts(ops, *owned, self.graph_buckets, shape, windows)
        builder = BatchBuilder(parts)
        decode = speculator = prompts = mixed = None
        if self._num_drafts:
            speculator = Speculator(parts, builder, self._forced)
        if self._graphs:
            sizes = (self._scheduling["max_requests"], self.config.hidden_size, self._dtype)
            buffers = StepBuffers(*sizes, device, self._num_drafts, self._padding_ids)
            decode = (
                DraftSteps(parts, buffers, self._forced, speculator)
                if self._num_drafts
                else DecodeSteps(parts, buffers)
            )
        if self._prompt_graphs:
            prompts = PromptSteps(parts, self._padding_ids)
        if isinstance(decode, DraftSteps) and self._prompt_graphs:
            mixed = MixedSteps(parts, builder, decode)
        runner = ModelRunner(parts, builder, decode, tracer, speculator, prompts, mixed)
        rank = Rank(group, ops, model, cache, states, runner, pool, build)
        model.logits = lambda hidden: _kept(rank, model.head(hidden))
        return rank

    def sleep(self) -> None:
        """Give back what requests wrote, on every rank; graphs of it go first."""
        for rank in self.ranks:
            rank.pool.drop()
            for owner in (rank.cache, rank.states):
                if owner is not None:
                    owner.release()

    @torch.inference_mode()
    def wake(self) -> None:
        """Take that memory again, with what nobody may read in it: NaN as keys, others' states."""
        for rank in self.ranks:
            rank.cache.allocate(self._scheduling["num_blocks"])
            for layer in rank.cache.layers:
                layer.k[1:], layer.v[1:] = torch.nan, torch.nan
            if rank.states is not None:
                rank.states.allocate(self._scheduling["num_states"])
                for tensor in rank.states._tensors:
                    tensor[:, 1:] = 7.0

    def reload(self, path: Path | None = None) -> None:
        """Take the weights of `path`, or the same again, on every rank."""

        @torch.inference_mode()
        def run(rank: Rank) -> None:
            rank.pool.drop()
            kept = rank.model.logits
            fresh = self._load(rank.build, path)
            rank.model.__dict__ = dict(fresh.__dict__)
            rank.model.logits = kept

        self._everywhere(run)

    def _load(self, build: Build, path: Path | None = None) -> Model:
        model = model_class(self.config.family)(build, self.partition, self.max_model_len)
        specs = list(self.partition.weights(build.group.rank))
        where = str(path or self._path)
        with open_weights(where, self._load_format, self._overlay, self._dtype) as source:
            fill_weights(specs, model.targets(), source, lambda done, total: None)
        model.pack()
        return model

    def _shape(self, rank: int) -> AttentionShape:
        return AttentionShape(
            self.partition.heads.size(rank),
            self.partition.kv_heads.size(rank),
            self.config.head_dim,
        )

    def _windows(self) -> set[int]:
        return {self.config.window_of(layer) for layer in range(self.config.num_layers)}


def _owners(plan: StepPlan, asked: Sequence[tuple[int, Request]]) -> list[int]:
    """Ids of the requests that sample in `plan`, in row order; some may have ended when it ran."""
    owner = {request.slot: request.request_id for _, request in asked if request.slot}
    rows = zip(plan.rows.slot, plan.rows.phase, strict=True)
    return [owner[slot] for slot, phase in rows if phase != Phase.CHUNK]


def _places(owners: Sequence[int], counts: Sequence[int]) -> dict[int, list[int]]:
    """By request: which tokens of a step are its."""
    places: dict[int, list[int]] = {}
    each = [
        owner
        for owner, count in zip(owners, counts or repeat(1), strict=False)
        for _ in range(count)
    ]
    for place, owner in enumerate(each):
        places.setdefault(owner, []).append(place)
    return places


def _kept_rows(plan: StepPlan, counts: Sequence[int]) -> list[int]:
    """Rows of logits that gave an answer; those behind wrong drafts did not."""
    rows, first = [], 0
    drafts = plan.rows.drafts or [0] * len(plan.rows)
    sizes = [
        1 + each
        for each, phase in zip(drafts, plan.rows.phase, strict=True)
        if phase != Phase.CHUNK
    ]
    for size, count in zip(sizes, counts or [1] * len(sizes), strict=True):
        rows += range(first, first + count)
        first += size
    return rows


def _kept(rank: Rank, logits: Tensor) -> Tensor:
    rank.logits.append(logits.clone())
    return logits
