"""Watches what every op of the model returns, for requests that ask for checksums.

It implements `Build.tap`: the ops of each part of the model are wrapped, and each row of what they
return that belongs to a marked request is recorded: a checksum of its bits and, if values are
wanted, the numbers of what every rank holds whole. Cached keys and values are recorded where
attention reads them, whenever they are new or other than before: so blocks that hold somebody
else's are seen. The launcher reads the files (launcher/trace.py).

A rank writes `rank-R.jsonl`, a line for each call with `order` (its place in the forward), `name`,
`positions`, `sums`, and `rank-R.f32`, the values: rows of `width` numbers from item `at` on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.ops.checksum import row_checksums
from unisono.ops.table import Ops
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import Phase, Rows
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
REPLICATED = ("rms_norm", "add_rms_norm", "reduce_rows")
"""Those among them whose outputs are the same on every rank."""
HEAD = "head"
"""The scope whose rows are not tokens but those that are sampled."""


class Tracer:
    """The records of one rank. `begin` comes before each step."""

    def __init__(self, directory: str, rank: int, *, values: bool) -> None:
        path = Path(directory) / f"rank-{rank}"
        self._lines_path, self._values_path = path.with_suffix(".jsonl"), path.with_suffix(".f32")
        self._lines_path.touch()
        self._lines: list[str] = []
        self._values: list[bytes] = []
        self._keeps_values = values
        self._num_values = 0
        self._order = 0
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._samples: list[int] = []
        self._sample_positions: list[int] = []
        self._contexts: list[tuple[int, int]] = []
        self._slots: SlotTable | None = None
        self._seen: dict[tuple[str, int, int], int] = {}

    def tap(self, ops: Ops, scope: str) -> Ops:
        """Return `ops` watched under the name of `scope`."""
        watched: dict[str, Any] = {
            name: self._watch(getattr(ops, name), f"{scope} {name}", name in REPLICATED)
            for name in WATCHED
        }
        return replace(
            ops,
            fuses_sums=False,
            **watched,
            pack_linear=self._watch_pack(ops.pack_linear, f"{scope} linear"),
            pack_head=self._watch_pack(ops.pack_head, f"{scope} linear"),
            pack_experts=self._watch_pack(ops.pack_experts, f"{scope} experts"),
            rope_and_write_kv=self._watch(
                ops.rope_and_write_kv, f"{scope} rope_and_write_kv", replicated=False
            ),
            paged_attention=self._watch_attention(ops.paged_attention, scope),
        )

    def begin(self, rows: Rows, slots: SlotTable) -> None:
        """Take in which rows of the coming step belong to marked requests."""
        self._order = 0
        self._slots = slots
        self._tokens, self._positions, self._contexts = [], [], []
        self._samples, self._sample_positions = [], []
        first = sampled = 0
        columns = (rows.slot, rows.start, rows.count, rows.phase)
        for slot, start, count, phase in zip(*columns, strict=True):
            # Behind each draft one is sampled, too.
            size = {Phase.CHUNK: 0, Phase.PROMPT: 1}.get(Phase(phase), count)
            if slots.sampling.of(slot).checksums:
                self._tokens += range(first, first + count)
                self._positions += range(start, start + count)
                self._contexts.append((slot, start + count))
                self._samples += range(sampled, sampled + size)
                self._sample_positions += range(start + count - size, start + count)
            first += count
            sampled += size

    def end(self) -> None:
        """Write what the step gave to the files. What is computed behind it is not watched."""
        self._tokens, self._samples, self._contexts = [], [], []
        with self._lines_path.open("a", encoding="utf-8") as lines:
            lines.writelines(self._lines)
        if self._keeps_values:
            with self._values_path.open("ab") as values:
                values.writelines(self._values)
        self._lines, self._values = [], []

    def _watch(self, op: Callable[..., Any], name: str, replicated: bool) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            # What is computed first comes first: the sum before its norm.
            for tensor in reversed(out) if isinstance(out, tuple) else (out,):
                self._record(name, tensor, replicated)
            return out

        return watched

    def _watch_pack(
        self, pack: Callable[..., Callable[..., Any]], name: str
    ) -> Callable[..., Callable[..., Any]]:
        def watched(*args: Any) -> Callable[..., Any]:
            return self._watch(pack(*args), name, replicated=False)

        return watched

    def _watch_attention(self, op: Callable[..., Tensor], scope: str) -> Callable[..., Tensor]:
        def watched(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kw: Any) -> Tensor:
            self._record_cache(f"{scope} kv_cache", k_cache, v_cache)
            out = op(q, k_cache, v_cache, *args, **kw)
            self._record(f"{scope} paged_attention", out, replicated=False)
            return out

        return watched

    def _record(self, name: str, out: Tensor, replicated: bool) -> None:
        rows, positions = self._tokens, self._positions
        if name.startswith(f"{HEAD} "):
            rows, positions = self._samples, self._sample_positions
        self._order += 1
        if not rows:
            return
        picked = out[torch.tensor(rows, device=out.device)]
        wanted = replicated and self._keeps_values
        self._write(name, positions, row_checksums(picked).tolist(), picked if wanted else None)

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
            flat = values.float().flatten(1).cpu().contiguous()
            line |= {"at": self._num_values, "width": flat.shape[1]}
            self._values.append(flat.numpy().tobytes())
            self._num_values += flat.numel()
        self._lines.append(json.dumps(line) + "\n")
