"""What a checkpoint holds and where: headers only, no tensor is read. Torch-free.

A safetensors file is 8 bytes of header length (little-endian), a JSON object
{name: {dtype, shape, data_offsets}} and the data that it describes without a gap. Everything
that can be wrong with such files is found here, before memory is taken for the weights.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeGuard

from unisono.models.gguf import open_gguf
from unisono.models.partition import ModelPartition
from unisono.models.registry import FAMILIES, FURTHER_MTP_LAYERS, MTP_TENSORS
from unisono.models.tensor_info import CheckpointError, TensorInfo

INDEX = "model.safetensors.index.json"
IGNORED = ("*.rotary_emb.inv_freq", "rope_freqs.weight")
"""Tensors no rank reads: rotary frequencies, which are computed from the configuration."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
_NOT_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2")
_MAX_HEADER = 100_000_000
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_FUSED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint at `path` (a directory or a GGUF file) by name.

    Names are those of the transformers model ("model.layers.0..."), whatever the file calls them,
    with experts one by one where the file has them all in one tensor. Raises CheckpointError
    naming the file and, where there is one, the tensor.
    """
    if not path.is_dir():
        with open_gguf(path) as gguf:
            return dict(gguf.tensors)
    index = path / INDEX
    files = _files_of_index(index) if index.exists() else _files_without_index(path)
    places = _read_weight_map(index) if index.exists() else {}
    found: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_safetensors_header(file).items():
            if places.get(name, file.name) != file.name:
                continue
            if name in found:
                raise CheckpointError(f"{file}: tensor {name} is also in {found[name].file.name}")
            found[name] = info
    for name, place in places.items():
        if name not in found:
            raise CheckpointError(
                f"{path / place}: holds no tensor {name}, which {INDEX} places there"
            )
    return _with_experts_apart(_with_usual_prefix(found))


def has_safetensors(directory: Path) -> bool:
    """Whether there is anything for `read_headers` to read."""
    return (directory / INDEX).exists() or any(directory.glob("*.safetensors"))


def read_safetensors_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file, checked against its size. CheckpointError."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{file}: damaged or truncated: a header of {length} bytes in a file of {size}"
                )
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except _DuplicateName as error:
        raise CheckpointError(f"{file}: tensor {error} is in the header twice") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    tensors = {name: _read_entry(file, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(file, tensors.values(), 8 + length, size)
    # A tensor that shares its bytes with another is stored once, the other name in the metadata.
    for name, kept in metadata.items() if isinstance(metadata, dict) else ():
        if name not in tensors and isinstance(kept, str) and kept in tensors:
            tensors[name] = replace(tensors[kept], name=name)
    return tensors


def check_weights(
    headers: Mapping[str, TensorInfo],
    partition: ModelPartition,
    ignored: Iterable[str] = IGNORED,
) -> tuple[str, ...]:
    """Check that the checkpoint holds exactly what the ranks read; return the ignored names.

    `ignored` are patterns ("*" for anything); ignored too are those of the family, and the head of
    a model whose embedding is the head. Raises CheckpointError listing missing, unused and
    misshapen tensors.
    """
    config = partition.config
    # Every rank reads the same tensors, each its own part: one rank names them all.
    wanted = {spec.name: spec.shape for spec in partition.weights(0)}
    patterns = (*ignored, *FAMILIES[config.family].ignored)
    if partition.drafts:
        # What is not known of a drafter, left out, might cost every draft.
        patterns = tuple(FURTHER_MTP_LAYERS if each == MTP_TENSORS else each for each in patterns)
    if config.tie_word_embeddings:
        patterns += ("lm_head.weight",)
    spare = [name for name in headers if name not in wanted]
    passed = [name for name in spare if any(fnmatchcase(name, p) for p in patterns)]
    orphans = [name for name in spare if name not in set(passed)]
    missing = [name for name in wanted if name not in headers]
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: {_some(missing)}")
    if orphans:
        faults.append(f"{len(orphans)} not used by {config.family}: {_some(orphans)}")
    for name, shape in wanted.items():
        info = headers.get(name)
        if info and info.shape != shape:
            faults.append(f"{name} has shape {[*info.shape]}, the configuration says {[*shape]}")
        elif info and info.dtype in _NOT_WEIGHTS:
            faults.append(f"{name} is stored as {info.dtype}; legal: F32, BF16, F16, F64")
    if faults:
        more = f"; and {len(faults) - 3} more faults" if len(faults) > 3 else ""
        files = [*dict.fromkeys(info.file for info in headers.values())]
        where = "checkpoint" if not files else files[0] if len(files) == 1 else files[0].parent
        raise CheckpointError(f"{where}: tensors: {'; '.join(faults[:3])}{more}")
    return tuple(passed)


def group_ignored(names: Iterable[str]) -> dict[str, int]:
    """How many of the ignored names there are of each kind, the most first: a prefix, which ends
    with a dot, or another pattern, or the name itself."""
    known = dict.fromkeys((*IGNORED, *(p for each in FAMILIES.values() for p in each.ignored)))
    kinds = (next((p for p in known if fnmatchcase(name, p)), name) for name in names)
    return dict(Counter(kind.removesuffix("*") for kind in kinds).most_common())


def describe_ignored(groups: Mapping[str, int]) -> str:
    """What `group_ignored` found, in words."""
    words = [
        f"{count} {'under' if kind.endswith('.') else 'named'} {kind}"
        for kind, count in groups.items()
    ]
    first = next(iter(groups.values()), 0)
    return ", ".join(words).replace(" ", " tensor " if first == 1 else " tensors ", 1)


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes; reads up to both."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if (one.file, one.start) == (other.file, other.start):
        return True
    chunk, length = 1 << 22, one.stop - one.start
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for done in range(0, length, chunk):
            count = min(chunk, length - done)
            if left.read(count) != right.read(count):
                return False
    return True


class _DuplicateName(Exception):
    """A JSON object has one key twice."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateName(next(name for name in names if names.count(name) > 1))
    return values


def _read_entry(file: Path, name: str, entry: object, data: int) -> TensorInfo:
    """One header entry; `data` is where the file's tensor bytes begin."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file}: the header entry of tensor {name} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{file}: tensor {name} has unknown dtype {dtype!r}; legal: {', '.join(DTYPE_BYTES)}"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: tensor {name} has a bad shape or bad data_offsets")
    start, stop = offsets
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if stop - start != size:
        raise CheckpointError(
            f"{file}: tensor {name} of {dtype} {shape} is {size} bytes, "
            f"its offsets say {stop - start}"
        )
    return TensorInfo(name, file, dtype, tuple(shape), data + start, data + stop)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _check_layout(file: Path, tensors: Iterable[TensorInfo], data: int, size: int) -> None:
    """The tensors must fill the file from `data` to its end, without overlap or gap."""
    end, last = data, "the header"
    for info in sorted(tensors, key=lambda info: (info.start, info.stop)):
        if info.start != end:
            what = "overlaps" if info.start < end else "leaves a gap after"
            raise CheckpointError(f"{file}: tensor {info.name} {what} {last}")
        if info.stop > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {info.name} ends at byte {info.stop}, "
                f"the file at {size}"
            )
        end, last = info.stop, f"tensor {info.name}"
    if end != size:
        raise CheckpointError(f"{file}: {size - end} bytes follow {last}, which ends the data")


def _read_weight_map(index: Path) -> dict[str, str]:
    """{tensor: file name} of an index. CheckpointError."""
    try:
        value = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not valid JSON: {error}") from None
    places = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: has no weight_map")
    for name, place in places.items():
        file = Path(place) if isinstance(place, str) else Path()
        if file.name != place or file.suffix != ".safetensors":
            raise CheckpointError(
                f"{index}: places tensor {name} in {place!r}, not a safetensors file beside it"
            )
    return places


def _files_of_index(index: Path) -> list[Path]:
    files = [index.parent / name for name in sorted(set(_read_weight_map(index).values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(
            f"{index.parent}: {len(absent)} of {len(files)} shards are missing: {_some(absent)}"
        )
    return files


def _files_without_index(directory: Path) -> list[Path]:
    """model.safetensors alone, or else every model*.safetensors that stands for a shard."""
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin"))
        found = f"; found {_some(others)}" if others else ""
        raise CheckpointError(
            f"{directory}: no model.safetensors and no {INDEX}{found}; weights are read from "
            "safetensors files only"
        )
    totals = {file.stem.rpartition("-of-")[2] for file in files}
    total = totals.pop() if len(totals) == 1 else ""
    if re.fullmatch("[0-9]{1,6}", total):
        width = len(total)
        names = [f"model-{n:0{width}}-of-{total}.safetensors" for n in range(1, int(total) + 1)]
        absent = [name for name in names if not (directory / name).exists()]
        if absent:
            raise CheckpointError(
                f"{directory}: {len(absent)} of {int(total)} shards are missing: {_some(absent)}"
            )
    return files


def _with_usual_prefix(found: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Name tensors as a plain causal model does, whatever prefix a wrapper gave them."""
    for prefix in _PREFIXES:
        if prefix + "embed_tokens.weight" in found:
            break
    else:
        return found
    if prefix == "model.":
        return found
    renamed: dict[str, TensorInfo] = {}
    for name, info in found.items():
        if name in _HEADS:
            name = "lm_head.weight"
        elif name.startswith(prefix) and not fnmatchcase(name, MTP_TENSORS):
            name = "model." + name.removeprefix(prefix)
        if name in renamed:
            raise CheckpointError(
                f"{info.file}: tensors {renamed[name].name} and {info.name} are both {name}"
            )
        renamed[name] = info
    return renamed


def _with_experts_apart(found: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Name each expert's part of a tensor that holds those of all: a part is one run of bytes.

    gate_up_proj is [experts, 2 * channels, hidden], the rows of the gate first; down_proj
    [experts, hidden, channels].
    """
    apart: dict[str, TensorInfo] = {}
    for name, info in found.items():
        match = _FUSED.fullmatch(name)
        parts = {name: info} if match is None else dict(_experts_of(match[1], match[2], info))
        for part in parts:
            if part in apart:
                raise CheckpointError(f"{info.file}: {part} is also a part of {apart[part].name}")
        apart.update(parts)
    return apart


def _experts_of(prefix: str, kind: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    if len(info.shape) != 3 or info.shape[1] % len(projections) or 0 in info.shape:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} has shape {[*info.shape]}; legal: [experts, "
            f"{'2 * channels, hidden' if kind == 'gate_up_proj' else 'hidden, channels'}]"
        )
    num_experts, rows, columns = info.shape
    shape = (rows // len(projections), columns)
    size, start = (info.stop - info.start) // (num_experts * len(projections)), info.start
    for expert in range(num_experts):
        for name in projections:
            part = replace(info, shape=shape, start=start, stop=start + size)
            yield f"{prefix}{expert}.{name}.weight", part
            start += size


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
