"""What a worker obeys and answers. Torch-free; every set of messages is closed.

Arrays travel as raw little-endian frames (`array` fields), everything else as msgpack.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import IntEnum

from unisono.workers.timings import StepsSeen, WatchSteps


class Phase(IntEnum):
    """What a row of a step is, as the scheduler says; never guessed from a shape."""

    CHUNK = 0
    """Prompt tokens with more of the prompt to come: no token is sampled."""
    PROMPT = 1
    """The last tokens of a prompt: one token is sampled."""
    DECODE = 2
    """The newest token of an answer: one token is sampled."""


_DECODE = int(Phase.DECODE)
NUM_STOP_IDS = 8
"""Stop ids of a slot that end its answer on the ranks; behind others the runtime does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """How the tokens of one slot are chosen; the defaults take the likeliest.

    Of the logits first the penalties, then the biases and the ids that may not come yet; then the
    token is drawn, or at temperature 0 the likeliest taken.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    """0: off."""
    seed: int = 0
    """0 to 2^63 - 1."""
    num_prompt_tokens: int = 0
    """Where the answer begins; the slot may be opened with a part of it."""
    min_tokens: int = 0
    """Until so many are answered, `stop_ids` may not come."""
    logprobs: int = -1
    """Log-probabilities of its tokens, each with so many likeliest ids; -1: none."""
    prompt_logprobs: int = -1
    """The same of every prompt token but the first."""
    checksums: int = 0
    """1: a checksum of the logits that each of its tokens comes from (ops/checksum.py)."""
    rejects: int = 0
    """1: it is drawn, and its drafts are judged by rejection sampling (workers/speculator.py)."""
    max_length: int = 1 << 40
    """Tokens, those of the prompt included, with which it ends at the latest."""
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that it ends with, each once; those that are likeliest to come first."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_penalized(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def known_stop_ids(self) -> tuple[int, ...]:
        """Those that a device knows, NUM_STOP_IDS: -1 where there are fewer."""
        return (*self.stop_ids, *[-1] * NUM_STOP_IDS)[:NUM_STOP_IDS]

    @property
    def late_ids(self) -> tuple[int, ...]:
        return self.stop_ids if self.min_tokens else ()

    @property
    def is_biased(self) -> bool:
        return bool(self.bias or self.late_ids)

    @property
    def is_plain(self) -> bool:
        """Whether the arg-max of the model's own logits is the answer."""
        return self.is_greedy and not self.is_penalized and not self.is_biased

    @property
    def needs_noise_only(self) -> bool:
        """Whether logits, temperature and seed give the token: nothing is done to them before."""
        return self.is_plain or not (self.is_filtered or self.is_penalized or self.is_biased)


_SCALARS = tuple(item.name for item in fields(SlotSampling))[:15]
_NUMBERS = struct.Struct("<6d11q")
"""The scalar fields of a SlotSampling in their order, then how many biases and stop ids follow."""
_BIAS = struct.Struct("<qd")
_STOP_ID = struct.Struct("<q")


def pack_sampling(slots: Iterable[SlotSampling]) -> array[int]:
    """Return the raw form of `slots`, for `StepPlan.open_sampling`."""
    raw = bytearray()
    for slot in slots:
        numbers = [getattr(slot, name) for name in _SCALARS]
        raw += _NUMBERS.pack(*numbers, len(slot.bias), len(slot.stop_ids))
        for token_id, bias in slot.bias:
            raw += _BIAS.pack(token_id, bias)
        for token_id in slot.stop_ids:
            raw += _STOP_ID.pack(token_id)
    return array("q", struct.unpack(f"<{len(raw) // 8}q", raw))


def unpack_sampling(packed: array[int]) -> list[SlotSampling]:
    """The slots that `pack_sampling` packed."""
    raw = struct.pack(f"<{len(packed)}q", *packed)
    slots, at = [], 0
    while at < len(raw):
        *numbers, num_biases, num_stops = _NUMBERS.unpack_from(raw, at)
        biases = at + _NUMBERS.size
        stops = biases + num_biases * _BIAS.size
        at = stops + num_stops * _STOP_ID.size
        slots.append(
            SlotSampling(
                **dict(zip(_SCALARS, numbers, strict=True)),
                bias=tuple(_BIAS.iter_unpack(raw[biases:stops])),
                stop_ids=tuple(token_id for (token_id,) in _STOP_ID.iter_unpack(raw[stops:at])),
            )
        )
    return slots


def logprob_width(num_top: int) -> int:
    """Items of one log-probability on the wire, all int32, with `num_top` likeliest ids.

    The bits of its fp32 value, its rank (1: no id is likelier), then id and bits of each of the
    likeliest; the id is -1 where the vocabulary has no more.
    """
    return 2 + 2 * num_top


def int64s() -> array[int]:
    """An empty int64 array."""
    return array("q")


def int32s(values: object = ()) -> array[int]:
    """An int32 array, the raw form of every list of numbers on the wire."""
    return array("i", values)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one step in batch order, one entry per row in each array.

    Row i computes the tokens at positions [start, start + count) of the request in slot `slot`.
    A DECODE row may propose up to `drafts[i]` tokens behind its own and answers 1 to drafts + 1, or
    none behind the end of its answer; an empty `drafts` means no drafts. Its `start` is where its
    slot's newest token is, or, where drafts of the slot were still in flight when it was planned,
    the least it can be: the ranks know.
    """

    slot: array[int] = field(default_factory=int32s)
    start: array[int] = field(default_factory=int32s)
    count: array[int] = field(default_factory=int32s)
    phase: array[int] = field(default_factory=int32s)
    drafts: array[int] = field(default_factory=int32s)

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def decode_only(self) -> bool:
        return self.phase.count(_DECODE) == len(self.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: changes of the slot table first, then the rows to compute.

    Opened slots: `open_slot[i]` receives `open_length[i]` tokens, concatenated in `open_tokens`:
    the prompt, and the answer so far if the request is resumed. Blocks: `block_id[i]` becomes the
    next block of slot `block_slot[i]`. An opened slot starts with no blocks, so re-opening a slot
    is what frees it on the worker. The first `num_shared[i]` blocks of slot `open_slot[i]` keep
    what they hold, the computed KV of its first tokens; every other block is handed out cleared.
    `open_sampling` holds `pack_sampling` of the opened slots; empty: all are plain, and none ends.

    Recurrent states, empty where the model has none: slot `open_slot[i]` gets state
    `open_state[i]`, a copy of snapshot `open_restore[i]`, or empty where that is 0. The state of
    slot `save_slot[i]` after its first `save_length[i]` tokens, which a row of this step computes,
    is copied to snapshot `save_state[i]`; the length is a multiple of the block size.

    A plan may come before the results of earlier ones are out. A slot whose answer has ended in
    one of them may still have a row: it answers no token, and nothing of the slot is changed.
    """

    step: int
    rows: Rows
    open_slot: array[int] = field(default_factory=int32s)
    open_length: array[int] = field(default_factory=int32s)
    open_tokens: array[int] = field(default_factory=int32s)
    open_sampling: array[int] = field(default_factory=int64s)
    num_shared: array[int] = field(default_factory=int32s)
    block_slot: array[int] = field(default_factory=int32s)
    block_id: array[int] = field(default_factory=int32s)
    open_state: array[int] = field(default_factory=int32s)
    open_restore: array[int] = field(default_factory=int32s)
    save_slot: array[int] = field(default_factory=int32s)
    save_length: array[int] = field(default_factory=int32s)
    save_state: array[int] = field(default_factory=int32s)
    num_proposals: int = 0
    """Tokens to draft behind each row that samples, for the step after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Take memory for `num_blocks` KV blocks beside block 0 and `num_states` states beside state 0.

    Both are the least that any rank offered.
    """

    num_blocks: int
    num_states: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give back what `Allocate` took, and with `weights` their memory too. No step is in flight."""

    weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Take weights in the place of those that are there, whose memory is given back first."""

    path: str
    """As `WorkerConfig.model_path`; `load_format` as there, too."""
    load_format: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End after the step in flight."""


WORKER_COMMANDS = (Allocate, Release, LoadWeights, StepPlan, WatchSteps, Shutdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First word of a rank; `config_digest` must be the same on every rank."""

    rank: int
    pid: int
    host: str
    config_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Rank `rank` is in start-up phase `phase`; `done` of `total` bytes where it is loading."""

    rank: int
    phase: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Weights are in memory. Capacity is a measured fact: the runtime takes the minimum."""

    rank: int
    num_blocks: int
    device: str
    dtype: str
    weight_bytes: int
    activation_bytes: int
    """What the largest step takes for a while; 0 on the CPU, where it is not measured."""
    block_bytes: int
    """Of one KV block, all layers."""
    num_states: int = 0
    state_bytes: int = 0
    """Of one recurrent state, all layers; 0: the model has none."""
    graph_bytes: int = 0
    """Of the graphs that are captured at start-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Allocate, Release or LoadWeights is obeyed.

    `error`: why weights could not be loaded; the rank has none then, and waits for others.
    """

    rank: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The i-th row of the step that samples (phase PROMPT or DECODE) has `counts[i]` of `tokens`:
    none if its answer had ended in an earlier step. Empty `counts` mean one token each.

    `logprobs` is there if any was asked for: `logprob_width` items for each token, in row order.
    First come the prompt tokens that the rows' positions predict, then the tokens of `tokens`.
    `checksums` likewise, one for each token of `tokens` that it was asked for, in row order.
    `digest` is the rank's rolling hash over (sequence, collective, size): equal on every rank,
    or the ranks have diverged.
    """

    rank: int
    step: int
    tokens: array[int]
    digest: int
    seconds: float
    counts: array[int] = field(default_factory=int32s)
    logprobs: array[int] | None = None
    checksums: array[int] | None = None
    num_replays: int = 0
    """Graphs that the rank has replayed so far."""
    eager: tuple[str, ...] = ()
    """Why pieces of the step were no replays, a reason each (workers/graph_pool.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rank's own exception. `secondary`: it only saw a peer go (a broken collective)."""

    rank: int
    phase: str
    step: int
    error: str
    message: str
    traceback: str
    secondary: bool = False


WORKER_REPORTS = (Hello, Progress, Loaded, Ready, StepsSeen, StepResult, Fault)
