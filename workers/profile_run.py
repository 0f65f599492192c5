"""What steps and graphs take of a GPU beside weights and KV cache: measured by running them."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from unisono.workers.config import BLOCK_SIZE, WorkerConfig
from unisono.workers.graph_pool import GraphPool
from unisono.workers.kv_cache import KVCache
from unisono.workers.memory import Budget, card_budget
from unisono.workers.model_runner import ModelRunner
from unisono.workers.protocol import Phase, Rows, SlotSampling, StepPlan, int32s, pack_sampling
from unisono.workers.state_pool import StatePool

GRAPH_BYTES = 1 << 30
"""Kept free for CUDA graphs that are captured when they are wanted: their pool holds the
activations of one decode step, and each graph some MB of launches. It also covers the context of
CUDA, which cannot be told from what other processes hold."""
log = logging.getLogger(__name__)
_TOP = 20
"""Most likeliest ids that log-probabilities come with."""


def measure_budget(
    config: WorkerConfig,
    max_step_tokens: int,
    runner: ModelRunner,
    graphs: GraphPool,
    cache: KVCache,
    states: StatePool | None,
    free: int,
) -> tuple[int, int, Budget]:
    """Measure on the current GPU; return bytes of activations, of graphs, and for the KV cache.

    `free`: bytes of the card that were free before this rank took any. What it has taken since
    is weights, kernels and, because the largest step meets the other ranks too, NCCL's buffers.
    Graphs are captured for the measure where they will be at start-up: their addresses are those
    of the cache, which can be as large as they leave room for. `cache` and `states` are left with
    nothing but scratch, and `graphs` with none.
    """
    cache.allocate(0)
    if states is not None:
        states.allocate(0)
    activations = passing_bytes(lambda: rehearse(runner, config, max_step_tokens, cache))
    graph_bytes = 0
    if config.capture == "start":
        capture_graphs(config, runner, graphs)  # loads kernels, which are no graph's memory
        graphs.drop()
        graph_bytes = held_bytes(lambda: capture_graphs(config, runner, graphs))
        graphs.drop()
        torch.cuda.empty_cache()
    left, total = torch.cuda.mem_get_info()
    budget = card_budget(
        total=total,
        free=left,
        weights=max(free - left, 0),
        activations=activations,
        graphs=GRAPH_BYTES + graph_bytes,
        utilization=config.memory_utilization,
    )
    return activations, graph_bytes, budget


def passing_bytes(run: Callable[[], None]) -> int:
    """Bytes that `run` has torch take from the current GPU and give back.

    Counted are whole segments of its allocator, for those are what the card lacks.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    run()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_reserved() - before
    torch.cuda.empty_cache()
    return taken


def held_bytes(run: Callable[[], None]) -> int:
    """Bytes of the current GPU that are gone after `run`, whoever took them: also its driver."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return max(before - torch.cuda.mem_get_info()[0], 0)


def capture_graphs(
    config: WorkerConfig,
    runner: ModelRunner,
    graphs: GraphPool,
    enter: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run the steps whose graphs are wanted at start-up: for the first time, or to capture them.

    Every rank runs them in this order, so their collectives meet. `enter` hears how far it is.
    """
    from unisono.ops.kernels.attention import SPLIT  # needs Triton

    began, num_replays = time.perf_counter(), graphs.num_replays
    limits = (config.max_model_len, SPLIT, config.model.is_hybrid, config.num_drafts)
    plans = list(capture_steps(config.graph_buckets, *limits))
    for number, plan in enumerate(plans, start=1):
        enter(f"capture graphs, {number} of {len(plans)}")
        runner.step(plan)
    # Nobody asked for these.
    graphs.num_replays = num_replays
    log.info("graphs of %d steps: %.1f s", len(plans), time.perf_counter() - began)


def capture_steps(
    buckets: tuple[int, ...], max_model_len: int, split: int, is_hybrid: bool, num_drafts: int = 0
) -> Iterator[StepPlan]:
    """Steps of decoding on scratch that have the graphs of start-up captured, the largest first.

    Largest first: then each finds the memory that it needs among what the others have left. They
    are of requests that see keys of two splits, of `split` each, and draw, and of greedy ones that
    see one, all with as many drafts as there may be. Graphs of each power of two up to
    `max_model_len` would take as long again each; requests grow into those one by one. Slot 0 is
    left as it was found.
    """
    for start, temperature in ((split if split < max_model_len else 0, 1.0), (0, 0.0)):
        sampling = pack_sampling([SlotSampling(temperature=temperature)])
        for height in reversed(buckets):
            rows = Rows(
                slot=int32s([0] * height),
                start=int32s([start] * height),
                count=int32s([1] * height),
                phase=int32s([Phase.DECODE] * height),
                drafts=int32s([num_drafts] * height if num_drafts else []),
            )
            yield replace(_on_scratch(rows, sampling, is_hybrid), num_proposals=num_drafts)


@torch.inference_mode()
def rehearse(
    runner: ModelRunner, config: WorkerConfig, max_step_tokens: int, cache: KVCache
) -> None:
    """Run the largest step on scratch: only slot 0, block 0 and state 0 are written."""
    for layer in cache.layers:
        # Memory never written may hold NaN, which the sampler refuses.
        layer.k[0].zero_()
        layer.v[0].zero_()
    longest, is_hybrid = config.max_model_len, config.model.is_hybrid
    # A recurrence takes most where all that it can be is prompt.
    num_prompt = longest - 1 if is_hybrid else min(longest, BLOCK_SIZE + 1)
    # Everything that a request may ask for at once.
    sampling = SlotSampling(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        repetition_penalty=1.1,
        bias=((0, 1.0),),
        logprobs=_TOP,
        prompt_logprobs=_TOP,
        num_prompt_tokens=num_prompt,
    )
    # What the weights make of scratch may still be NaN; the memory was taken all the same.
    with suppress(FloatingPointError):
        grid = BLOCK_SIZE if is_hybrid else 1
        rows = largest_step(config.max_requests, longest, max_step_tokens, grid)
        runner.step(_on_scratch(rows, pack_sampling([sampling]), is_hybrid))
    # Slot 0 is opened anew by a step that samples nothing, and so leaves it as it was found.
    last = Rows(slot=int32s([0]), start=int32s([0]), count=int32s([1]), phase=int32s([Phase.CHUNK]))
    runner.step(_on_scratch(last, pack_sampling([SlotSampling()]), is_hybrid))


def largest_step(
    max_requests: int, max_model_len: int, max_step_tokens: int, grid: int = 1
) -> Rows:
    """As many sampling rows and, with these, as many tokens as a step can have, all of slot 0.

    Prompts that are cut, are cut at multiples of `grid`, which spares fewer tokens than it has.
    """
    most = max(max_step_tokens, BLOCK_SIZE)  # as the scheduler does
    num_rows = min(max_requests, most)
    spare = most - num_rows
    start, count = [], []
    for _ in range(num_rows):
        more = min(spare, max_model_len - 1)
        if more < max_model_len - 1:
            more = max((1 + more) // grid * grid - 1, 0)
        spare -= more
        count.append(1 + more)
        # Of a decoding row attention keeps parts of every stretch of keys; of prompts it does not.
        start.append(0 if more else max_model_len - 1)
    return Rows(
        slot=int32s([0] * num_rows),
        start=int32s(start),
        count=int32s(count),
        # Not DECODE, whatever the length: such steps may be replayed from graphs.
        phase=int32s([Phase.PROMPT] * num_rows),
    )


def _on_scratch(rows: Rows, sampling: array[int], is_hybrid: bool) -> StepPlan:
    return StepPlan(
        step=0,
        rows=rows,
        open_slot=int32s([0]),
        open_length=int32s([1]),
        open_tokens=int32s([0]),
        open_sampling=sampling,
        num_shared=int32s([0]),
        open_state=int32s([0] * is_hybrid),
        open_restore=int32s([0] * is_hybrid),
    )
