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
from unisono.workers.draft_steps import DraftSteps, LateDrafts, why_on_host
from unisono.workers.graph_pool import GraphPool
from unisono.workers.kv_cache import KVCache
from unisono.workers.logprobs import prompt_logprobs, token_logprobs
from unisono.workers.protocol import Rows, SlotSampling, StepPlan, int32s, unpack_sampling
from unisono.workers.sampler import Sampler
from unisono.workers.sampling_state import SamplingRows
from unisono.workers.slot_table import SlotTable
from unisono.workers.speculator import Accepted, Speculator
from unisono.workers.state_pool import StatePool, caches_of
from unisono.workers.step_buffers import Result
from unisono.workers.tracer import Tracer


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives: `StepResult` has fields of the same names."""

    tokens: list[int]
    logprobs: array[int] | None
    checksums: array[int] | None = None
    counts: Sequence[int] = ()

    def is_ready(self) -> bool:
        """Whether reading it would not wait for the device."""
        return True


class LateOutput:
    """The same of a step that the device may still run: `tokens` waits for it."""

    logprobs = None
    checksums = None

    def __init__(self, result: Result | LateDrafts) -> None:
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

    @property
    def counts(self) -> Sequence[int]:
        """How many of them each row has; empty: one each. Waits, too."""
        return self._result.counts


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
        decode: DecodeSteps | DraftSteps | None = None,
        tracer: Tracer | None = None,
        states: StatePool | None = None,
        speculator: Speculator | None = None,
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
        self._speculator = speculator

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput | LateOutput:
        """Run `plan`; return the tokens of each of its sampling rows, in row order.

        Raises ProtocolError for a plan that asks for drafts or for recurrent states where the model
        has none.
        """
        self._refuse_what_is_not_there(plan)
        self._apply_changes(plan)
        decode = self._decode
        if self._tracer is None and decode is not None and decode.serves(plan.rows):
            if isinstance(decode, DraftSteps):
                return self._run_drafts(decode, plan)
            return self._run_decode(decode, plan.rows)
        inputs = self._builder.build(plan)
        if self._tracer is not None:
            self._tracer.begin(inputs.rows, self._slots)
        hidden, output = self._run(inputs)
        if self._tracer is not None:
            self._tracer.end()
        if self._speculator is not None:
            self._speculator.propose(inputs, hidden, self._cache.layers[-1], plan.num_proposals)
        return output

    def _refuse_what_is_not_there(self, plan: StepPlan) -> None:
        step = f"step {plan.step}"
        if self._speculator is None and (any(plan.rows.drafts) or plan.num_proposals):
            raise ProtocolError(f"{step} asks for drafts, and the ranks have no layer that drafts")
        if self._states is None and (plan.open_state or plan.save_state):
            raise ProtocolError(f"{step} names recurrent states, and the model has none")

    def _run_decode(self, decode: DecodeSteps, rows: Rows) -> StepOutput | LateOutput:
        hidden = decode.forward(rows)
        kinds = self._slots.sampling
        if kinds.want_only_tokens(rows.slot):
            return LateOutput(decode.tail(rows, draws=kinds.draw(rows.slot)))
        slots = torch.tensor(rows.slot, dtype=torch.int64).to(hidden.device)
        positions = torch.tensor(rows.start, dtype=torch.int64).to(hidden.device) + 1
        return self._sample(hidden, rows.slot, slots, positions, int32s())

    def _run_drafts(self, steps: DraftSteps, plan: StepPlan) -> StepOutput | LateOutput:
        steps.forward(plan)
        kinds, slots = self._slots.sampling, plan.rows.slot
        if kinds.want_only_tokens(slots):
            return LateOutput(steps.tail(plan, draws=kinds.draw(slots)))
        assert self._speculator is not None
        why = why_on_host([kinds.of(slot) for slot in slots])
        hidden, inputs = steps.hidden(plan), self._builder.build(plan)
        output = self._sample_with_drafts(self._speculator, inputs, hidden, int32s(), why)
        self._speculator.propose(inputs, hidden, self._cache.layers[-1], plan.num_proposals)
        return output

    def _run(self, inputs: StepInputs) -> tuple[Tensor, StepOutput]:
        """Return the hidden states [T, width] and what was sampled."""
        rows = inputs.rows
        why = "laid out by the host" if rows.decode_only else "prompt tokens"
        key = (len(inputs.batch.token_ids), len(rows))
        hidden = self._graphs.run("forward", key, lambda: self._forward(inputs), why)
        records = prompt_logprobs(rows, self._slots, hidden, self._model.logits, self._sampler)
        if not len(inputs.logits_index):
            return hidden, StepOutput([], records or None)
        ends = hidden.index_select(0, inputs.logits_index)
        if self._speculator is not None:
            return hidden, self._sample_with_drafts(self._speculator, inputs, ends, records, why)
        places = (inputs.row_slots, inputs.sample_slots, inputs.sample_positions)
        return hidden, self._sample(ends, *places, records)

    def _sample_with_drafts(
        self,
        speculator: Speculator,
        inputs: StepInputs,
        hidden: Tensor,
        records: array[int],
        why: str,
    ) -> StepOutput:
        """Choose a token behind each of hidden [S, width], and keep those behind right drafts.

        `why`: the reason that this is not replayed.
        """
        of_token = zip(inputs.row_slots, inputs.sizes, strict=True)
        slots_of = [slot for slot, size in of_token for _ in range(size)]
        table = self._slots
        sampling = table.sampling.rows(slots_of, inputs.sample_positions, table.token_ids)

        def tail() -> tuple[Tensor, Tensor, Accepted]:
            logits = self._model.logits(hidden)
            token_ids = speculator.judged(inputs, self._sampler.sample(logits, sampling))
            return logits, token_ids, speculator.accept(inputs, token_ids)

        logits, token_ids, accepted = self._graphs.run("tail", len(slots_of), tail, why)
        logits, token_ids = logits[accepted.kept], token_ids[accepted.kept]
        records += token_logprobs(accepted.row_slots, table, logits, token_ids, self._sampler)
        checksums = self._sampler.checksums(logits, table.checksum_rows(accepted.row_slots))
        tokens = token_ids.tolist()
        return StepOutput(tokens, records or None, checksums or None, accepted.counts)

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
