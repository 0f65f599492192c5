"""All-reduce over memory that the GPUs of all ranks reach: who owns it, and what it serves.

`open_direct` takes the memory when the group is made and tries it out; where a rank cannot, nothing
is served and the log has the reason. The kernels, and why one meeting a collective is enough:
ops/kernels/symmetric.py.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from unisono.ops.agreement import Agreement
from unisono.ops.comm import PeerLost, ordered_sum
from unisono.ops.direct import Direct
from unisono.ops.kernels import symmetric as kernels
from unisono.ops.kernels.launch import blocks_of
from unisono.ops.kernels.norm import MAX_WIDTH, shape_of_program
from unisono.ops.kernels.symmetric_launch import one_shot_norm_of, two_shot_norm_of, two_shot_of
from unisono.ops.symmetric_layout import BLOCK_WORDS, CROSSOVER, REGION_WORDS, Layout

WAIT_S = 300.0
"""How long a rank waits for another in a kernel. Ranks that load weights from a busy disk, or
compile kernels, come minutes apart; who dies or hangs is found out much sooner elsewhere."""
_TRIAL_WAIT_S = 30.0
_POLLS_PER_S = 2_000_000
"""A look at memory takes 0.5 us or more: waits may last longer than they are said to."""
_FUSED = 2
"""A one-shot that spares the norm a kernel of its own pays up to so many times that crossover."""
_BLOCK_KEYS = 256
_WARPS = 8
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_VECTOR_BYTES = 16

log = logging.getLogger(__name__)


class Symmetric(Direct):
    """One rank's end. Served in stream order: what a rank enqueues is what its peers enqueue.

    `memory` [layout.nbytes] uint8, zeros, of this rank; `addresses` of the memories of all ranks
    as this rank's device sees them; `fault` [1] int64, zero, pinned where there is a GPU. `stages`
    is for tests that play ranks one after the other.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        memory: Tensor,
        addresses: Sequence[int],
        fault: Tensor,
        wait_s: float = WAIT_S,
        owner: object = None,
    ) -> None:
        assert memory.numel() == layout.nbytes, (memory.numel(), layout)
        assert all(address % _VECTOR_BYTES == 0 for address in addresses), addresses
        self.rank, self.layout, self.wait_s = rank, layout, wait_s
        self.stages: tuple[int, int] | None = None
        self._fault = fault
        # Graphs name its addresses.
        self._kept: tuple[object, ...] = (memory, owner)
        self._table = torch.tensor([*addresses, fault.data_ptr()], device=memory.device)
        lanes = 1 + layout.one_shot_lanes + layout.two_shot_lanes
        self._state = torch.zeros(lanes, dtype=torch.int64, device=memory.device)

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """The sum of `x` over the ranks as `ordered_sum` has it, or None where it is not served.

        x of bf16, fp16 or fp32, of a whole number of 16 bytes up to the crossover to NCCL.
        """
        nbytes = x.numel() * x.element_size()
        if not self._takes(x, nbytes) or nbytes > self.layout.two_shot_bytes:
            return None
        return self.one_shot(x) if nbytes <= self.layout.one_shot_bytes else self.two_shot(x)

    def one_shot(self, x: Tensor) -> Tensor:
        """The same for up to `layout.one_shot_bytes`."""
        x = _aligned(x)
        total = torch.empty_like(x)
        num_words = x.numel() * x.element_size() // 4
        self._one_shot(kernels.one_shot_all_reduce_kernel, x, total, num_words, BLOCK_WORDS)
        return total

    def two_shot(self, x: Tensor) -> Tensor:
        """The same for up to `layout.two_shot_bytes`."""
        x = _aligned(x)
        total = torch.empty_like(x)
        layout, count, item = self.layout, x.numel(), x.element_size()
        size = layout.slice_bytes(count * item) // item
        two_shot_of(layout, item, self.stages or (0, 2)).launch(
            (blocks_of(count, size * layout.ranks),),
            x,
            total,
            self._table,
            self._state,
            self.rank,
            self._polls,
            count,
            size,
        )
        return total

    def all_reduce_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """`all_reduce`, + bias [width] if there is one, then `add_rms_norm`, with their bits.

        x and residual [tokens, width] of one dtype; None where no kernel serves it: too many
        tokens, too wide a row, or so narrow a one that rows share a program of the norm.
        """
        nbytes, both = x.numel() * x.element_size(), None
        if nbytes <= _FUSED * self.layout.one_shot_bytes:
            both = self.one_shot_add_rms_norm(x, bias, residual, weight, eps)
        if both is None and nbytes > self.layout.one_shot_bytes:
            both = self.two_shot_add_rms_norm(x, bias, residual, weight, eps)
        return both

    def one_shot_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """The same, a row to a lane; None where there are too few lanes or they are too small."""
        tokens, width = x.shape
        row_bytes = width * x.element_size()
        if (
            not self._takes_rows(x)
            or tokens > self.layout.one_shot_lanes
            or row_bytes > 4 * REGION_WORDS
        ):
            return None
        tensors, results = _rows_of(x, bias, residual, weight)
        one_shot_norm_of(self.layout.ranks, width, bias is not None, self.stages or (0, 1)).launch(
            (tokens,), *tensors, *results, self._table, self._state, self.rank, self._polls, eps
        )
        return results

    def two_shot_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """The same by whole rows to a slice; None where a slice has no room for as many."""
        layout, (tokens, width), item = self.layout, x.shape, x.element_size()
        if not self._takes_rows(x) or x.numel() * item > layout.two_shot_bytes:
            return None
        if not (slice_rows := layout.slice_rows(tokens, width * item)):
            return None
        tensors, results = _rows_of(x, bias, residual, weight)
        stages = self.stages or (0, 2)
        two_shot_norm_of(layout, width, item, bias is not None, stages).launch(
            (blocks_of(tokens, slice_rows * layout.ranks),),
            *tensors,
            *results,
            self._table,
            self._state,
            self.rank,
            self._polls,
            tokens,
            slice_rows,
            eps,
        )
        return results

    def max(self, x: Tensor) -> Tensor | None:
        """The elementwise maximum of `x` int64 over the ranks; None where there are too many."""
        assert x.dtype == torch.int64, x.dtype
        if not 0 < x.numel() <= _BLOCK_KEYS * self.layout.one_shot_lanes:
            return None
        x = x.contiguous()
        most = torch.empty_like(x)
        self._one_shot(kernels.one_shot_all_reduce_max_kernel, x, most, x.numel(), _BLOCK_KEYS)
        return most

    def check(self) -> None:
        """Raise PeerLost if a wait of this rank ended without an answer: what follows is wrong.

        Of work that the device has done; what it has yet to do is not waited for.
        """
        if late := int(self._fault[0]):
            raise PeerLost(
                f"rank {late - 1} did not come to a collective of rank {self.rank} within "
                f"{self.wait_s:g} s"
            )

    def close(self) -> None:
        """Let go of the memory. No graph that names it may run any more."""
        self._kept = ()

    @property
    def _polls(self) -> int:
        return max(int(self.wait_s * _POLLS_PER_S), 1)

    def _takes(self, x: Tensor, nbytes: int) -> bool:
        return x.dtype in _DTYPES and nbytes % _VECTOR_BYTES == 0 and x.numel() > 0

    def _takes_rows(self, x: Tensor) -> bool:
        """Whether rows of x [tokens, width] are such that a program of the norm takes one."""
        width = x.shape[1]
        return (
            self._takes(x, width * x.element_size())
            and width <= MAX_WIDTH
            and shape_of_program(width)[0] == 1
        )

    def _one_shot(self, kernel: Any, x: Tensor, total: Tensor, count: int, block: int) -> None:
        first, last = self.stages or (0, 1)
        kernel[(blocks_of(count, block),)](
            x,
            total,
            self._table,
            self._state,
            self.rank,
            self._polls,
            count,
            RANKS=self.layout.ranks,
            EPOCHS=1,
            REGION=REGION_WORDS,
            BLOCK=block,
            FIRST=first,
            LAST=last,
            num_warps=_WARPS,
        )


def open_direct(
    collectives: str,
    rank: int,
    size: int,
    device: torch.device,
    store: dist.Store,
    group: dist.ProcessGroup | None,
) -> Direct:
    """What `--collectives` asks for (auto, symmetric, nccl), on all ranks of `group` alike.

    Raises RuntimeError where it asks for symmetric memory, and that cannot be had.
    """
    assert group is not None
    if collectives == "nccl":
        return Direct()
    symmetric, reason = open_symmetric(rank, size, device, store, group)
    if symmetric is None and collectives == "symmetric":
        raise RuntimeError(f"--collectives symmetric: {reason}; choose auto or nccl")
    log.info("collectives over %s", "symmetric memory" if symmetric else f"NCCL alone: {reason}")
    return symmetric or Direct()


def open_symmetric(
    rank: int,
    size: int,
    device: torch.device,
    store: dist.Store,
    group: dist.ProcessGroup,
    layout: Layout | None = None,
) -> tuple[Symmetric | None, str]:
    """Take memory on all ranks of `group`, which call this together, and try it out.

    Returns None and the reason, the same on every rank, where one of them cannot. `store`: where
    ranks say so. Never uses NVLink multicast.
    """
    agree = Agreement(store, rank, size)
    # Read when the memory is taken; harmless where the user has said so too.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    facts = agree.exchange(f"{socket.gethostname()} {_uuid(device)}")
    if reason := agree.on(why_not(size, device) or _unreachable(device, facts)):
        return None, reason
    memory: Tensor | None = None
    handle: Any = None
    layout = layout or Layout.of(size)

    def take() -> None:
        nonlocal memory
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(layout.nbytes, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)

    def meet() -> None:
        nonlocal handle
        from torch.distributed import _symmetric_memory

        assert memory is not None
        handle = _symmetric_memory.rendezvous(memory, group)

    for attempt in (take, meet):
        if reason := agree.on(_fault_of(attempt)):
            return None, reason
    assert memory is not None, "a rank that could not has said so"
    # A tensor may begin behind the block that was mapped.
    offsets = agree.exchange(str(memory.data_ptr() - handle.buffer_ptrs[rank]))
    addresses = [
        block + int(offset) for block, offset in zip(handle.buffer_ptrs, offsets, strict=True)
    ]
    fault = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    symmetric = Symmetric(rank, layout, memory, addresses, fault, _TRIAL_WAIT_S, (memory, handle))
    if reason := agree.on(_fault_of(lambda: _try_out(symmetric, device))):
        return None, reason
    symmetric.wait_s = WAIT_S
    return symmetric, ""


def why_not(size: int, device: torch.device) -> str:
    """Why `size` ranks cannot use symmetric memory on `device`, as far as one of them knows."""
    if size > max(CROSSOVER):
        return f"there are {size} ranks, and it serves up to {max(CROSSOVER)}"
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        return f"torch {torch.__version__} has none: {error}"
    backend = getattr(_symmetric_memory, "get_backend", lambda _: None)(device)
    if backend not in (None, "CUDA"):
        return f"TORCH_SYMMMEM names the backend {backend}; only CUDA is served"
    return ""


def survey(num_devices: int) -> str:
    """Why the GPUs that this process sees cannot all use symmetric memory; "" if they can."""
    devices = [torch.device("cuda", index) for index in range(num_devices)]
    facts = [f"here {_uuid(device)}" for device in devices]
    reasons = (why_not(2, device) or _unreachable(device, facts) for device in devices)
    return next(filter(None, reasons), "")


def _unreachable(device: torch.device, facts: Sequence[str]) -> str:
    """Why `device` cannot reach the devices of all ranks; facts: "host uuid" of each."""
    hosts = sorted({fact.split()[0] for fact in facts})
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts: {', '.join(hosts)}"
    theirs = {fact.split()[1] for fact in facts} - {_uuid(device)}
    if len(theirs) < len(facts) - 1:
        return "several ranks share a GPU"
    for index in range(torch.cuda.device_count()):
        there = torch.device("cuda", index)
        if _uuid(there) in theirs and not torch.cuda.can_device_access_peer(device, there):
            return f"{device} has no peer access to {there}"
    return ""


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _fault_of(attempt: Callable[[], None]) -> str:
    """What `attempt` raises, in one line; "" if it does not."""
    try:
        attempt()
    except (RuntimeError, triton.TritonError, ImportError, AttributeError, OSError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _try_out(symmetric: Symmetric, device: torch.device) -> None:
    """Sum known numbers by every kernel, in both halves of the memory. Raises RuntimeError."""
    layout, rank = symmetric.layout, symmetric.rank
    generator = torch.Generator().manual_seed(0)
    two_shot = (layout.one_shot_bytes // 2 + 8 * _VECTOR_BYTES,)
    for shape in 2 * [(3, 1024), two_shot]:
        numbers = torch.randn(layout.ranks, *shape, generator=generator).bfloat16()
        total = symmetric.all_reduce(numbers[rank].to(device))
        assert total is not None
        if not torch.equal(total.cpu(), ordered_sum(numbers)):
            symmetric.check()
            raise RuntimeError(f"a trial sum of {list(shape)} is wrong")
        keys = torch.randint(-(2**62), 2**62, (layout.ranks, 5), generator=generator)
        most = symmetric.max(keys[rank].to(device))
        assert most is not None
        if not torch.equal(most.cpu(), keys.amax(0)):
            symmetric.check()
            raise RuntimeError("a trial maximum is wrong")
    symmetric.check()


def _aligned(x: Tensor) -> Tensor:
    """`x` contiguous and on 16 bytes, copied where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _VECTOR_BYTES else x


def _rows_of(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What a kernel with a norm takes, aligned, and room for (the norm, the total)."""
    assert weight.dtype in (x.dtype, torch.float32), (weight.dtype, x.dtype)
    x, residual, weight = _aligned(x), _aligned(residual), _aligned(weight)
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    return (x, weight if bias is None else _aligned(bias), residual, weight), (normed, total)
