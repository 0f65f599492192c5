"""The kinds of value that an option may have: a field's annotation, as text, names one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click

PAIRS = "tuple[tuple[int, float], ...]"
METAVARS = {
    "int": "N",
    "int | None": "N",
    "float": "X",
    "str": "TEXT",
    "tuple[int, ...]": "N,N,...",
    "tuple[str, ...]": "TEXT",
    PAIRS: "ID:X,ID:X,...",
}
"""What stands for a value in the help."""
MOST_DIGITS = 19
"""Of a whole number: those of 2^63 - 1, the largest that any option takes."""
_DIGITS = re.compile(f"[0-9]{{1,{MOST_DIGITS}}}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def whole_number(text: str) -> int | None:
    """The number that `text` writes in ASCII digits; None if it is none, or has too many of them.

    `str.isdigit` is true of digits that `int` refuses, such as ², and `int` refuses texts of
    thousands of digits.
    """
    return int(text) if _DIGITS.fullmatch(text) else None


class _Whole(click.types.IntParamType):
    """Python converts no numbers of thousands of digits, nor sums that have so many."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and len(value.strip().lstrip("+-")) > MOST_DIGITS:
            self.fail(f"{value!r} has more than {MOST_DIGITS} digits", param, ctx)
        return super().convert(value, param, ctx)


WHOLE = _Whole()
"""The click type of whole numbers that are no fields of a config."""


def _int_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _pairs(text: str) -> tuple[tuple[int, float], ...]:
    pairs = [part.split(":") for part in text.split(",")]
    return tuple((int(token), float(value)) for token, value in pairs)


CONVERTERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "tuple[int, ...]": _int_tuple,
    PAIRS: _pairs,
}
"""How the text of a command line becomes a value; ValueError where it does not."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return has_kind(value[0], "int") and has_kind(value[1], "float")


def _is_text(value: object) -> bool:
    """Whether `value` is a text that an answer can hold: not empty, no half of a surrogate pair."""
    return isinstance(value, str) and value != "" and not _SURROGATE.search(value)


def has_kind(value: object, kind: str) -> bool:
    """Whether `value` is one of `kind`."""
    match kind:
        case "int":
            return _is_int(value)
        case "int | None":
            return value is None or _is_int(value)
        case "float":
            return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "tuple[int, ...]":
            return isinstance(value, tuple) and all(map(_is_int, value))
        case "tuple[tuple[int, float], ...]":
            return isinstance(value, tuple) and all(map(_is_pair, value))
        case "tuple[str, ...]":
            return isinstance(value, tuple) and all(map(_is_text, value))
    raise AssertionError(f"no option can have the type {kind}")


def describe_kind(kind: str) -> str:
    """Say what is expected, for a message."""
    names = {
        "int": "a whole number",
        "int | None": "a whole number",
        "float": "a number",
        "str": "text",
        "bool": "True or False",
        "tuple[int, ...]": "whole numbers separated by commas (in Python a tuple of them)",
        PAIRS: "pairs of a token id and a number",
        "tuple[str, ...]": "a tuple of texts that are not empty",
    }
    return names[kind]
