"""From frozen dataclasses to msgpack and JSON and back, strictly by their type hints. Torch-free.

A class is compiled once into a pair of closures. Supported hints: bool, int, float, str,
`array[int]`, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `Literal[...]` and frozen dataclasses of
these. What does not fit raises ProtocolError; nothing is coerced except an int given as a float.

On the wire an array leaves only its length in the body, and its bytes are a frame of their own; an
empty one leaves its typecode.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
import typing
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgpack

T = TypeVar("T")

VERSION = 3
"""Of the wire. Both sides come from one installation; the number guards against a mix."""
_TYPECODES = "bBhHiIqQ"
"""Array item types of the same width everywhere."""


class ProtocolError(Exception):
    """A message, or a line of orders, that is not what the other side agreed to send."""


class Header(NamedTuple):
    """First frame of a message, as a msgpack list."""

    version: int
    session: str
    sequence: int
    type_name: str
    typecodes: str
    """One letter per array frame, as in the `array` module."""


def to_plain(obj: object) -> dict[str, Any]:
    """Return a frozen dataclass as dicts, lists, numbers and strings. Raises ProtocolError."""
    plain: dict[str, Any] = _codec(type(obj)).encode(obj, None)
    return plain


def from_plain(cls: type[T], data: object) -> T:
    """Build `cls` from what `to_plain` returned. Raises ProtocolError naming the field."""
    obj: T = _codec(cls).decode(data, None)
    return obj


def to_json(obj: object) -> str:
    """Return a frozen dataclass as one line of JSON, arrays as lists. Raises ProtocolError."""
    return json.dumps(to_plain(obj), separators=(",", ":"))


def from_json(cls: type[T], text: str | bytes) -> T:
    """Build `cls` from `to_json`'s line. Raises ProtocolError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{cls.__name__}: not JSON: {error}") from None
    return from_plain(cls, data)


def encode_message(message: object, session: str, sequence: int) -> list[bytes]:
    """Return the frames of one message: header, body, then one per array that is not empty."""
    cls: Any = type(message)
    arrays: list[array[int]] = []
    body = _codec(cls).encode(message, arrays)
    typecodes = "".join([item.typecode for item in arrays])
    try:
        frames = [
            _pack((VERSION, session, sequence, cls.__name__, typecodes)),
            _pack(body),
        ]
    except (OverflowError, ValueError) as error:
        raise ProtocolError(f"{cls.__name__}: {error}") from None
    frames += [_little_endian(item).tobytes() for item in arrays]
    return frames


def decode_header(frames: Sequence[bytes]) -> Header:
    """Read the header of a message. Raises ProtocolError."""
    if len(frames) < 2:
        raise ProtocolError(f"{len(frames)} frames; a message has a header and a body")
    fields = _unpack(frames[0], "header")
    if type(fields) is not list or [type(field) for field in fields] != [int, str, int, str, str]:
        raise ProtocolError("the header is not [version, session, sequence, type, typecodes]")
    return Header(*fields)


def decode_message(header: Header, frames: Sequence[bytes], cls: type[T]) -> T:
    """Build `cls` from the frames of a message whose header was read. Raises ProtocolError."""
    if len(header.typecodes) != len(frames) - 2:
        raise ProtocolError(
            f"{cls.__name__}: {len(header.typecodes)} arrays announced, {len(frames) - 2} sent"
        )
    arrays = iter([_read_array(*pair) for pair in zip(header.typecodes, frames[2:], strict=True)])
    obj: T = _codec(cls).decode(_unpack(frames[1], "body"), arrays)
    if next(arrays, None) is not None:
        raise ProtocolError(f"{cls.__name__}: more arrays than it has fields")
    return obj


class _Array(Generic[T]):
    """Stands for `array` while hints are evaluated: `array[int]` is an error before Python 3.12."""


_Encode = Callable[[Any, "list[array[int]] | None"], Any]
_Decode = Callable[[Any, "Iterator[array[int]] | None"], Any]


class _Codec(NamedTuple):
    """Both directions of one type. The second argument is None where arrays become lists."""

    encode: _Encode
    decode: _Decode


def _codec(hint: Any) -> _Codec:
    return _compiled(hint)


@functools.cache
def _compiled(hint: Any) -> _Codec:
    if hint is float:
        return _Codec(_encode_float, _scalar(float).decode)
    if hint in (bool, int, str):
        return _scalar(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_codec(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is _Array and arguments == (int,):
        return _Codec(_encode_array, _decode_array)
    if origin is Literal:
        return _literal_codec(arguments)
    if origin is tuple and arguments:
        return _tuple_codec(arguments)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2:
        inner = [item for item in arguments if item is not types.NoneType]
        if len(inner) == 1:
            return _optional_codec(_codec(inner[0]))
    raise TypeError(f"{hint!r} cannot travel on the wire")


def _wants(what: str, value: object) -> ProtocolError:
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ProtocolError(f"wants {what}, got {type(value).__name__} {shown}")


def _scalar(kind: type) -> _Codec:
    def check(value: Any, _: object) -> Any:
        if type(value) is not kind:
            raise _wants(kind.__name__, value)
        return value

    return _Codec(check, check)


def _encode_float(value: Any, _: object) -> float:
    if type(value) is not float and type(value) is not int:
        raise _wants("float", value)
    return float(value)


def _literal_codec(choices: tuple[Any, ...]) -> _Codec:
    legal = {(type(choice), choice) for choice in choices}

    def check(value: Any, _: object) -> Any:
        if type(value) not in (bool, int, str) or (type(value), value) not in legal:
            raise _wants(f"one of {', '.join(map(repr, choices))}", value)
        return value

    return _Codec(check, check)


def _optional_codec(inner: _Codec) -> _Codec:
    def encode(value: Any, arrays: list[array[int]] | None) -> Any:
        return None if value is None else inner.encode(value, arrays)

    def decode(value: Any, arrays: Iterator[array[int]] | None) -> Any:
        return None if value is None else inner.decode(value, arrays)

    return _Codec(encode, decode)


def _tuple_codec(arguments: tuple[Any, ...]) -> _Codec:
    repeated = len(arguments) == 2 and arguments[1] is Ellipsis
    items = [_codec(argument) for argument in (arguments[:1] if repeated else arguments)]

    def matched(values: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> list[_Codec]:
        if not isinstance(values, kind) or not (repeated or len(values) == len(items)):
            raise _wants("a list" if repeated else f"a list of {len(items)}", values)
        return items * len(values) if repeated else items

    def encode(values: Any, arrays: list[array[int]] | None) -> list[Any]:
        codecs = matched(values, tuple)
        return [codec.encode(v, arrays) for codec, v in zip(codecs, values, strict=True)]

    def decode(values: Any, arrays: Iterator[array[int]] | None) -> tuple[Any, ...]:
        codecs = matched(values, list)
        return tuple([codec.decode(v, arrays) for codec, v in zip(codecs, values, strict=True)])

    return _Codec(encode, decode)


def _dataclass_codec(cls: Any) -> _Codec:
    if not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} is not frozen: it cannot travel on the wire")
    hints = typing.get_type_hints(cls, localns={"array": _Array})
    title = cls.__name__
    names = tuple(field.name for field in dataclasses.fields(cls))
    encoders = tuple((name, _codec(hints[name]).encode) for name in names)
    decoders = tuple((name, _codec(hints[name]).decode) for name in names)

    def encode(value: Any, arrays: list[array[int]] | None) -> dict[str, Any]:
        if type(value) is not cls:
            raise _wants(title, value)
        plain = {}
        try:
            for name, convert in encoders:
                plain[name] = convert(getattr(value, name), arrays)
        except ProtocolError as error:
            raise ProtocolError(f"{title}.{name}: {error}") from None
        return plain

    def decode(data: Any, arrays: Iterator[array[int]] | None) -> Any:
        if type(data) is not dict:
            raise _wants(title, data)
        values = {}
        try:
            for name, convert in decoders:
                values[name] = convert(data[name], arrays)
        except ProtocolError as error:
            raise ProtocolError(f"{title}.{name}: {error}") from None
        except KeyError:
            raise ProtocolError(f"{title}: field {name!r} is missing") from None
        if len(data) != len(values):
            unknown = ", ".join(sorted(repr(key) for key in data if key not in values))
            raise ProtocolError(f"{title}: unknown field {unknown}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ProtocolError(f"{title}: {error}") from None

    return _Codec(encode, decode)


def _encode_array(value: Any, arrays: list[array[int]] | None) -> Any:
    if type(value) is not array or value.typecode not in _TYPECODES:
        raise _wants(f"an integer array of type {', '.join(_TYPECODES)}", value)
    if arrays is None:
        return value.tolist()
    if not value:  # most arrays of most plans; a frame costs a microsecond on either side
        return value.typecode
    arrays.append(value)
    return len(value)


def _decode_array(value: Any, arrays: Iterator[array[int]] | None) -> array[int]:
    if arrays is None:
        return _array_of_list(value)
    if type(value) is str and len(value) == 1:
        return _read_array(value, b"")
    items = next(arrays, None)
    if items is None:
        raise ProtocolError("its array is missing")
    if type(value) is not int or value != len(items):
        raise ProtocolError(f"{value!r} items announced, {len(items)} sent")
    return items


def _array_of_list(values: Any) -> array[int]:
    if type(values) is not list or any(type(value) is not int for value in values):
        raise _wants("a list of int", values)
    for typecode in "iqQ":
        try:
            return array(typecode, values)
        except OverflowError:
            continue
    raise _wants("a list of int of 64 bits", values)


def _read_array(typecode: str, raw: bytes) -> array[int]:
    if typecode not in _TYPECODES:
        raise ProtocolError(f"arrays have one of the types {', '.join(_TYPECODES)}: {typecode!r}")
    items: array[int] = array(typecode)
    if len(raw) % items.itemsize:
        raise ProtocolError(f"{len(raw)} bytes are not whole items of {items.itemsize} bytes")
    items.frombytes(raw)
    return _little_endian(items)


def _little_endian(items: array[int]) -> array[int]:
    if sys.byteorder == "little" or items.itemsize == 1:
        return items
    swapped = items[:]
    swapped.byteswap()
    return swapped


def _pack(value: object) -> bytes:
    # File names in messages may hold undecodable bytes, which Python keeps as lone surrogates.
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpack(raw: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(raw, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"the {what} is not msgpack: {error}") from None
