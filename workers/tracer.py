"""Watches what every op of the model returns, for requests that ask for checksums.

It implements `Build.tap`: the ops of each part of the model, and those that choose tokens, are
wrapped, and each row of what they return that belongs to a marked request is recorded: a checksum
of its bits and, where they are wanted, its numbers. Keys and values are recorded as they are
written, and once more where attention reads them, whenever they are new or other than before: so
blocks that hold somebody else's are seen. The launcher reads the files (launcher/trace.py).

What chooses tokens is called for some of the sampled rows only: for those that are drawn, say.
Which these are is known from how each request samples. Two ops are left out, `chance` and
`judge_drafts`: they serve drafts that are judged by rejection, which are promised no bits.

A rank writes `rank-R.jsonl`, a line for each call with `order` (its place in the forward), `name`,
`positions`, `sums`, and `rank-R.f32`, the values: rows of `width` numbers from item `at` on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.ops.checksum import row_checksums
from unisono.ops.reference.draft_plan import Settled
from unisono.ops.table import Ops
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, Rows, SlotSampling
from unisono.workers.slot_table import SlotTable

WATCHED = (
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "silu_and_mul",
    "sigmoid_and_mul",
    "embed_shard",
    "reduce_rows",
    "short_conv",
    "delta_rule",
    "route_experts",
)
"""Ops whose outputs, one or several, have a row for each token of the step."""
HEAD, SAMPLER = "head", "sampler"
"""The scopes whose rows are not tokens but those that are sampled."""
CHOOSING: Mapping[str, Callable[[SlotSampling], bool]] = {
    "penalize": lambda kind: kind.is_penalized,
    "add_bias": lambda kind: kind.is_biased,
    "filter_logits": lambda kind: not kind.is_greedy and kind.is_filtered,
    "add_noise": lambda kind: not kind.is_greedy and kind.is_filtered,
    "noisy_argmax_keys": lambda kind: not kind.is_greedy and not kind.is_filtered,
    "argmax_keys": lambda kind: not kind.is_greedy and kind.is_filtered,
    "unpack_keys": lambda kind: True,
}
"""Ops that choose tokens, and which of the sampled rows are given to each if not all are."""


class Tracer:
    """The records of one rank. `begin` comes before each step."""

    def __init__(self, directory: str, rank: int, *, values: Container[str] = ()) -> None:
        """`values`: what is recorded as numbers, too: names of ops, or of a scope and its op."""
        path = Path(directory) / f"rank-{rank}"
        self._lines_path, self._values_path = path.with_suffix(".jsonl"), path.with_suffix(".f32")
        self._lines_path.touch()
        self._lines: list[str] = []
        self._values: list[bytes] = []
        self._wanted = values
        self._num_values = 0
        self._order = 0
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._samples: list[int] = []
        self._sample_positions: list[int] = []
        self._kinds: list[SlotSampling] = []
        self._places: list[tuple[int, int]] = []
        self._contexts: list[tuple[int, int]] = []
        self._slots: SlotTable | None = None
        self._seen: dict[tuple[str, int, int], int] = {}

    def tap(self, ops: Ops, scope: str) -> Ops:
        """Return `ops` watched under the name of `scope`."""
        watched: dict[str, Any] = {
            name: self._watch(getattr(ops, name), f"{scope} {name}")
            for name in (*WATCHED, *CHOOSING)
        }
        return replace(
            ops,
            fuses_sums=False,
            **watched,
            pack_linear=self._watch_pack(ops.pack_linear, f"{scope} linear"),
            pack_head=self._watch_pack(ops.pack_head, f"{scope} linear"),
            pack_experts=self._watch_pack(ops.pack_experts, f"{scope} experts"),
            rope_and_write_kv=self._watch_rope(ops.rope_and_write_kv, scope),
            paged_attention=self._watch_attention(ops.paged_attention, scope),
            settle_drafts=self._watch_settling(ops.settle_drafts, scope),
        )

    def begin(self, rows: Rows, slots: SlotTable) -> None:
        """Take in which rows of the coming step belong to marked requests."""
        self._order = 0
        self._slots = slots
        self._tokens, self._positions, self._contexts = [], [], []
        self._samples, self._sample_positions = [], []
        self._kinds, self._places = [], []
        first = sampled = answering = 0
        columns = (rows.slot, rows.start, rows.count, rows.phase)
        for slot, start, count, phase in zip(*columns, strict=True):
            # Behind each draft one is sampled, too.
            size = {Phase.CHUNK: 0, Phase.PROMPT: 1}.get(Phase(phase), count)
            kind = slots.sampling.of(slot)
            self._kinds += [kind] * size
            if kind.checksums:
                self._tokens += range(first, first + count)
                self._positions += range(start, start + count)
                self._contexts.append((slot, start + count))
                self._samples += range(sampled, sampled + size)
                self._sample_positions += range(start + count - size, start + count)
                self._places += [(answering, place) for place in range(size)]
            first += count
            sampled += size
            answering += size > 0

    def end(self) -> None:
        """Write what the step gave to the files. What is computed behind it is not watched."""
        self._tokens, self._samples, self._contexts = [], [], []
        with self._lines_path.open("a", encoding="utf-8") as lines:
            lines.writelines(self._lines)
        if self._values:
            with self._values_path.open("ab") as values:
                values.writelines(self._values)
        self._lines, self._values = [], []

    def _watch(self, op: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            # What is computed first comes first: the sum before its norm.
            for tensor in reversed(out) if isinstance(out, tuple) else (out,):
                self._record(name, tensor)
            return out

        return watched

    def _watch_pack(
        self, pack: Callable[..., Callable[..., Any]], name: str
    ) -> Callable[..., Callable[..., Any]]:
        def watched(*args: Any) -> Callable[..., Any]:
            return self._watch(pack(*args), name)

        return watched

    def _watch_rope(self, op: Callable[..., Tensor], scope: str) -> Callable[..., Tensor]:
        name = f"{scope} rope_and_write_kv"

        def watched(*args: Any) -> Tensor:
            q = op(*args)
            k_cache, v_cache, slot_mapping = args[-3:]
            block, offset = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
            for cache in (k_cache, v_cache):
                self._record(name, cache[block, :, offset])
            self._record(name, q)
            return q

        return watched

    def _watch_settling(self, op: Callable[..., Settled], scope: str) -> Callable[..., Settled]:
        """The tokens that answers have got: what is behind a wrong draft is no token."""

        def watched(*args: Any) -> Settled:
            settled = op(*args)
            self._order += 1
            if self._places:
                counts = settled.answers[:, 0].tolist()
                places = zip(self._places, self._sample_positions, strict=True)
                kept = [(*place, at) for place, at in places if place[1] < counts[place[0]]]
                tokens = [settled.answers[row, 1 + place] for row, place, _ in kept]
                if kept:
                    sums = row_checksums(torch.stack(tokens)).tolist()
                    self._write(f"{scope} settle_drafts", [at for *_, at in kept], sums, None)
            return settled

        return watched

    def _watch_attention(self, op: Callable[..., Tensor], scope: str) -> Callable[..., Tensor]:
        def watched(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kw: Any) -> Tensor:
            self._record_cache(f"{scope} kv_cache", k_cache, v_cache)
            out = op(q, k_cache, v_cache, *args, **kw)
            self._record(f"{scope} paged_attention", out)
            return out

        return watched

    def _record(self, name: str, out: Tensor) -> None:
        scope, _, op = name.rpartition(" ")
        rows, positions = self._tokens, self._positions
        if scope == HEAD:
            rows, positions = self._samples, self._sample_positions
        elif scope == SAMPLER:
            rows, positions = self._chosen_rows(op, len(out))
        self._order += 1
        if not rows:
            return
        picked = out[torch.tensor(rows, device=out.device)]
        wanted = op in self._wanted or name in self._wanted
        self._write(name, positions, row_checksums(picked).tolist(), picked if wanted else None)

    def _chosen_rows(self, op: str, count: int) -> tuple[list[int], list[int]]:
        """Which of the `count` rows that `op` was given are of marked requests; their positions."""
        given = list(range(len(self._kinds)))
        if count != len(given):
            given = [row for row in given if CHOOSING[op](self._kinds[row])]
        if count != len(given) or not self._samples:
            return [], []
        at = {row: number for number, row in enumerate(given)}
        samples = zip(self._samples, self._sample_positions, strict=True)
        found = [(at[row], position) for row, position in samples if row in at]
        return [row for row, _ in found], [position for _, position in found]

    def _record_cache(self, name: str, k_cache: Tensor, v_cache: Tensor) -> None:
        self._order += 1
        for slot, count in self._contexts:
            assert self._slots is not None, "begin() comes first"
            at = torch.arange(count, device=k_cache.device)
            block = self._slots.block_table[slot, at // BLOCK_SIZE]
            offset = at % BLOCK_SIZE
            keys = row_checksums(k_cache[block, :, offset])
            sums = (keys + 3 * row_checksums(v_cache[block, :, offset])).tolist()
            new = [p for p in range(count) if self._seen.get((name, slot, p)) != sums[p]]
            self._seen |= {(name, slot, p): sums[p] for p in new}
            if new:
                self._write(name, new, [sums[p] for p in new], None)

    def _write(
        self, name: str, positions: Sequence[int], sums: Sequence[int], values: Tensor | None
    ) -> None:
        line: dict[str, Any] = {
            "order": self._order,
            "name": name,
            "positions": list(positions),
            "sums": list(sums),
        }
        if values is not None:
            flat = values.float().reshape(len(values), -1).cpu().contiguous()
            line |= {"at": self._num_values, "width": flat.shape[1]}
            self._values.append(flat.numpy().tobytes())
            self._num_values += flat.numel()
        self._lines.append(json.dumps(line) + "\n")
