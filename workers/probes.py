"""What a process of `unisono doctor` is told, and what it answers. Torch-free."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A weight [out, in] as a rank packs it; `dtype` is float32 or bfloat16."""

    name: str
    out_features: int
    in_features: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOrders:
    """What one process is told. Rank 0 measures the machine, then all of them the collectives."""

    rank: int
    ranks: int
    endpoint: str
    session: str
    machine_threads: int
    """CPU threads while rank 0 measures alone."""
    rank_threads: int
    """CPU threads of each rank while they meet."""
    stream_bytes: int
    """Size of the tensor whose sum measures the memory."""
    shapes: tuple[LinearShape, ...]
    """Weights whose heights are proven, in this order, as far as `proof_s` lasts."""
    head_dims: tuple[int, ...]
    hidden_size: int
    """Width of the rows that a step of decoding reduces."""
    proof_s: float
    """Seconds after which no further proof begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProof:
    """At which row counts the products with a weight keep a row's bits."""

    shape: LinearShape
    exact: tuple[int, ...]
    inexact: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProof:
    """`one_thread`: attention of this head_dim is exact on a single thread only."""

    head_dim: int
    one_thread: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpeed:
    """Floating point operations a second of a square product."""

    dtype: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Median seconds of one all-reduce of [rows, hidden_size] float32."""

    ranks: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that was measured; sent by rank 0."""

    torch: str
    threads: int
    onednn: bool
    """Whether linear layers use oneDNN's packed products."""
    bytes_per_s: float
    """Bytes read a second by a sum over a large tensor."""
    matrix: tuple[MatrixSpeed, ...]
    attention: tuple[AttentionProof, ...]
    linear: tuple[LinearProof, ...]
    collectives: tuple[CollectiveTime, ...]
    gpu_collectives: str = ""
    """How ranks on the GPUs of this host would exchange numbers; empty: there are not two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    """A process could not do its part; `phase` says what it was at."""

    rank: int
    phase: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """To be sent back as it is, to measure the way there and back."""

    payload: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """The answer to a `Ping`."""

    payload: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed:
    """Nothing more is asked of rank 0."""


PROBE_COMMANDS = (Ping, Dismissed)
PROBE_REPORTS = (Measured, ProbeFailed, Pong)
