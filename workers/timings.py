"""What is told to whom measures for `unisono bench`, and what they answer. Torch-free.

The measuring process times ops alone; ranks watch their own steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.ops.device_time import DeviceTime as DeviceTime
from unisono.ops.device_time import KernelTime as KernelTime
from unisono.ops.device_time import Watched as Watched

TIMED_OPS = (
    "linear",
    "head",
    "rms_norm",
    "add_rms_norm",
    "ordered_sum",
    "ordered_sum_add_rms_norm",
    "gated_rms_norm",
    "rope_and_write_kv",
    "silu_and_mul",
    "sigmoid_and_mul",
    "embed_shard",
    "paged_attention",
    "plan_attention",
    "short_conv",
    "delta_rule",
    "plan_delta",
    "route_experts",
    "experts",
    "settle_drafts",
    "judge_drafts",
    "argmax_keys",
    "noisy_argmax_keys",
    "unpack_keys",
    "add_noise",
    "filter_logits",
    "penalize",
    "add_bias",
    "token_logprobs",
)
"""What may be asked for; `bench_cases.py` has cases for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrders:
    """What the measuring process is told."""

    device: str
    """cpu or cuda."""
    ops: tuple[str, ...]
    shapes: tuple[str, ...]
    """Names of shapes (`models/shapes.py`) whose sizes are timed."""
    seconds: float
    """Cases that have not begun by then are left out, and said to be."""
    endpoint: str
    session: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Sent first: what is measured on, and what it can. Floors follow from it."""

    device: str
    torch: str
    triton: str
    """Empty: not installed."""
    dtype: str
    bytes_per_s: float
    flops_per_s: float
    num_cases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTime:
    """One case, measured or failed."""

    op: str
    shape: str
    label: str
    num_bytes: int
    num_flops: int
    seconds: float = 0.0
    """Median of one call; 0: it failed, or time was over."""
    torch_seconds: float = 0.0
    """Of what torch has for it; 0: it has nothing, or that failed."""
    is_cold: bool = True
    """It reads from memory; else it may find all in a cache, and memory's speed is no floor."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDone:
    """Every case was sent."""

    seconds: float
    num_left_out: int
    """Cases for which the time was not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFailed:
    """The process could not go on; `phase` says what it was at."""

    phase: str
    message: str


BENCH_REPORTS = (Machine, CaseTime, BenchDone, BenchFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSteps:
    """To ranks: take note of the next steps of `num_rows` rows, all of one phase.

    One at a time: it takes the place of one that is not done.
    """

    num_rows: int
    num_tokens: int
    """That the rows compute together; drafts are not among them."""
    phase: int
    """Of every row (`Phase` in workers/protocol.py)."""
    skip: int
    """Such steps that come before."""
    num_steps: int
    """At least 1."""
    traced: bool = False
    """Record the device's side, on GPUs only; the steps take longer then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSeen:
    """A rank's answer to `WatchSteps`, before the result of the last of these steps."""

    rank: int
    watched: Watched
