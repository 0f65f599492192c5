"""Logits over vocabulary shards to tokens, the same on every rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.models.partition import ModelPartition
from unisono.ops.checksum import row_checksums
from unisono.ops.comm import Group
from unisono.ops.table import Ops
from unisono.workers.protocol import int64s
from unisono.workers.sampling_state import SamplingRows
from unisono.workers.slot_table import SlotTable


class Sampler:
    """The greatest logit of the whole vocabulary, the lowest id on ties; drawn: with noise."""

    def __init__(
        self, ops: Ops, group: Group, partition: ModelPartition, num_token_ids: int
    ) -> None:
        self._ops = ops
        self._group = group
        self._first_id = partition.vocab.ranges[group.rank][0]
        self._widths = [stop - start for start, stop in partition.vocab.ranges]
        vocab_size = partition.config.vocab_size
        self._num_ids = min(num_token_ids or vocab_size, vocab_size)

    def keys(self, logits: Tensor, rows: SamplingRows | None) -> Tensor:
        """logits [S, this rank's rows] fp32 -> keys [S] that name the token of each row, or a NaN
        that its logits hold on any rank. `rows` None: all are plain. Waits for nothing."""
        keys = self._keys(logits) if rows is None else self._adjusted_keys(logits, rows)
        return self._group.max(keys)

    def choose(self, logits: Tensor, rows: SamplingRows | None) -> tuple[Tensor, Tensor]:
        """What `keys` name: token ids [S] int64, and whether a row has a NaN [S] bool."""
        return self._ops.unpack_keys(self.keys(logits, rows))

    def append(self, keys: Tensor, slots: Tensor, table: SlotTable) -> Tensor:
        """Give slots [S] the tokens that keys [S] name; return the answers, as `settle_drafts`.

        The recurrent states hold all that is before these tokens.
        """
        none = torch.zeros_like(slots)
        return self._ops.settle_drafts(keys, slots, none, table.tensors, 1).answers

    def judge(
        self,
        logits: Tensor,
        draft_logits: Tensor,
        drafted: Tensor,
        drawn: tuple[Tensor, Tensor, Tensor],
        rows: SamplingRows | None = None,
    ) -> Tensor:
        """Keys [n] that name the token of each place whose draft, drafted [n] int64, was drawn from
        draft_logits and may be rejected: the draft, or what takes its place; or a NaN.

        logits and draft_logits [n, this rank's rows] fp32 are as they come; `drawn` are the
        temperature, seed and position [n] of each place, and `rows` says what else is done to its
        logits; None: nothing. The places are brought whole to every rank, so that all judge alike.
        Waits for nothing.
        """
        temperature, seeds, positions = drawn
        model, draft = (
            self._whole(each) if rows is None else self._drawable(each, rows)
            for each in (logits, draft_logits)
        )
        luck = self._ops.chance(seeds, positions)
        left = self._ops.judge_drafts(model, draft, drafted, temperature, luck)
        draws = (torch.ones_like(temperature), seeds.contiguous(), positions, 0, self._num_ids)
        return self._group.max(self._ops.noisy_argmax_keys(left, *draws))

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
        """logits [R, this rank's rows] fp32, token_ids [R] int64 -> [R, logprob_width] int32.

        Of the model's own logits: penalties, biases, temperature and filters have no part in
        them, nor have ids unknown to the tokenizer. The rows are brought whole to every rank, so
        the bits depend neither on the company of a row nor on how the vocabulary is cut. Raises
        FloatingPointError if a row's logits hold a NaN.
        """
        logprob, rank, top_ids, top = self._ops.token_logprobs(
            self._whole(logits), token_ids, num_top
        )
        if bool(logprob.isnan().any()):
            raise FloatingPointError("logits whose log-probabilities are asked for hold NaN")
        pairs = torch.stack((top_ids.int(), top.view(torch.int32)), dim=2)
        own = torch.stack((logprob.view(torch.int32), rank.int()), dim=1)
        return torch.cat((own, pairs.flatten(1)), dim=1)

    def checksums(self, logits: Tensor, rows: Sequence[int]) -> array[int]:
        """Return an int64 for each of `rows`: of all logits [S, this rank's rows] in that row.

        The same on every rank and for every cut of the vocabulary, and another one wherever a
        single bit of a logit is another.
        """
        if not rows:
            return int64s()
        at = torch.tensor(rows, dtype=torch.int64).to(logits.device)
        own = row_checksums(logits[at], self._first_id)
        parts = self._group.gather(own[:, None], [1] * len(self._widths))
        return array("q", parts.sum(1).tolist())

    def greedy_keys(self, logits: Tensor) -> Tensor:
        """logits [S, this rank's rows] fp32 -> the winning keys of the whole vocabulary [S]."""
        return self._group.max(self._keys(logits))

    def drawn_keys(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
    ) -> Tensor:
        """`greedy_keys` of logits with their noise; temperature, seeds, positions [S]."""
        draws = (temperature, seeds, positions, self._first_id, self._num_ids)
        return self._group.max(self._ops.noisy_argmax_keys(logits, *draws))

    def _keys(self, logits: Tensor) -> Tensor:
        return self._ops.argmax_keys(logits, self._first_id, self._num_ids)

    def _adjusted_keys(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        logits = self._adjusted(logits, rows)
        keys = self._keys(logits)
        if len(at := rows.whole):
            draws = (*_draws(rows, at), self._first_id, self._num_ids)
            keys = keys.index_copy(0, at, self._ops.noisy_argmax_keys(logits[at], *draws))
        if len(rows.filtered):
            # Every rank sees these rows whole, so all of them offer the same key.
            keys = keys.index_copy(0, rows.filtered, self._filtered_keys(logits, rows))
        return keys

    def _adjusted(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if len(at := rows.penalized):
            penalized = self._ops.penalize(
                logits[at],
                rows.history,
                rows.num_prompt[at],
                rows.positions[at],
                rows.repetition[at],
                rows.presence[at],
                rows.frequency[at],
                self._first_id,
            )
            logits = logits.index_copy(0, at, penalized)
        if len(at := rows.biased):
            biased = self._ops.add_bias(
                logits[at], rows.bias_rows, rows.bias_ids, rows.bias, self._first_id
            )
            logits = logits.index_copy(0, at, biased)
        return logits

    def _filtered_keys(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        at = rows.filtered
        left = self._filtered(self._whole(logits[at]), rows)
        noisy = self._ops.add_noise(left, *_draws(rows, at), 0)
        return self._ops.argmax_keys(noisy, 0, self._num_ids)

    def _drawable(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The whole rows of logits [n, this rank's rows], adjusted; -inf is what filters bar."""
        whole = self._whole(self._adjusted(logits, rows))
        if len(at := rows.filtered):
            whole = whole.index_copy(0, at, self._filtered(whole[at], rows))
        return whole

    def _whole(self, logits: Tensor) -> Tensor:
        return self._group.gather(logits, self._widths)[:, : self._num_ids]

    def _filtered(self, whole: Tensor, rows: SamplingRows) -> Tensor:
        """What the filters of `rows.filtered` leave of those rows' logits [n, vocabulary]."""
        at = rows.filtered
        return self._ops.filter_logits(
            whole, rows.temperature[at], rows.top_k[at], rows.top_p[at], rows.min_p[at]
        )


def _draws(rows: SamplingRows, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature, seed and position of rows at [n]."""
    return rows.temperature[at], rows.seeds[at], rows.positions[at]
