"""Reads the part of each tensor that one rank needs, and no other byte of it.

Files are mapped, so only the pages of the requested rows or columns are touched. safetensors
keep their stored dtype; GGUF blocks become float32.
"""

from __future__ import annotations

import mmap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from unisono.models.gguf import GgufFile, open_gguf
from unisono.models.headers import DTYPE_BYTES, read_headers
from unisono.models.tensor_info import CheckpointError, TensorInfo
from unisono.models.weight_specs import WeightSpec

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_UNPACK_ELEMENTS = 1 << 19
"""Elements unpacked at a time: 2 MB of float32 stay in the cache until they are copied."""


class Checkpoint(ABC):
    """An open checkpoint; valid inside `open_checkpoint` only."""

    def __init__(self, headers: Mapping[str, TensorInfo]) -> None:
        self.headers = headers
        self.bytes_read = 0
        """Stored bytes that `read` and `copy_into` have taken so far."""

    @property
    def names(self) -> Collection[str]:
        return self.headers.keys()

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which tensor `name` is read."""

    @abstractmethod
    def nbytes(self, spec: WeightSpec) -> int:
        """Return the stored bytes that reading `spec` takes."""

    @abstractmethod
    def _copy(self, spec: WeightSpec, target: torch.Tensor) -> None:
        """Write a part that is one range."""

    def read(self, spec: WeightSpec) -> torch.Tensor:
        """Return `spec`'s part in memory of its own: CPU, `spec.local_shape`, `dtype_of` it.

        Raises CheckpointError where the tensor is missing or has another shape.
        """
        self._find(spec)
        target = torch.empty(spec.local_shape, dtype=self.dtype_of(spec.name))
        self.copy_into(spec, target)
        return target

    def copy_into(self, spec: WeightSpec, target: torch.Tensor) -> None:
        """Write `spec`'s part into `target` (`spec.local_shape`, any floating dtype and device).

        Raises CheckpointError where the tensor is missing or a shape differs.
        """
        self._find(spec)
        if target.shape != spec.local_shape:
            raise CheckpointError(
                f"{spec.name}: its part has shape {[*spec.local_shape]}, the target has "
                f"{[*target.shape]}"
            )
        with torch.no_grad():
            for piece, place in spec.pieces():
                self._copy(piece, target[place])
        self.bytes_read += self.nbytes(spec)

    def _find(self, spec: WeightSpec) -> TensorInfo:
        info = self.headers.get(spec.name)
        if info is None:
            raise CheckpointError(f"{spec.name}: the checkpoint holds no such tensor")
        if info.shape != spec.shape:
            raise CheckpointError(
                f"{info.file}: tensor {spec.name} has shape {[*info.shape]}, expected "
                f"{[*spec.shape]}"
            )
        return info


class _Safetensors(Checkpoint):
    """`files`: the bytes of every file of the checkpoint."""

    def __init__(
        self, headers: Mapping[str, TensorInfo], files: Mapping[Path, torch.Tensor]
    ) -> None:
        super().__init__(headers)
        self._files = files

    def dtype_of(self, name: str) -> torch.dtype:
        info = self.headers[name]
        if info.dtype not in _TORCH_DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name} is stored as {info.dtype}; legal: "
                f"{', '.join(_TORCH_DTYPES)}"
            )
        return _TORCH_DTYPES[info.dtype]

    def nbytes(self, spec: WeightSpec) -> int:
        return spec.num_elements * DTYPE_BYTES[self._find(spec).dtype]

    def _copy(self, spec: WeightSpec, target: torch.Tensor) -> None:
        info, dtype = self.headers[spec.name], self.dtype_of(spec.name)
        start, stop = info.start, info.stop
        if spec.dim == 0:
            row = (info.stop - info.start) // spec.shape[0]
            start, stop = info.start + spec.start * row, info.start + spec.stop * row
        data = self._files[info.file][start:stop]
        if start % dtype.itemsize:
            # A header of odd length: the numbers do not lie where torch can see them as such.
            data = data.clone()
        part = data.view(dtype).view(-1, *spec.shape[1:])
        if spec.dim == 1:
            part = part[:, spec.start : spec.stop]
        target.copy_(part)


class _Gguf(Checkpoint):
    def __init__(self, gguf: GgufFile) -> None:
        super().__init__(gguf.tensors)
        self._gguf = gguf

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32

    def nbytes(self, spec: WeightSpec) -> int:
        self._find(spec)
        rows, columns = _rectangle(spec)
        return self._gguf.stored_bytes(spec.name, rows.stop - rows.start, columns)

    def _copy(self, spec: WeightSpec, target: torch.Tensor) -> None:
        rows, columns = _rectangle(spec)
        unit = self._gguf.row_unit(spec.name)
        width = max(1, spec.num_elements // len(rows))
        step = max(1, _UNPACK_ELEMENTS // (width * unit)) * unit
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            values = self._gguf.rows(spec.name, first, last, columns)
            with _no_warning():
                part = torch.from_numpy(values)
            target[first - rows.start : last - rows.start].copy_(part)


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open the checkpoint at `path`: a directory of safetensors or a GGUF file.

    Headers are checked first. Raises CheckpointError naming the file and the tensor.
    """
    with ExitStack() as stack:
        if not path.is_dir():
            yield _Gguf(stack.enter_context(open_gguf(path)))
            return
        headers = read_headers(path)
        files = {info.file for info in headers.values()}
        yield _Safetensors(headers, {file: _map_file(file) for file in files})


def _map_file(file: Path) -> torch.Tensor:
    """The bytes of `file`, uint8, mapped for reading; the mapping lives as long as the tensor."""
    try:
        with file.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    with _no_warning():
        return torch.frombuffer(data, dtype=torch.uint8)


@contextmanager
def _no_warning() -> Iterator[None]:
    """torch warns of memory that it must not write; nothing here writes it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        yield


def _rectangle(spec: WeightSpec) -> tuple[range, tuple[int, int] | None]:
    """Rows, and columns where they are cut, that `spec` reads."""
    if spec.dim == 0:
        return range(spec.start, spec.stop), None
    return range(spec.shape[0]), (spec.start, spec.stop) if spec.dim == 1 else None
