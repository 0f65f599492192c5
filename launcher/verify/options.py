"""The lists that `unisono verify` takes: read, checked, refused with the legal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from unisono.launcher.graph_options import why_no_graphs
from unisono.launcher.option_kinds import whole_number
from unisono.launcher.options import option_spec
from unisono.launcher.prompts import whole_blocks
from unisono.launcher.verify.compare import ORACLE
from unisono.launcher.verify.plan import AXES
from unisono.models.config import ConfigError
from unisono.workers.config import BLOCK_SIZE, MOST_REQUESTS, WorkerConfig

T = TypeVar("T")
NUM_PROMPTS = 8
LEAST_TOKENS = 16
"""Of an answer that can be interrupted three times: some come while an order is on its way."""
CHUNKS = (0, 64, 256)
"""What --chunk is unless the user says, as far as prompts can be longer; 0: whole prompts."""
DRAFTS = "3"
"""What --speculate adds unless the user says, where the model has a layer that drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user wants to have verified."""

    tps: tuple[int, ...]
    dtypes: tuple[str, ...]
    values: Mapping[str, tuple[Any, ...]]
    """By axis; the plain value is always among them."""
    unasked: tuple[str, ...]
    """Axes that the user did not speak of: what is there decides."""
    seeded: bool
    full: bool
    num_prompts: int
    max_tokens: int
    oracle: bool


def read_choices(given: Mapping[str, Any]) -> Choices:
    """Turn the texts of the command line into values. Raises ConfigError."""
    max_tokens = given["max_tokens"]
    _at_least("--max-tokens", max_tokens, 1)
    readers: dict[str, Callable[[str], Any]] = {
        "batch": _batch,
        "chunk": _chunk,
        "prefix_cache": lambda text: _switch("--prefix-cache", text),
        "pre_empt": lambda text: _switch("--pre-empt", text),
        "graphs": lambda text: _switch("--graphs", text),
        "speculate": option_spec("speculate").parse,
        "sleep": lambda text: _switch("--sleep", text),
        "reload": lambda text: _switch("--reload", text),
    }
    values = {}
    for axis in AXES:
        text = given[axis.name]
        asked = () if text is None else _listed(text, readers[axis.name])
        values[axis.name] = tuple(dict.fromkeys([axis.plain, *asked]))
    against = given["against"]
    if against not in (None, ORACLE):
        raise ConfigError(f"--against {against}: choose {ORACLE}")
    return Choices(
        tps=_listed(given["tp"], option_spec("tp").parse),
        dtypes=_listed(given["dtype"], option_spec("dtype").parse),
        values=values,
        unasked=tuple(axis.name for axis in AXES if given[axis.name] is None),
        seeded=given["seeded"],
        full=given["full"],
        num_prompts=_num_prompts(given["num_prompts"], given["tokens"], max_tokens),
        max_tokens=max_tokens,
        oracle=against == ORACLE,
    )


def with_defaults(choices: Choices, worker: WorkerConfig) -> Choices:
    """The same once it is known what computes: graphs and drafts are tried where there are any,
    interruptions where answers are long enough, chunks where prompts are, and pre-emption where
    there are two.

    Raises ConfigError where one was asked for and cannot be.
    """
    why = why_no_graphs(worker, "choose off")
    values = dict(choices.values)
    longest = longest_prompt(choices.max_tokens, worker.max_model_len)
    if "chunk" in choices.unasked:
        values["chunk"] = tuple(size for size in CHUNKS if whole_blocks(size) < longest)
    if "pre_empt" in choices.unasked and choices.num_prompts > 1:
        values["pre_empt"] = (False, True)
    if choices.num_prompts == 1 and True in values["pre_empt"]:
        raise ConfigError(
            "--pre-empt on: equal prompts never take a place from each other, and there is one "
            "alone; choose off, or more --prompts"
        )
    if (chunk := max(values["chunk"])) >= longest:
        raise ConfigError(
            f"--chunk {chunk}: no prompt is longer, since with --max-tokens {choices.max_tokens} "
            f"the model's limit leaves {longest} tokens; choose none or less than {longest}"
        )
    if "graphs" in choices.unasked and not why:
        values["graphs"] = (False, True)
    if "speculate" in choices.unasked and worker.model.num_mtp_layers:
        values["speculate"] = ("off", DRAFTS)
    for axis in ("sleep", "reload"):
        if choices.max_tokens < LEAST_TOKENS and True in values[axis]:
            raise ConfigError(
                f"--{axis} on: answers of --max-tokens {choices.max_tokens} have ended before the "
                f"engine hears of it; choose off, or at least {LEAST_TOKENS} tokens"
            )
        if axis in choices.unasked and choices.max_tokens >= LEAST_TOKENS:
            values[axis] = (False, True)
    if why and True in values["graphs"]:
        raise ConfigError(f"--graphs on: {why}")
    return replace(choices, values=values)


def longest_prompt(max_tokens: int, max_model_len: int) -> int:
    """Most tokens of a prompt: it leaves room for the answer, and for a token more where that
    becomes a prompt. Raises ConfigError where no prompt does."""
    longest = max_model_len - max_tokens - 1
    if longest < 1:
        raise ConfigError(
            f"--max-tokens {max_tokens}: the model's limit is {max_model_len} tokens, prompt "
            f"included; choose at most {max_model_len - 2}"
        )
    return longest


def _num_prompts(asked: int | None, tokens: int | None, max_tokens: int) -> int:
    if tokens is not None:
        if asked is not None:
            raise ConfigError(
                f"--tokens {tokens}: --prompts {asked} sets the number of prompts; give one of them"
            )
        _at_least("--tokens", tokens, 1)
        if tokens > (most := MOST_REQUESTS * max_tokens):
            raise ConfigError(
                f"--tokens {tokens}: must be at most {most}, {MOST_REQUESTS} answers of "
                f"--max-tokens {max_tokens}"
            )
        return -(-tokens // max_tokens)
    if asked is None:
        return NUM_PROMPTS
    _at_least("--prompts", asked, 1)
    if asked > MOST_REQUESTS:
        raise ConfigError(f"--prompts {asked}: must be at most {MOST_REQUESTS}")
    return asked


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} {value}: must be at least {least}")


def _listed(text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(read(part) for part in text.split(",")))


def _batch(text: str) -> int:
    number = whole_number(text)
    if not number or number > MOST_REQUESTS:
        raise ConfigError(f"--batch {text}: expected a whole number of 1 to {MOST_REQUESTS}")
    return number


def _chunk(text: str) -> int:
    # Prompts are cut at block borders.
    if text == "none":
        return 0
    number = whole_number(text)
    if number is None or number < BLOCK_SIZE:
        raise ConfigError(f"--chunk {text}: expected none or a whole number from {BLOCK_SIZE} up")
    return number


def _switch(flag: str, text: str) -> bool:
    states: Sequence[str] = ("off", "on")
    if text not in states:
        raise ConfigError(f"{flag} {text}: choose on, off or on,off")
    return text == "on"
