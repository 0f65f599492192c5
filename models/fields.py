"""Typed reading of untrusted key-value data (config.json, GGUF metadata). Torch-free.

Every complaint is one line that names the file, the field, its value and the rule. The checks at
the end are those that every kind of configuration has to pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.models.config import ConfigError, ModelConfig


def shown(value: object) -> str:
    """Return `value` as one short line for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Fields:
    """`values` as they were found at `where`; each method raises ConfigError on a wrong one.

    A field that is absent takes the default; a null counts as absent only in the methods that
    return None.
    """

    values: Mapping[str, object]
    where: str

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def fault(self, name: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {shown(self.values.get(name))}; {rule}")

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`; without a default it must be there."""
        value = self.values.get(name, default)
        if name not in self.values and default is None:
            raise ConfigError(f"{self.where}: {name} is missing; it must be a whole number")
        if type(value) is not int or value < least:
            raise self.fault(name, f"it must be a whole number of at least {least}")
        return value

    def whole_or_none(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """As `whole`; an explicit null is None."""
        if self.values.get(name, default) is None:
            return None
        return self.whole(name, default, least)

    def number(self, name: str, default: float | None = None, zero: bool = False) -> float:
        """Return a finite number above 0 (`zero`: or 0); without a default it must be there."""
        value = self.values.get(name, default)
        if name not in self.values and default is None:
            raise ConfigError(f"{self.where}: {name} is missing; it must be a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, "it must be a number")
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise self.fault(name, f"it must be a finite number {'from' if zero else 'above'} 0")
        return float(value)

    def number_or_none(self, name: str, zero: bool = False) -> float | None:
        """As `number`; None where it is absent or null."""
        return None if self.values.get(name) is None else self.number(name, zero=zero)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(isinstance(x, bool) or not isinstance(x, int | float) for x in value)
            or not all(math.isfinite(x) and x > 0 for x in value)
        ):
            raise self.fault(name, f"it must be a list of {count} numbers above 0")
        return tuple(float(x) for x in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "it must be true or false")
        return value

    def flag_or_none(self, name: str) -> bool | None:
        """As `flag`; None where it is absent or null."""
        return None if self.values.get(name) is None else self.flag(name, False)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a string; None where it is null, or absent without a default."""
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, str):
            raise self.fault(name, "it must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings; None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.fault(name, "it must be a list of strings")
        return tuple(value)

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers of at least 0; empty where it is absent or null."""
        value = self.values.get(name)
        found = [] if value is None else value
        if not isinstance(found, list) or any(type(x) is not int or x < 0 for x in found):
            raise self.fault(name, "it must be a list of whole numbers")
        return tuple(found)

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return an object; empty where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.fault(name, "it must be an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field that is one id, a list of ids, null or absent.

        Negative ids, which some checkpoints write for "none", are left out.
        """
        value = self.values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        ids = [x for x in found if isinstance(x, int) and not isinstance(x, bool)]
        if len(ids) < len(found):
            raise self.fault(name, "it must be a token id or a list of token ids")
        return tuple(x for x in ids if x >= 0)


def check_config(config: ModelConfig, where: str) -> ModelConfig:
    """Return `config` if its sizes fit each other, else raise ConfigError naming them."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{where}: {config.num_heads} attention heads do not divide into "
            f"{config.num_kv_heads} key/value heads; the second must divide the first"
        )
    rope, least = config.rope, 4 if config.rope.rope_type == "dynamic" else 2
    if rope.rotary_dim % 2 or not least <= rope.rotary_dim <= config.head_dim:
        raise ConfigError(
            f"{where}: {rope.rotary_dim} rotary channels of head_dim {config.head_dim}; they must "
            f"be even, at least {least} and at most head_dim"
        )
    return config


def head_dim_of(fields: Fields, name: str, hidden_size: int, num_heads: int) -> int:
    """Return field `name`, or hidden_size / num_heads where it is absent or null."""
    head_dim = fields.whole_or_none(name)
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ConfigError(
            f"{fields.where}: hidden size {hidden_size} is not a multiple of {num_heads} attention "
            f"heads and there is no {name}"
        )
    return hidden_size // num_heads
