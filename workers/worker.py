"""A rank from start to end: phases of the start-up, then the command loop."""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from unisono.models.interface import Build
from unisono.models.partition import ModelPartition
from unisono.models.tensor_info import CheckpointError
from unisono.ops import dispatch
from unisono.ops.attention import AttentionShape
from unisono.ops.by_reference import NEED_THE_HOST, with_references
from unisono.ops.comm import Group
from unisono.ops.step_watch import StepWatch
from unisono.ops.table import Ops
from unisono.workers import device as devices
from unisono.workers.batch_builder import BatchBuilder
from unisono.workers.channel import Peer, ProtocolError
from unisono.workers.config import WorkerConfig
from unisono.workers.decode_steps import DecodeSteps
from unisono.workers.draft_steps import DraftSteps
from unisono.workers.graph_pool import GraphPool
from unisono.workers.kv_cache import KVCache
from unisono.workers.memory import (
    available_bytes,
    block_bytes,
    free_bytes,
    host_budget,
    offer,
)
from unisono.workers.mixed_steps import MixedSteps
from unisono.workers.model_runner import LateOutput, ModelRunner, StepOutput
from unisono.workers.orders import WorkerOrders
from unisono.workers.profile_run import capture_graphs, measure_budget
from unisono.workers.prompt_steps import PromptSteps
from unisono.workers.protocol import (
    Allocate,
    Loaded,
    LoadWeights,
    Ready,
    Release,
    Shutdown,
    StepPlan,
    StepResult,
    int32s,
)
from unisono.workers.reporter import Reporter
from unisono.workers.sampler import Sampler
from unisono.workers.slot_table import SlotTable
from unisono.workers.speculator import Speculator
from unisono.workers.state_pool import StatePool
from unisono.workers.step_buffers import StepBuffers
from unisono.workers.step_parts import StepParts
from unisono.workers.timings import StepsSeen, WatchSteps
from unisono.workers.tracer import SAMPLER, Tracer
from unisono.workers.weight_memory import check_weights, weight_bytes
from unisono.workers.weights import Weights

STEPS_AT_ONCE = 2
"""Steps that a rank has launched and not answered, at the most."""


class _Running(NamedTuple):
    """A step that was launched. `digest`: of all collectives up to its own."""

    number: int
    began: float
    output: StepOutput | LateOutput
    digest: int
    eager: tuple[str, ...]


class Worker:
    """One rank. `start` loads the model, `run` obeys until Shutdown."""

    join_group: Callable[..., Group] = staticmethod(devices.join_group)
    make_pool: Callable[..., GraphPool] = GraphPool
    """Both are replaced in a rank that notes what it does (workers/timed.py)."""

    def __init__(self, orders: WorkerOrders, peer: Peer, report: Reporter) -> None:
        self._config: WorkerConfig = orders.config
        self._orders = orders
        self._rank = orders.rank
        self._peer = peer
        self._report = report
        self._device = devices.rank_device(orders.config.device, os.environ)
        self._dtype = devices.torch_dtype(orders.config.dtype)
        state_dtype = devices.torch_dtype(orders.config.state_dtype)
        self._num_drafts = orders.config.num_drafts
        self._partition = ModelPartition.of(
            orders.config.model, orders.config.tp, drafts=self._num_drafts > 0
        )
        self._part = part = (self._partition, self._rank, self._dtype)
        sizes = (self._dtype.itemsize, state_dtype.itemsize, self._num_drafts)
        self._state_bytes = self._partition.state_bytes(self._rank, *sizes)
        self._cache = KVCache(*part, self._device)
        self._states = (
            StatePool(*part, state_dtype, self._device, self._num_drafts)
            if self._state_bytes
            else None
        )
        self._group: Group
        self._weights: Weights
        self._runner: ModelRunner
        self._graphs: GraphPool
        self._watch: StepWatch | None = None
        self._tracer: Tracer | None = None
        self._running: deque[_Running] = deque()

    def start(self, store: dist.Store | None) -> None:
        """Join the group, load the weights, build the runner and offer KV memory."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Before the ranks meet: none of them has begun to load yet.
        free = free_bytes(self._device, ranks_here)
        self._report.enter("join the group")
        place = (self._rank, self._config.tp, self._device, store, self._config.collectives)
        self._group = self.join_group(*place)
        self._report.enter("check memory")
        check_weights(*self._part, self._device.type, free)
        self._report.enter("prove exactness")
        ops = dispatch.resolve(self._device, self._config.model.head_dim, self._config.attn)
        ops = with_references(ops, self._config.reference_ops)
        if self._config.trace_dir:
            self._tracer = Tracer(
                self._config.trace_dir, self._rank, values=self._config.trace_values
            )
        tap = None if self._tracer is None else self._tracer.tap
        build = Build(ops, self._group, self._dtype, self._device, tap=tap)
        self._weights = Weights(self._config, self._partition, build, self._report)
        self._weights.load(self._config.model_path, self._config.load_format)
        self._report.enter("take memory")
        self._runner = self._build_runner(build.within(SAMPLER).ops)
        activations = graph_bytes = 0
        if self._device.type == "cuda":
            memory = (self._graphs, self._cache, self._states)
            activations, graph_bytes, budget = measure_budget(
                self._config, self._orders.max_step_tokens, self._runner, *memory, free
            )
        else:
            utilization = self._config.memory_utilization
            budget = host_budget(available_bytes(), ranks_here, utilization)
        sizes = (block_bytes(*self._part), self._state_bytes)
        snapshots = self._orders.has_prefix_cache
        num_blocks, num_states = offer(self._config, snapshots, *sizes, budget)
        self._peer.send(
            Loaded(
                rank=self._rank,
                num_blocks=num_blocks,
                device=str(self._device),
                dtype=self._config.dtype,
                weight_bytes=weight_bytes(*self._part, self._device.type),
                activation_bytes=activations,
                graph_bytes=graph_bytes,
                block_bytes=sizes[0],
                num_states=num_states,
                state_bytes=sizes[1],
            )
        )

    def run(self) -> None:
        """Obey commands until Shutdown. An exception leaves with the phase and step noted."""
        while True:
            match self._next():
                case None:
                    self._answer()
                case StepPlan() as plan:
                    self._launch(plan)
                case Allocate() | Release() | LoadWeights() as order:
                    gc.unfreeze()
                    self._peer.send(Ready(rank=self._rank, error=self._change_memory(order)))
                    gc.collect()
                    gc.freeze()  # amid steps the collector would take 0.1 s to look at all of it
                    self._report.note("step")
                case WatchSteps() as wanted:
                    self._watch = StepWatch(
                        self._device, self._group, self._graphs, **asdict(wanted)
                    )
                case Shutdown():
                    self._graphs.drop()
                    return self._group.direct.close()
                case other:
                    raise ProtocolError(f"rank {self._rank} got {type(other).__name__}")

    def _next(self) -> object:
        """The next command, or None once the oldest running step is to be answered.

        While the device computes, the step after may come: it is launched before the wait ends.
        """
        if not self._running:
            return self._peer.receive(None)
        while not self._running[0].output.is_ready() and len(self._running) < STEPS_AT_ONCE:
            if (command := self._peer.receive(0)) is not None:
                return command
        return None

    def _launch(self, plan: StepPlan) -> None:
        self._report.step = plan.step
        began = time.perf_counter()
        self._graphs.eager.clear()
        step, watch = partial(self._runner.step, plan), self._watch
        with self._group.direct.checked():
            output = step() if watch is None else watch.launch(plan.step, plan.rows, step)
        told = (self._group.digest, tuple(self._graphs.eager))
        self._running.append(_Running(plan.step, began, output, *told))

    def _answer(self) -> None:
        step = self._running.popleft()
        self._report.step = step.number
        output = step.output
        with self._group.direct.checked():
            tokens = array("i", output.tokens)
        if self._watch and (seen := self._watch.answered(step.number, len(tokens))) is not None:
            self._peer.send(StepsSeen(rank=self._rank, watched=seen))
        self._peer.send(
            StepResult(
                rank=self._rank,
                step=step.number,
                tokens=tokens,
                logprobs=output.logprobs,
                checksums=output.checksums,
                counts=int32s(output.counts),
                digest=step.digest,
                seconds=time.perf_counter() - step.began,
                num_replays=self._graphs.num_replays,
                eager=step.eager,
            )
        )

    def _change_memory(self, order: Allocate | Release | LoadWeights) -> str:
        """Obey between steps; why there are no weights now, if they cannot be loaded.

        Graphs of what was there go first: they hold memory, too.
        """
        self._graphs.drop()
        match order:
            case Allocate(num_blocks=num_blocks, num_states=num_states):
                self._report.enter("take memory")
                self._cache.allocate(num_blocks)
                if self._states is not None:
                    self._states.allocate(num_states)
                if self._config.capture == "start":
                    capture_graphs(self._config, self._runner, self._graphs, self._report.enter)
            case Release(weights=weights):
                self._report.enter("give memory back")
                self._cache.release()
                if self._states is not None:
                    self._states.release()
                if weights:
                    self._weights.drop()
                devices.give_back(self._device)
            case LoadWeights(path=path, load_format=load_format):
                try:
                    self._weights.load(path, load_format)
                except CheckpointError as error:
                    return str(error)
        return ""

    def _build_runner(self, ops: Ops) -> ModelRunner:
        config, partition = self._config, self._partition
        num_drafts = self._num_drafts
        slots = SlotTable(config.max_requests, config.max_model_len, self._device, num_drafts)
        shape = AttentionShape(
            partition.heads.size(self._rank),
            partition.kv_heads.size(self._rank),
            config.model.head_dim,
        )
        windows = sorted(set(map(config.model.window_of, range(config.model.num_layers))))
        sampler = Sampler(ops, self._group, partition, config.num_token_ids)
        on_host = NEED_THE_HOST & {*config.reference_ops}
        is_ours = config.attn == "triton" and not on_host
        off = "references" if on_host else "" if is_ours else f"--attn {config.attn}"
        off = "--no-graphs" if config.no_graphs else off
        owners = (self._cache, self._states, slots, self._weights)
        owners_there = [owner for owner in owners if owner is not None]
        self._graphs = self.make_pool(self._device, self._group, owners_there, off)
        owned = (self._weights, self._cache, self._states, slots, sampler, self._graphs)
        parts = StepParts(ops, *owned, config.graph_buckets, shape, windows)
        builder, forced = BatchBuilder(parts), config.forced_acceptance
        speculator = Speculator(parts, builder, forced) if num_drafts else None
        decode: DecodeSteps | DraftSteps | None = None
        prompts = mixed = None
        if self._device.type == "cuda" and is_ours:
            rows, ids = config.max_requests, config.model.vocab_size * config.random_padding
            sizes = (rows, config.model.hidden_size, self._dtype, self._device, num_drafts, ids)
            buffers = StepBuffers(*sizes)
            if num_drafts:
                decode = drafts = DraftSteps(parts, buffers, forced, speculator)
                mixed = MixedSteps(parts, builder, drafts)
            else:
                decode = DecodeSteps(parts, buffers)
            if not off:
                prompts = PromptSteps(parts, ids)
        return ModelRunner(parts, builder, decode, self._tracer, speculator, prompts, mixed)
