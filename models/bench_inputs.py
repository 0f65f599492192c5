"""The sizes that `unisono bench ops` takes steps of, and the numbers its cases read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.models.config import ModelConfig
from unisono.ops.attention import PAGE
from unisono.ops.table import Ops
from unisono.ops.timing import Call

COLD_BYTES = 160 << 20
"""Bytes that pass between two reads of a weight: three times the cache of an H200, and more than a
core of most CPUs reaches."""
_ONCE = 1 << 24
"""Numbers of the noise that are drawn; then they come again, for a CPU draws slowly."""
NUM_PARTS = 2
"""Parts of an ordered sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the steps are that the cases are taken from."""

    linear_rows: tuple[int, ...]
    head_rows: tuple[int, ...]
    tokens: tuple[int, ...]
    logit_rows: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    """(keys of a request, requests)."""
    verify: tuple[tuple[int, int, int], ...]
    """(queries of a request, its keys, requests)."""
    prefill: tuple[int, ...]
    most_experts: int = 1 << 30
    """Of a mixture with more, so many are timed."""
    cold_bytes: int = 0
    least_copies: int = 1


GPU_SIZES = Sizes(
    linear_rows=(1, 2, 4, 8, 16, 32, 48, 63, 64, 128, 512, 4096),
    head_rows=(1, 2, 4, 8, 16, 32, 48, 63, 64, 128),
    tokens=(1, 64, 8192),
    logit_rows=(1, 64, 128),
    decode=((8192, 32), (1024, 1), (8192, 1), (512, 128)),
    verify=((5, 8192, 32),),
    prefill=(4096, 32768),
    cold_bytes=COLD_BYTES,
    least_copies=2,
)
CPU_SIZES = Sizes(
    linear_rows=(1, 2, 4, 8, 16, 32, 64, 128),
    head_rows=(1, 8),
    tokens=(1, 64),
    logit_rows=(1, 8),
    decode=((1024, 1), (512, 8)),
    verify=((5, 512, 4),),
    prefill=(512,),
    most_experts=16,
    cold_bytes=COLD_BYTES,
)


class Inputs:
    """Noise on a device, of which every case takes what it reads."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device, self.dtype, self._sizes = device, dtype, sizes
        most = max(_most_bytes(config, sizes, dtype.itemsize) for config in configs)
        count = most // dtype.itemsize
        generator = torch.Generator(device).manual_seed(0)
        once = torch.randn(min(count, _ONCE), dtype=dtype, device=device, generator=generator)
        self._noise = once.repeat(-(-count // _ONCE))[:count]

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers to be read only: different calls may give the same memory."""
        # Two bf16 numbers are an fp32 number about as large as the second.
        whole = self._noise if dtype is None else self._noise.view(dtype)
        return whole[: torch.Size(shape).numel()].view(shape)

    def copies(self, *shape: int) -> list[Tensor]:
        """Tensors that together do not fit the cache, side by side."""
        count = self.num_copies(torch.Size(shape).numel() * self.dtype.itemsize)
        return list(self.noise(count, *shape))

    def num_copies(self, num_bytes: int) -> int:
        """How many inputs of this size are read in turn."""
        return max(self._sizes.least_copies, -(-self._sizes.cold_bytes // num_bytes))

    def are_cold(self, calls: Sequence[Call], num_bytes: int) -> bool:
        """Whether calls that each move so much, made in turn, find nothing in a cache."""
        # Of small steps a GPU's floor is below any launch, whatever its cache holds.
        return self.device.type == "cuda" or len(calls) * num_bytes >= self._sizes.cold_bytes

    def ids(self, *shape: int, below: int) -> Tensor:
        """Random int64 numbers."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(below, shape, generator=generator).to(self.device)

    def words(self) -> Tensor:
        """All the noise, as fp32."""
        return self._noise.view(torch.float32)

    def give_memory_back(self) -> None:
        """What graphs held stays reserved until it is asked for."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def full(self, rows: int, value: float) -> Tensor:
        """[rows] fp64."""
        return torch.full((rows,), value, dtype=torch.float64, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    op: str
    """One of `TIMED_OPS` (`workers/timings.py`)."""
    label: str
    num_bytes: int
    """What has to be read and written, once each."""
    num_flops: int = 0
    """Of matrix products; 0 where memory alone counts."""
    ours: Callable[[Inputs, Ops], Sequence[Call]]
    """Calls to time in turn, on inputs that are not in the cache."""
    torch: Callable[[Inputs], Sequence[Call]] | None = None
    """The same of torch alone; made before anything of ours is."""
    on_host: bool = False
    """It is the host's time that counts, and nothing is captured."""


def _most_bytes(config: ModelConfig, sizes: Sizes, item: int) -> int:
    """The most that a case takes of the noise."""
    weight = config.vocab_size * config.hidden_size
    weight = max(weight, 2 * config.intermediate_size * config.hidden_size)
    token = max(config.hidden_size, 2 * config.intermediate_size, 3 * config.num_heads * 256)
    spans = [keys * rows for keys, rows in sizes.decode] + list(sizes.prefill)
    spans += [keys * rows for _, keys, rows in sizes.verify]
    pages = (max(spans) + PAGE * max(rows for _, rows in sizes.decode)) * config.num_kv_heads
    most_tokens = max(*sizes.tokens, *sizes.linear_rows, *sizes.prefill)
    needs = (
        max(sizes.cold_bytes, (sizes.least_copies - 1) * weight * item) + weight * item,
        2 * (sizes.cold_bytes + sizes.least_copies * pages * config.head_dim * item),
        (NUM_PARTS + 1) * most_tokens * token * item,
        max(sizes.logit_rows) * config.vocab_size * 4,
        *_hybrid_bytes(config, sizes, most_tokens, item),
    )
    return -(-max(needs) // 16) * 16


def _hybrid_bytes(config: ModelConfig, sizes: Sizes, most_tokens: int, item: int) -> Iterator[int]:
    if delta := config.delta:
        most_rows = max(count * rows for count, _, rows in sizes.verify)
        yield 2 * max(most_tokens, most_rows) * delta.conv_channels * item
    if experts := config.experts:
        num = min(experts.num_experts, sizes.most_experts)
        yield num * 2 * experts.width * config.hidden_size * item
        yield most_tokens * experts.num_experts * item
