"""The lists that `unisono verify` takes: read, checked, refused with the legal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.launcher.options import option_spec
from unisono.launcher.verify_plan import AXES
from unisono.models.config import ConfigError
from unisono.workers.config import BLOCK_SIZE

T = TypeVar("T")
NUM_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user wants to have verified."""

    tps: tuple[int, ...]
    dtypes: tuple[str, ...]
    values: Mapping[str, tuple[Any, ...]]
    """By axis; the plain value is always among them."""
    seeded: bool
    full: bool
    num_prompts: int
    max_tokens: int


def read_choices(given: Mapping[str, Any]) -> Choices:
    """Turn the texts of the command line into values. Raises ConfigError."""
    max_tokens = given["max_tokens"]
    _at_least("--max-tokens", max_tokens, 1)
    readers: dict[str, Callable[[str], Any]] = {
        "batch": lambda text: _whole("--batch", text, 1, "a whole number from 1 up"),
        "chunk": _chunk,
        "prefix_cache": lambda text: _switch("--prefix-cache", text),
        "pre_empt": lambda text: _switch("--pre-empt", text),
    }
    values = {}
    for axis in AXES:
        asked = _listed(given[axis.name], readers[axis.name])
        values[axis.name] = tuple(dict.fromkeys([axis.plain, *asked]))
    return Choices(
        tps=_listed(given["tp"], option_spec("tp").parse),
        dtypes=_listed(given["dtype"], option_spec("dtype").parse),
        values=values,
        seeded=given["seeded"],
        full=given["full"],
        num_prompts=_num_prompts(given["num_prompts"], given["tokens"], max_tokens),
        max_tokens=max_tokens,
    )


def _num_prompts(asked: int | None, tokens: int | None, max_tokens: int) -> int:
    if tokens is not None:
        if asked is not None:
            raise ConfigError(
                f"--tokens {tokens}: --prompts {asked} sets the number of prompts; give one of them"
            )
        _at_least("--tokens", tokens, 1)
        return -(-tokens // max_tokens)
    if asked is None:
        return NUM_PROMPTS
    _at_least("--prompts", asked, 1)
    return asked


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} {value}: must be at least {least}")


def _listed(text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(read(part) for part in text.split(",")))


def _whole(flag: str, text: str, least: int, expected: str) -> int:
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{flag} {text}: expected {expected}")
    return int(text)


def _chunk(text: str) -> int:
    # Prompts are cut at block borders.
    expected = f"none or a whole number from {BLOCK_SIZE} up"
    return 0 if text == "none" else _whole("--chunk", text, BLOCK_SIZE, expected)


def _switch(flag: str, text: str) -> bool:
    states: Sequence[str] = ("off", "on")
    if text not in states:
        raise ConfigError(f"{flag} {text}: choose on, off or on,off")
    return text == "on"
