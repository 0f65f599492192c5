"""GGUF files: metadata, the table of tensors, and rows of them as float32. Torch-free.

Layout (little-endian): "GGUF", version, tensor count, metadata count; metadata as key, type,
value; tensors as name, dimensions (fastest first), type, offset; then aligned data. The `gguf`
library's own reader builds a numpy array per string and takes 1.9 s for a vocabulary of 49,000;
this one walks the same bytes in milliseconds and names the tensor that a damaged file breaks at.
Quantised blocks are unpacked by the library (`gguf.quants`). Numpy is imported where it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.models.fields import Fields
from unisono.models.tensor_info import CheckpointError, TensorInfo

if TYPE_CHECKING:
    import numpy
    from gguf.constants import GGMLQuantizationType

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Metadata type -> its struct code."""
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizerData:
    """The tokenizer as the file's metadata gives it, nothing derived."""

    model: str
    """gpt2 (byte-level BPE), llama (SentencePiece) and others."""
    pre: str | None
    """Name of the pre-tokenizer: smollm, qwen2, llama-bpe, ..."""
    tokens: tuple[str, ...]
    scores: tuple[float, ...] = ()
    token_types: tuple[int, ...] = ()
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    merges: tuple[str, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    add_bos_token: bool | None = None
    """None: the file does not say."""
    add_eos_token: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = None


class GgufFile:
    """An open GGUF file; valid inside `open_gguf` only."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data = data
        cursor = _Cursor(path, data)
        self.metadata: dict[str, object]
        """Scalars, strings and lists by their GGUF keys."""
        self.tensors: dict[str, TensorInfo]
        """By the name that the transformers model gives them; unknown names as they are."""
        self.metadata, self.tensors = _read_head(cursor)
        self._head_dim = _interleaved_head_dim(self.metadata, self.tensors)

    def row_unit(self, name: str) -> int:
        """Rows of tensor `name` can be read in multiples of this only: a head, or 1."""
        return self._head_dim if self._head_dim and _INTERLEAVED.fullmatch(name) else 1

    def rows(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> numpy.ndarray:
        """Return rows [start, stop) of tensor `name`, of `columns` only where given, as float32.

        Only the quantised blocks that cover them are read. start and stop are multiples of
        `row_unit`: llama files store the two rotary halves of a head interleaved, which is
        undone here. A vector is rows of one element.
        """
        from gguf.quants import dequantize

        info = self.tensors[name]
        kind, block, block_bytes = _quantisation(info.dtype)
        if len(info.shape) == 1:
            values = dequantize(self._bytes(info, 1)[0], kind)[start:stop]
            return _undo_interleave(values[:, None], self.row_unit(name))[:, 0]
        width = info.shape[1]
        first, last = columns or (0, width)
        covering = slice(first // block * block_bytes, -(-last // block) * block_bytes)
        raw = self._bytes(info, info.shape[0])[start:stop, covering]
        raw = _undo_interleave(raw, self.row_unit(name))
        if not raw.flags.c_contiguous:
            raw = raw.copy()
        skipped = first // block * block
        return dequantize(raw, kind)[:, first - skipped : last - skipped]

    def stored_bytes(self, name: str, rows: int, columns: tuple[int, int] | None = None) -> int:
        """Bytes of the file that `rows` rows of tensor `name`, or columns of them, take."""
        info = self.tensors[name]
        _, block, block_bytes = _quantisation(info.dtype)
        if len(info.shape) == 1:
            return info.stop - info.start
        first, last = columns or (0, info.shape[1])
        return rows * (-(-last // block) - first // block) * block_bytes

    def _bytes(self, info: TensorInfo, rows: int) -> numpy.ndarray:
        """The tensor as it is stored: uint8 [rows, bytes of a row], a view of the file."""
        import numpy

        count = info.stop - info.start
        flat = numpy.frombuffer(self._data, numpy.uint8, count, info.start)
        return flat.reshape(rows, count // rows)


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Open a GGUF file and check its table of tensors against its size. CheckpointError."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise CheckpointError(f"{path}: not a GGUF file, and not a checkpoint directory")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    # The views that `rows` made end with their arrays, so the mapping is left to them.
    yield GgufFile(path, data)


def read_gguf_tokenizer(path: Path) -> GgufTokenizerData:
    """Return the tokenizer that a GGUF file carries. Raises ConfigError naming a bad field."""
    with open_gguf(path) as gguf:
        fields = Fields(gguf.metadata, str(path))
    key = "tokenizer.ggml."
    tokens = fields.texts(key + "tokens")
    model = fields.text(key + "model")
    if tokens is None or model is None:
        raise CheckpointError(f"{path}: has no tokenizer ({key}model and {key}tokens)")
    scores, types = (fields.values.get(key + name) for name in ("scores", "token_type"))
    return GgufTokenizerData(
        model=model,
        pre=fields.text(key + "pre"),
        tokens=tokens,
        scores=tuple(scores) if isinstance(scores, list) else (),
        token_types=tuple(types) if isinstance(types, list) else (),
        merges=fields.texts(key + "merges") or (),
        bos_token_id=fields.whole_or_none(key + "bos_token_id", least=0),
        eos_token_id=fields.whole_or_none(key + "eos_token_id", least=0),
        eot_token_id=fields.whole_or_none(key + "eot_token_id", least=0),
        unknown_token_id=fields.whole_or_none(key + "unknown_token_id", least=0),
        padding_token_id=fields.whole_or_none(key + "padding_token_id", least=0),
        add_bos_token=fields.flag_or_none(key + "add_bos_token"),
        add_eos_token=fields.flag_or_none(key + "add_eos_token"),
        add_space_prefix=fields.flag_or_none(key + "add_space_prefix"),
        chat_template=fields.text("tokenizer.chat_template"),
    )


class _Cursor:
    """Reads the head of the file from front to back, never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 4, len(data)

    def take(self, form: struct.Struct) -> int:
        """One unsigned number."""
        start = self._advance(form.size)
        return int(form.unpack_from(self.data, start)[0])

    def text(self) -> str:
        count = self.take(_U64)
        start = self._advance(count)
        try:
            return str(self.data[start : start + count], "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: a string at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[object]:
        kind, count = self.take(_U32), self.take(_U64)
        if kind == _STRING:
            # The least a string takes is its length; so a damaged count fails before the loop.
            self._advance(8 * count)
            self.at -= 8 * count
            return [self.text() for _ in range(count)]
        return list(self._scalars(kind, count))

    def _scalars(self, kind: int, count: int) -> tuple[object, ...]:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata of unknown type {kind} at {self.at}")
        code = _SCALARS[kind]
        start = self._advance(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def _advance(self, count: int) -> int:
        start = self.at
        if count > self.size - start:
            raise CheckpointError(
                f"{self.path}: damaged or truncated: byte {start} asks for {count} more, the file "
                f"has {self.size}"
            )
        self.at += count
        return start


def _read_head(cursor: _Cursor) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    version = cursor.take(_U32)
    if version not in (2, 3):
        raise CheckpointError(
            f"{cursor.path}: GGUF version {version} is not supported; legal: 2, 3"
        )
    num_tensors, num_fields = cursor.take(_U64), cursor.take(_U64)
    metadata: dict[str, object] = {}
    for _ in range(num_fields):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata {key} is there twice")
        metadata[key] = cursor.value(cursor.take(_U32))
    if metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(f"{cursor.path}: one part of a split GGUF; merge the parts first")
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    align = Fields(metadata, str(cursor.path)).whole("general.alignment", 32)
    data = -(-cursor.at // align) * align
    tensors: dict[str, TensorInfo] = {}
    end, last = data, "the header"
    for name, shape, dtype, offset in sorted(entries, key=lambda entry: entry[3]):
        _, block, block_bytes = _quantisation(dtype)
        if not shape or shape[-1] % block:
            raise CheckpointError(
                f"{cursor.path}: tensor {name} of {dtype} has shape {[*shape]}; its rows must be "
                f"multiples of {block}"
            )
        start = data + offset
        stop = start + math.prod(shape) // block * block_bytes
        if start < end:
            raise CheckpointError(f"{cursor.path}: tensor {name} overlaps {last}")
        if stop > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: truncated: tensor {name} ends at byte {stop}, the file at "
                f"{cursor.size}"
            )
        usual = _usual_name(name)
        if usual in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name} is there twice")
        tensors[usual] = TensorInfo(name, cursor.path, dtype, shape, start, stop)
        end, last = stop, f"tensor {name}"
    return metadata, tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape in torch order, type and offset of one tensor."""
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    name, dims = cursor.text(), cursor.take(_U32)
    if dims > 4:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {dims} dimensions; legal: up to 4")
    shape = tuple(reversed([cursor.take(_U64) for _ in range(dims)]))
    kind, offset = cursor.take(_U32), cursor.take(_U64)
    dtype = next((known.name for known in GGMLQuantizationType if known == kind), str(kind))
    if dtype not in ("F32", "F16") and not hasattr(quants, dtype):
        raise CheckpointError(f"{cursor.path}: tensor {name} has type {dtype}, which is not known")
    return name, shape, dtype, offset


@cache
def _quantisation(dtype: str) -> tuple[GGMLQuantizationType, int, int]:
    """The library's own name of a stored type; elements and bytes of one block of it."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[dtype]
    return (kind, *GGML_QUANT_SIZES[kind])


def _usual_name(name: str) -> str:
    """token_embd.weight -> model.embed_tokens.weight; what is not known stays as it is."""
    stem, _, leaf = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{leaf}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{leaf}"
    return name


def _interleaved_head_dim(metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of a head whose rotary halves are interleaved; 0: as in transformers.

    Only the llama architecture is converted so, weights and biases of q and k alike.
    """
    if metadata.get("general.architecture") != "llama":
        return 0
    heads = metadata.get("llama.attention.head_count")
    query = tensors.get("model.layers.0.self_attn.q_proj.weight")
    if type(heads) is not int or heads < 1 or query is None or query.shape[0] % (2 * heads):
        return 0
    return query.shape[0] // heads


def _undo_interleave(rows: numpy.ndarray, head_dim: int) -> numpy.ndarray:
    """[heads * (half, 2), n] -> [heads * (2, half), n]; a head_dim of 1: as it is."""
    if head_dim == 1:
        return rows
    count, width = rows.shape
    halves = rows.reshape(count // head_dim, head_dim // 2, 2, width)
    return halves.swapaxes(1, 2).reshape(count, width)
