"""One step on one rank: slot changes, forward, tail."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.ops.transfer import Answers, upload_all
from unisono.workers.batch_builder import BatchBuilder, StepInputs
from unisono.workers.codec import ProtocolError
from unisono.workers.decode_steps import DecodeSteps
from unisono.workers.draft_steps import DraftSteps, why_on_host
from unisono.workers.logprobs import prompt_logprobs, token_logprobs
from unisono.workers.mixed_steps import MixedSteps
from unisono.workers.prompt_steps import PromptSteps
from unisono.workers.protocol import Rows, StepPlan, int32s
from unisono.workers.speculator import Accepted, Speculator
from unisono.workers.step_parts import StepParts
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


class LateOutput(Answers):
    """The same of a step that the device may still run: `tokens` and `counts` wait for it."""

    logprobs = checksums = None

    @property
    def tokens(self) -> list[int]:
        """Raises FloatingPointError if a row's logits held a NaN."""
        return self.read()


class ModelRunner:
    """Runs plans in order. Owns nothing."""

    def __init__(
        self,
        parts: StepParts,
        builder: BatchBuilder,
        decode: DecodeSteps | DraftSteps | None = None,
        tracer: Tracer | None = None,
        speculator: Speculator | None = None,
        prompts: PromptSteps | None = None,
        mixed: MixedSteps | None = None,
    ) -> None:
        self._parts, self._builder, self._slots = parts, builder, parts.slots
        self._decode, self._tracer, self._speculator = decode, tracer, speculator
        self._prompts, self._mixed = (prompts, mixed) if tracer is None else (None, None)

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
        return self._run(plan)

    def _refuse_what_is_not_there(self, plan: StepPlan) -> None:
        step = f"step {plan.step}"
        if self._speculator is None and (any(plan.rows.drafts) or plan.num_proposals):
            raise ProtocolError(f"{step} asks for drafts, and the ranks have no layer that drafts")
        if self._parts.states is None and (plan.open_state or plan.save_state):
            raise ProtocolError(f"{step} names recurrent states, and the model has none")

    def _run_decode(self, decode: DecodeSteps, rows: Rows) -> StepOutput | LateOutput:
        hidden = decode.forward(rows)
        kinds = self._slots.sampling
        if kinds.want_only_tokens(rows.slot):
            return LateOutput(decode.tail(rows, draws=kinds.draw(rows.slot)))
        slots, before = upload_all(hidden.device, rows.slot, rows.start)
        why = why_on_host([kinds.of(slot) for slot in rows.slot])
        return self._output(self._sample(hidden, rows.slot, slots, before + 1, why), int32s())

    def _run_drafts(self, steps: DraftSteps, plan: StepPlan) -> StepOutput | LateOutput:
        steps.forward(plan)
        kinds, slots = self._slots.sampling, plan.rows.slot
        if kinds.want_only_tokens(slots):
            beside = {"draws": kinds.draw(slots), "rejects": kinds.reject_drafts(plan)}
            return LateOutput(steps.tail(plan, **beside))
        why = why_on_host([kinds.of(slot) for slot in slots])
        return self._answer(plan, self._builder.build(plan), steps.hidden(plan), int32s(), why)

    def _run(self, plan: StepPlan) -> StepOutput | LateOutput:
        """A step that the host lays out."""
        mixed = self._mixed if self._mixed is not None and self._mixed.serves(plan) else None
        inputs = self._builder.build(plan) if mixed is None else mixed.lay_out(plan)
        parts, rows = self._parts, inputs.rows
        if self._tracer is not None:
            self._tracer.begin(rows, self._slots)
        why = "laid out by the host" if rows.decode_only else "prompt tokens"
        hidden = None if self._prompts is None else self._prompts.forward(inputs)
        if hidden is None:
            key = (len(inputs.batch.token_ids), len(rows))
            hidden = parts.graphs.run("forward", key, lambda: parts.forward(inputs.batch), why)
        if mixed is not None:
            return LateOutput(mixed.tail(plan, inputs, hidden))
        records = prompt_logprobs(rows, parts.slots, hidden, parts.model.logits, parts.sampler)
        return self._answer(plan, inputs, hidden, records, why)

    def _answer(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, records: array[int], why: str
    ) -> StepOutput | LateOutput:
        """Choose the tokens behind hidden [T, width], and draft for the next step.

        `why`: the reason that this is not replayed.
        """
        chosen = accepted = None
        ends = hidden.index_select(0, inputs.logits_index)
        if max(inputs.sizes, default=0) > 1:
            chosen, accepted = self._sample_with_drafts(inputs, ends, why)
        elif inputs.sizes:
            places = (inputs.sample_slots, inputs.sample_positions)
            chosen = self._sample(ends, inputs.row_slots, *places, why)
        if self._tracer is not None:
            self._tracer.end()
        if self._speculator is not None:
            has_nan = self._speculator.propose(inputs, hidden, plan.num_proposals, accepted)
            if chosen is not None:
                chosen.answers[:, 0].masked_fill_(has_nan, -1)
        return self._output(chosen, records)

    def _sample_with_drafts(
        self, inputs: StepInputs, hidden: Tensor, why: str
    ) -> tuple[_Chosen, Accepted]:
        """Choose a token behind each of hidden [S, width], and keep those behind right drafts."""
        table, speculator = self._slots, self._speculator
        assert speculator is not None
        of_token = zip(inputs.row_slots, inputs.sizes, strict=True)
        slots_of = [slot for slot, size in of_token for _ in range(size)]
        sampling = table.sampling.rows(slots_of, inputs.sample_positions, table.token_ids)

        def tail() -> tuple[Tensor, Accepted]:
            logits = self._parts.model.logits(hidden)
            keys = speculator.judged(inputs, logits, self._parts.sampler.keys(logits, sampling))
            return logits, speculator.accept(inputs, keys)

        logits, accepted = self._parts.graphs.run("tail", len(slots_of), tail, why)
        return _Chosen(logits, accepted.answers, inputs.row_slots, inputs.sizes), accepted

    def _sample(
        self, hidden: Tensor, row_slots: Sequence[int], slots: Tensor, positions: Tensor, why: str
    ) -> _Chosen:
        """Give each of `row_slots` its token; hidden [S, width], slots and positions [S]."""
        table = self._slots
        sampling = table.sampling.rows(row_slots, positions, table.token_ids)

        def tail() -> tuple[Tensor, Tensor]:
            logits = self._parts.model.logits(hidden)
            keys = self._parts.sampler.keys(logits, sampling)
            return logits, self._parts.sampler.append(keys, slots, table)

        answered = self._parts.graphs.run("tail", len(row_slots), tail, why)
        return _Chosen(*answered, row_slots, [1] * len(row_slots))

    def _output(self, chosen: _Chosen | None, records: array[int]) -> StepOutput | LateOutput:
        """What the step gives. The host waits only where more than tokens is wanted, or behind
        drafts, where it has waited."""
        if chosen is None:
            # That a step without answers is over, too, only the device knows.
            return StepOutput([], records) if records else LateOutput(self._slots.lengths[:0, None])
        late, kinds = LateOutput(chosen.answers), self._slots.sampling
        if not records and not kinds.want_more_than_tokens(chosen.row_slots):
            has_waited = max(chosen.sizes) > 1
            return StepOutput(late.tokens, None, counts=late.counts) if has_waited else late
        tokens, counts = late.tokens, late.counts
        begins = accumulate(chosen.sizes, initial=0)
        rows = zip(chosen.row_slots, begins, counts or chosen.sizes, strict=False)
        kept = [(slot, begin + place) for slot, begin, count in rows for place in range(count)]
        slots, places = [slot for slot, _ in kept], [place for _, place in kept]
        at, token_ids = upload_all(chosen.logits.device, places, tokens)
        logits = chosen.logits[at]
        records += token_logprobs(slots, self._slots, logits, token_ids, self._parts.sampler)
        checksums = self._parts.sampler.checksums(logits, kinds.checksum_rows(slots))
        return StepOutput(tokens, records or None, checksums or None, counts)

    def _apply_changes(self, plan: StepPlan) -> None:
        if fresh := _fresh_blocks(plan):
            self._parts.cache.clear(fresh)
        self._slots.change(plan)
        for state, snapshot in zip(plan.open_state, plan.open_restore, strict=True):
            if self._parts.states is not None and snapshot:
                self._parts.states.copy(snapshot, state)


class _Chosen(NamedTuple):
    """What the R sampling rows of a step answer, and what it was chosen by."""

    logits: Tensor
    """[S, this rank's rows]."""
    answers: Tensor
    """[R, 1 + most], as `settle_drafts` gives them."""
    row_slots: Sequence[int]
    """[R] the slot of each."""
    sizes: Sequence[int]
    """[R] how many of the S each has."""


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
