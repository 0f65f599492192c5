"""The measuring processes of `unisono doctor`: memory, products, exactness, collectives.

Rank 0 measures the machine alone, while the others wait for it in the rendezvous; then all of them
meet as the ranks of a model do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from unisono.workers.channel import Peer
from unisono.workers.entry import end_at_once, prepare_environment
from unisono.workers.orders import die_with_parent, read_orders
from unisono.workers.probes import (
    PROBE_COMMANDS,
    AttentionProof,
    CollectiveTime,
    LinearProof,
    LinearShape,
    MatrixSpeed,
    Measured,
    Ping,
    Pong,
    ProbeFailed,
    ProbeOrders,
)

if TYPE_CHECKING:
    from unisono.ops.comm import Group

DECODE_ROWS = (1, 32)
"""Rows of a step of decoding whose all-reduce is measured."""
_MATRIX_SIZE = 1024
_REPEATS = 5
_WARM_UP, _ROUNDS = 10, 100


def main() -> None:
    """A child of the launcher: orders come over stdin, results leave over the channel."""
    orders, parent_pid = read_orders(ProbeOrders)
    die_with_parent(parent_pid)
    name = f"rank {orders.rank}"
    with Peer(orders.endpoint, name, PROBE_COMMANDS, orders.session) as peer:
        phase = "import torch"
        try:
            prepare_environment(os.environ)
            import torch

            from unisono.workers import device

            phase = "measure the machine"
            measured = _measure_machine(orders) if orders.rank == 0 else None
            phase = "meet the other ranks"
            torch.set_num_threads(orders.rank_threads)
            store = device.open_store(os.environ)
            group = device.join_group(orders.rank, orders.ranks, torch.device("cpu"), store)
            phase = "measure the collectives"
            collectives = tuple(_collectives(group, orders.hidden_size))
            device.leave_group()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            peer.send(ProbeFailed(rank=orders.rank, phase=phase, message=message))
            peer.close()
            # A broken group cannot be left politely: its destructor may wait for dead peers.
            os._exit(1)
        if measured is not None:
            peer.send(measured(collectives))
            _answer_pings(peer)
    end_at_once(0)


def _measure_machine(
    orders: ProbeOrders,
) -> Callable[[tuple[CollectiveTime, ...]], Measured]:
    """Measure all but the collectives; the result takes these and makes the message."""
    import torch

    torch.set_num_threads(orders.machine_threads)
    bytes_per_s = _stream(orders.stream_bytes)
    matrix = tuple(_matrix_speed(dtype) for dtype in ("float32", "bfloat16"))
    deadline = time.monotonic() + orders.proof_s
    attention = tuple(_attention_proof(head_dim) for head_dim in orders.head_dims)
    linear = tuple(_linear_proofs(orders.shapes, deadline))
    gpu_collectives = _gpu_collectives()
    return lambda collectives: Measured(
        torch=str(torch.__version__),
        threads=orders.machine_threads,
        onednn=torch.backends.mkldnn.is_available(),
        bytes_per_s=bytes_per_s,
        matrix=matrix,
        attention=attention,
        linear=linear,
        collectives=collectives,
        gpu_collectives=gpu_collectives,
    )


def _gpu_collectives() -> str:
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return ""
    from unisono.ops.symmetric import survey

    reason = survey(torch.cuda.device_count())
    return f"NCCL alone: {reason}" if reason else "symmetric memory, and NCCL for large sums"


def _stream(num_bytes: int) -> float:
    import torch

    data = torch.ones(num_bytes // 4)
    return num_bytes / _fastest(data.sum)


def _matrix_speed(dtype: str) -> MatrixSpeed:
    import torch

    from unisono.workers.device import torch_dtype

    size = _MATRIX_SIZE
    x = torch.ones(size, size, dtype=torch_dtype(dtype))
    return MatrixSpeed(dtype=dtype, flops_per_s=2 * size**3 / _fastest(lambda: x @ x))


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls: what the machine can, not what disturbed it."""
    call()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _attention_proof(head_dim: int) -> AttentionProof:
    from unisono.ops.exactness import attention_threads

    return AttentionProof(head_dim=head_dim, one_thread=attention_threads(head_dim) == 1)


def _linear_proofs(shapes: tuple[LinearShape, ...], deadline: float) -> Iterator[LinearProof]:
    for shape in shapes:
        if time.monotonic() >= deadline:
            return
        yield _linear_proof(shape)


def _linear_proof(shape: LinearShape) -> LinearProof:
    """Have every height of the ladder proven, as serving would on first use."""
    import torch

    from unisono.ops.linear import TALL_HEIGHTS, Proofs, pack_linear
    from unisono.workers.device import torch_dtype

    dtype = torch_dtype(shape.dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape.out_features, shape.in_features, generator=generator).to(dtype)
    proofs: Proofs = {}
    product = pack_linear(weight, proofs=proofs)
    for height in TALL_HEIGHTS:
        product(torch.zeros(height, shape.in_features, dtype=dtype))
    heights = sorted(proofs[weight.shape, dtype].items())
    return LinearProof(
        shape=shape,
        exact=tuple(height for height, exact in heights if exact),
        inexact=tuple(height for height, exact in heights if not exact),
    )


def _collectives(group: Group, hidden_size: int) -> Iterator[CollectiveTime]:
    """Time the all-reduces of the first two ranks, then of all where there are more."""
    import torch.distributed as dist

    from unisono.ops.comm import Group

    if group.size > 2:
        pair = dist.new_group([0, 1])
        if group.rank < 2:
            yield from _all_reduces(Group(group.rank, 2, pair), hidden_size)
        dist.barrier()
    yield from _all_reduces(group, hidden_size)


def _all_reduces(group: Group, hidden_size: int) -> Iterator[CollectiveTime]:
    import torch

    for rows in DECODE_ROWS:
        x = torch.ones(rows, hidden_size)
        times = []
        for _ in range(_WARM_UP + _ROUNDS):
            start = time.perf_counter()
            group.all_reduce(x)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[_WARM_UP:])
        yield CollectiveTime(ranks=group.size, rows=rows, seconds=seconds)


def _answer_pings(peer: Peer) -> None:
    while isinstance(message := peer.receive(None), Ping):
        peer.send(Pong(payload=message.payload))
