"""One step on one rank: slot changes, forward, tail."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.models.interface import Model
from unisono.workers.batch_builder import BatchBuilder, StepInputs
from unisono.workers.codec import ProtocolError
from unisono.workers.decode_steps import DecodeSteps
from unisono.workers.graph_pool import GraphPool
from unisono.workers.kv_cache import KVCache
from unisono.workers.logprobs import prompt_logprobs, token_logprobs
from unisono.workers.protocol import Phase, Rows, SlotSampling, StepPlan, int32s, unpack_sampling
from unisono.workers.sampler import Sampler
from unisono.workers.sampling_state import SamplingRows
from unisono.workers.slot_table import SlotTable
from unisono.workers.state_pool import StatePool, caches_of
from unisono.workers.step_buffers import Result
from unisono.workers.tracer import Tracer


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives: `StepResult` has fields of the same names."""

    tokens: list[int]
    logprobs: array[int] | None
    checksums: array[int] | None = None

    def is_ready(self) -> bool:
        """Whether reading it would not wait for the device."""
        return True


class LateOutput:
    """The same of a step that the device may still run: `tokens` waits for it."""

    logprobs = None
    checksums = None

    def __init__(self, result: Result) -> None:
        self._result = result

    def is_ready(self) -> bool:
        """Whether reading it would not wait for the device."""
        return self._result.is_ready()

    @property
    def tokens(self) -> list[int]:
        """Raises FloatingPointError if a row's logits held a NaN."""
        tokens = self._result.read()
        if bad := [row for row, token in enumerate(tokens) if token < 0]:
            raise FloatingPointError(f"the logits of sampling rows {bad} hold NaN")
        return tokens


class ModelRunner:
    """Runs plans in order. Owns nothing: the buffers belong to `slots` and `cache`."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        slots: SlotTable,
        builder: BatchBuilder,
        sampler: Sampler,
        graphs: GraphPool,
        decode: DecodeSteps | None = None,
        tracer: Tracer | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._slots = slots
        self._builder = builder
        self._sampler = sampler
        self._graphs = graphs
        self._tracer = tracer
        self._decode = decode
        self._states = states

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput | LateOutput:
        """Run `plan`; return a token for each of its sampling rows, in row order.

        Raises ProtocolError for a plan that asks for drafts, or for recurrent states where the
        model has none.
        """
        self._refuse_what_is_not_there(plan)
        self._apply_changes(plan)
        if self._tracer is not None:
            self._tracer.begin(plan.rows, self._slots)
            output = self._run(plan)
            self._tracer.end()
            return output
        if self._decode is not None and self._decode.serves(plan.rows):
            return self._run_decode(self._decode, plan.rows)
        return self._run(plan)

    def _refuse_what_is_not_there(self, plan: StepPlan) -> None:
        step = f"step {plan.step}"
        if any(plan.rows.drafts):
            raise ProtocolError(f"{step} asks for drafts, and no model here has a drafter")
        if self._states is None and (plan.open_state or plan.save_state):
            raise ProtocolError(f"{step} names recurrent states, and the model has none")

    def _run_decode(self, decode: DecodeSteps, rows: Rows) -> StepOutput | LateOutput:
        hidden = decode.forward(rows)
        kinds = [self._slots.sampling.of(slot) for slot in rows.slot]
        if all(k.is_plain and k.logprobs < 0 and not k.checksums for k in kinds):
            return LateOutput(decode.tail(rows))
        slots = torch.tensor(rows.slot, dtype=torch.int64).to(hidden.device)
        positions = torch.tensor(rows.start, dtype=torch.int64).to(hidden.device) + 1
        return self._sample(hidden, rows.slot, slots, positions, int32s())

    def _run(self, plan: StepPlan) -> StepOutput:
        inputs = self._builder.build(plan)
        key = (len(inputs.batch.token_ids), len(plan.rows))
        hidden = self._graphs.run("forward", key, lambda: self._forward(inputs), "prompt tokens")
        records = prompt_logprobs(plan.rows, self._slots, hidden, self._model.logits, self._sampler)
        if not len(inputs.logits_index):
            return StepOutput([], records or None)
        row_slots = [
            s for s, p in zip(plan.rows.slot, plan.rows.phase, strict=True) if p != Phase.CHUNK
        ]
        ends = hidden.index_select(0, inputs.logits_index)
        return self._sample(ends, row_slots, inputs.sample_slots, inputs.sample_positions, records)

    def _sample(
        self,
        hidden: Tensor,
        row_slots: Sequence[int],
        slots: Tensor,
        positions: Tensor,
        records: array[int],
    ) -> StepOutput:
        """Give each of `row_slots` its token; hidden [S, width], slots and positions [S]."""
        sampling = self._slots.sampling.rows(row_slots, positions, self._slots.token_ids)
        logits, token_ids = self._graphs.run(
            "tail",
            len(row_slots),
            lambda: self._tail(hidden, slots, positions, sampling),
            "sampling" if sampling else "prompt tokens",
        )
        records += token_logprobs(row_slots, self._slots, logits, token_ids, self._sampler)
        checksums = self._sampler.checksums(logits, self._slots.checksum_rows(row_slots))
        return StepOutput(token_ids.tolist(), records or None, checksums or None)

    def _apply_changes(self, plan: StepPlan) -> None:
        start = 0
        recipes = unpack_sampling(plan.open_sampling) or [SlotSampling()] * len(plan.open_slot)
        for slot, length, recipe in zip(plan.open_slot, plan.open_length, recipes, strict=True):
            prompt = torch.tensor(plan.open_tokens[start : start + length], dtype=torch.int64)
            self._slots.open(slot, prompt, recipe)
            start += length
        if self._states is not None:
            opened = zip(plan.open_slot, plan.open_state, plan.open_restore, strict=True)
            for slot, state, snapshot in opened:
                self._slots.states[slot] = state
                if snapshot:
                    self._states.copy(snapshot, state)
        if len(plan.block_id):
            if fresh := _fresh_blocks(plan):
                self._cache.clear(fresh)
            self._slots.add_blocks(plan.block_slot, plan.block_id)

    def _forward(self, inputs: StepInputs) -> Tensor:
        caches = caches_of(self._model.config, self._cache, self._states)
        return self._model.forward(inputs.batch, caches)

    def _tail(
        self, hidden: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingRows | None
    ) -> tuple[Tensor, Tensor]:
        logits = self._model.logits(hidden)
        token_ids = self._sampler.sample(logits, sampling)
        self._slots.append(slots, positions, token_ids)
        return logits, token_ids


def _fresh_blocks(plan: StepPlan) -> list[int]:
    """The blocks of `plan` that hold nothing which their slot may read."""
    shared = dict(zip(plan.open_slot, plan.num_shared, strict=True))
    fresh = []
    for slot, block in zip(plan.block_slot, plan.block_id, strict=True):
        if shared.get(slot, 0) > 0:
            shared[slot] -= 1
        else:
            fresh.append(block)
    return fresh
