"""The recurrent layers' two ops over the states of all requests: convolution and gated delta rule.

A request's state at a position is one, however it got there: positions of the prompt are computed
in the chunked form, on the absolute grid of CHUNK tokens, later ones token by token, whether they
are generated now or computed again. So a row begins on that grid while it is in the prompt, and
ends on it or at the prompt's end. A stored state that is narrower than fp32 is rounded after every
chunk, and after every later token.

Tokens that may yet be rejected are held back from the state: it stays what it was before them, and
what they would have done to it is kept beside it, as `PendingTokens`. The step that knows how many
were accepted does just that before all else, in the operations of the recurrence, so that the state
has the bits it would have had token by token.

Every library product below has one shape for each model and works on fresh memory, chunk by chunk
and row by row; all else is elementwise or a sum of torch's own along the last dimension. Reference,
which takes prompts too token by token: `ops/reference/delta_rule.py`.

Shape letters: T tokens, R rows of equally many tokens, H value heads, N tokens of a chunk, K and V
channels of a key and a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.ops.reference.delta_rule import gates, replay, step, unit_heads
from unisono.ops.reference.short_conv import short_conv as convolve

CHUNK = 64
"""Tokens of a chunk: the KV block."""
_SCRATCH_NUMBERS = 1 << 19
"""Numbers of the states that are stepped side by side, at most, unless a row has more."""


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """Consecutive tokens of one request."""

    index: int
    first: int
    """The first token in the step."""
    start: int
    """Its position in the request."""
    count: int
    num_chunked: int
    """How many of them, from the first, belong to the prompt."""
    saves: tuple[tuple[int, int], ...]
    """(tokens of the row, state): the state after so many tokens is also written there."""
    num_pending: int
    """Accepted tokens right before it which its state does not hold yet; 0 if it has no tokens."""
    holds_back: bool
    """Its tokens go to what is pending, not into its state."""


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """What the recurrent layers of one step share; made once a step."""

    rows: tuple[DeltaRow, ...]
    states: Tensor  # [rows] int64
    spans: tuple[RowGroup, ...]
    """All tokens."""
    tails: tuple[RowGroup, ...]
    """Those past the prompts."""
    replays: tuple[tuple[int, Tensor], ...]
    """(pending tokens, the states [R] int64 that they go into), before all else."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with equally many tokens, computed side by side."""

    rows: tuple[DeltaRow, ...]
    states: Tensor  # [R] int64
    tokens: Tensor  # [R, count] int64
    is_new: Tensor  # [R] bool: nothing came before
    holds_back: bool


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """By state, the tokens of the last row that held back: what they do to it if accepted.

    P tokens at most. `inputs` are those of the convolution, in the model's dtype. k of length 1,
    u = beta (v - S k) and exp(g) are fp32: S <- exp(g) S + u k^T. What lies behind the accepted
    tokens is never read.
    """

    inputs: Tensor  # [states, P, channels]
    keys: Tensor  # [states, P, key heads, K]
    updates: Tensor  # [states, P, H, V]
    decays: Tensor  # [states, P, H]


def plan_delta(
    starts: Sequence[int],
    counts: Sequence[int],
    num_prompts: Sequence[int],
    states: Sequence[int] | Tensor,
    saves: Sequence[tuple[int, int, int]] = (),
    num_pending: Sequence[int] | Tensor = (),
    holds_back: Sequence[bool] | Tensor = (),
    *,
    device: torch.device,
) -> DeltaPlan:
    """Lay out the rows of a step: row i has tokens at positions [starts[i], starts[i]+counts[i]).

    The first num_prompts[i] tokens of its request are the prompt, and its state is number
    states[i] (int64, on the device, if it is a tensor). A row that starts at 0 starts from nothing,
    whatever the memory holds. saves: (row, length, state): the state after the request's first
    `length` tokens is also written to number `state`; `length` is a multiple of CHUNK in the row
    and its prompt. No state is named twice, but for scratch.

    num_pending (integers): how many tokens right before the row were accepted, out of a row that
    held back, and are yet to be taken into the state. holds_back (booleans): the row's tokens may
    be rejected: its state is left as it is before them, and they go to `PendingTokens`, once those
    that are pending there have been used. Either may be a tensor, which is read at once; empty:
    none. A row without tokens changes nothing: what is pending stays pending. Raises ValueError
    where a token of the prompt or at position 0 were pending or held back: a request that begins,
    or begins anew after a pre-emption, has none.
    """
    pending = num_pending.tolist() if isinstance(num_pending, Tensor) else num_pending
    held = holds_back.tolist() if isinstance(holds_back, Tensor) else holds_back
    rows = tuple(delta_rows(starts, counts, num_prompts, saves, pending, held))
    numbers = torch.as_tensor(states, dtype=torch.int64).to(device)
    return DeltaPlan(
        rows,
        numbers,
        tuple(_groups([(row, row.first, row.count) for row in rows], numbers)),
        tuple(
            _groups(
                [(row, row.first + row.num_chunked, row.count - row.num_chunked) for row in rows],
                numbers,
            )
        ),
        tuple(_replays(rows, numbers)),
    )


def delta_rows(
    starts: Sequence[int],
    counts: Sequence[int],
    num_prompts: Sequence[int],
    saves: Sequence[tuple[int, int, int]],
    num_pending: Sequence[int] = (),
    holds_back: Sequence[bool] = (),
) -> Iterator[DeltaRow]:
    """The rows of a step, as `plan_delta` is told them. Raises ValueError as it does."""
    pending, held = num_pending or [0] * len(starts), holds_back or [False] * len(starts)
    columns = zip(accumulate(counts), starts, counts, num_prompts, pending, held, strict=True)
    for index, (last, start, count, prompt, before, holds) in enumerate(columns):
        if not 0 <= before <= max(0, start - prompt):
            raise ValueError(f"{before} tokens pending at {start}, of a prompt of {prompt}")
        if holds and start < max(1, prompt):
            raise ValueError(f"tokens from {start} on held back, in a prompt of {prompt}")
        num_chunked = min(count, max(0, prompt - start))
        end = start + count
        assert not num_chunked or start % CHUNK == 0, f"a prompt is cut at {start}"
        assert end >= prompt or end % CHUNK == 0, f"a prompt is cut at {end}"
        mine = [(length - start, state) for row, length, state in saves if row == index]
        assert all(0 < at <= num_chunked and at % CHUNK == 0 for at, _ in mine), f"saves {mine}"
        yield DeltaRow(
            index,
            last - count,
            start,
            count,
            num_chunked,
            tuple(mine),
            before if count else 0,
            bool(holds),
        )


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv: Tensor,
    plan: DeltaPlan,
    pending: PendingTokens | None = None,
) -> Tensor:
    """The convolution of `ops/reference/short_conv.py` over the step's tokens.

    x [T, channels], weight [channels, W], conv [states, W - 1, channels] of the dtype of `x`: the
    inputs before each row, and after the call those before its next token, or before the row if it
    holds back: then its inputs are pending. `pending` may be None where nothing is and no row holds
    back. Returns [T, channels].
    """
    out, before = torch.empty(x.shape, dtype=x.dtype, device=x.device), conv.shape[1]
    for count, states in plan.replays:
        assert pending is not None, "nothing keeps what is pending"
        inputs = torch.cat((conv[states], pending.inputs[states, :count]), dim=1)
        conv.index_copy_(0, states, inputs[:, count:])
    for group in plan.spans:
        past = conv.index_select(0, group.states).masked_fill_(group.is_new[:, None, None], 0)
        inputs = torch.cat((past, x[group.tokens]), dim=1)
        out[group.tokens] = convolve(inputs, weight)
        if group.holds_back:
            assert pending is not None, "nothing keeps what is held back"
            pending.inputs[group.states, : group.tokens.shape[1]] = inputs[:, before:]
        else:
            conv.index_copy_(0, group.states, inputs[:, group.tokens.shape[1] :])
        for place, row in enumerate(group.rows):
            for at, state in row.saves:
                conv[state] = inputs[place, at : at + before]
    return out


def delta_rule(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    plan: DeltaPlan,
    num_key_heads: int,
    pending: PendingTokens | None = None,
) -> Tensor:
    """The gated delta rule over the step's tokens.

    mixed [T, channels]: what left the convolution, [q of all key heads | k of all | v of all value
    heads]; b, a [T, H]; decay = -exp(A_log) and dt_bias [H] fp32; state [states, H, V, K] fp32 or
    bf16, read and written. Value head h reads key head h // (H / num_key_heads). `pending` as in
    `short_conv`. Returns [T, H, V] in the dtype of `mixed`.
    """
    _, heads, value_dim, key_dim = state.shape
    q, k, v = unit_heads(mixed, num_key_heads, key_dim, value_dim)
    inputs = (q, k, v, *gates(b, a, decay, dt_bias))
    out = torch.empty(v.shape, dtype=mixed.dtype, device=mixed.device)
    at_once = max(1, _SCRATCH_NUMBERS // (heads * value_dim * key_dim))
    for count, states in plan.replays:
        assert pending is not None, "nothing keeps what is pending"
        for some in states.split(at_once):
            _replay(state, pending, some, count)
    for row in plan.rows:
        if row.num_chunked:
            _run_chunks(out, inputs, state, plan, row)
    for group in plan.tails:
        held = pending if group.holds_back else None
        assert held is not None or not group.holds_back, "nothing keeps what is held back"
        for first in range(0, len(group.rows), at_once):
            part = slice(first, first + at_once)
            columns = group.states[part], group.tokens[part], group.is_new[part]
            _run_tokens(out, inputs, state, *columns, held)
    return out


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v of all tokens, g and beta; fp32."""


def _replay(state: Tensor, pending: PendingTokens, states: Tensor, count: int) -> None:
    """Take the first `count` tokens that are pending into `states`."""
    now = state.index_select(0, states).float()
    for at in range(count):
        k = _for_value_heads(pending.keys[states, at], now.shape[1])
        replay(now, k, pending.updates[states, at], pending.decays[states, at])
        _round(now, state.dtype)
    state.index_copy_(0, states, now.to(state.dtype))


def _run_tokens(
    out: Tensor,
    inputs: Inputs,
    state: Tensor,
    states: Tensor,
    tokens: Tensor,
    is_new: Tensor,
    held: PendingTokens | None,
) -> None:
    """Take rows token by token, side by side: tokens [R, count] int64. `held`: keeps what they do,
    instead of `state`."""
    now = state.index_select(0, states).float()
    now.masked_fill_(is_new[:, None, None, None], 0)
    for at, column in enumerate(tokens.T):
        q, k, v, g, beta = (x.index_select(0, column) for x in inputs)
        wide_q, wide_k = (_for_value_heads(x, now.shape[1]) for x in (q, k))
        fade = g.exp()
        o, update = step(now, wide_q, wide_k, v, fade, beta)
        out[column] = o.to(out.dtype)
        if held is not None:
            held.keys[states, at], held.updates[states, at] = k, update
            held.decays[states, at] = fade
        _round(now, state.dtype)
    if held is None:
        state.index_copy_(0, states, now.to(state.dtype))


def _round(now: Tensor, dtype: torch.dtype) -> None:
    """What is stored in `dtype` goes on as it will be read again."""
    if now.dtype != dtype:
        now.copy_(now.to(dtype))


def _run_chunks(out: Tensor, inputs: Inputs, state: Tensor, plan: DeltaPlan, row: DeltaRow) -> None:
    """Take the prompt's part of a row chunk by chunk; what a short one lacks changes nothing."""
    saves, own = dict(row.saves), plan.states[row.index : row.index + 1]
    # A copy: where a state lies in the pool must not show.
    now = state.index_select(0, own)[0].float()
    if row.start == 0:
        now = torch.zeros_like(now)
    for at in range(0, row.num_chunked, CHUNK):
        count = min(CHUNK, row.num_chunked - at)
        span = slice(row.first + at, row.first + at + count)
        # [tokens, heads, channels] -> [heads, CHUNK, channels]
        q, k, v, g, beta = (
            F.pad(x[span].transpose(0, 1), (0, 0, 0, CHUNK - count)).contiguous()
            for x in (*inputs[:3], *(x[..., None] for x in inputs[3:]))
        )
        q, k = (_for_value_heads(x[None], len(now))[0] for x in (q, k))
        chunk_out, now = run_chunk(now, q, k, v, g, beta)
        out[span] = chunk_out[:, :count].transpose(0, 1).to(out.dtype)
        stored = now.to(state.dtype)
        now = stored.float()
        if at + count in saves:
            state[saves[at + count]] = stored
    state.index_copy_(0, own, now.to(state.dtype)[None])


def run_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk by the chunked form: (o [H, N, V], the state after it).

    state [H, V, K], q, k [H, N, K], v [H, N, V], g, beta [H, N, 1], all fp32; an absent token is
    all zeros. With G the sum of g up to a token and S the transpose of the state:
    A = strictly lower part of beta_i (k_i . k_j) exp(G_i - G_j),
    u = (I + A)^-1 beta (v - exp(G) k S),
    o = exp(G) q S + lower part of ((q_i . k_j) exp(G_i - G_j)) u,
    S <- exp(G_last) S + (k exp(G_last - G))^T u.
    """
    total = g.cumsum(1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    fading = (total - total.transpose(1, 2)).masked_fill_(later, float("-inf")).exp_()
    fade, last, keys = total.exp(), total[:, -1:], k.transpose(1, 2).contiguous()
    old = state.transpose(1, 2).contiguous()
    system = torch.bmm(k * beta, keys).mul_(fading)  # The solver takes its diagonal for ones.
    right = (v - torch.bmm(k, old).mul_(fade)).mul_(beta)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = torch.bmm(q, old).mul_(fade) + torch.bmm(torch.bmm(q, keys).mul_(fading), u)
    added = torch.bmm(u.transpose(1, 2).contiguous(), k * (last - total).exp())
    return out, state * last.exp() + added


def _for_value_heads(x: Tensor, heads: int) -> Tensor:
    """x [R, key heads, ...]: each repeated for the value heads that read it."""
    group = heads // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _groups(spans: list[tuple[DeltaRow, int, int]], states: Tensor) -> Iterator[RowGroup]:
    """Group (row, first token, tokens) by how many tokens there are, those with none left out, and
    by whether they are held back."""

    def kind(span: tuple[DeltaRow, int, int]) -> tuple[int, bool]:
        return span[2], span[0].holds_back

    for (count, holds_back), same in groupby(sorted(spans, key=kind), key=kind):
        if not count:
            continue
        rows, firsts = zip(*((row, first) for row, first, _ in same), strict=True)
        new = [row.start + first == row.first for row, first in zip(rows, firsts, strict=True)]
        tokens = torch.tensor(firsts)[:, None] + torch.arange(count)
        index = torch.tensor([row.index for row in rows], device=states.device)
        yield RowGroup(
            rows,
            states.index_select(0, index),
            tokens.to(states.device),
            torch.tensor(new, device=states.device),
            holds_back,
        )


def _replays(rows: Sequence[DeltaRow], states: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Group the states of rows by how many tokens are pending, those with none left out."""
    for count in sorted({row.num_pending for row in rows} - {0}):
        same = [row.index for row in rows if row.num_pending == count]
        yield count, states.index_select(0, torch.tensor(same, device=states.device))
