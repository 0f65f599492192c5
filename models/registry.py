"""Which families there are, by every name a checkpoint may give them. Torch-free.

One entry a family; its class is imported when a worker builds the model, not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.models.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family is named and where its torch model lies."""

    architecture: str
    """What config.json lists under `architectures`."""
    gguf: str
    """What a GGUF file calls `general.architecture`."""
    target: str
    """The torch model, as "module:Class"."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", gguf="llama", target="unisono.models.llama:Llama"
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", gguf="qwen2", target="unisono.models.llama:Llama"
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", gguf="qwen3", target="unisono.models.llama:Llama"
    ),
}
"""Keys are the `model_type` of config.json."""


def family_of(model_type: str | None, architectures: Sequence[str], where: str) -> str:
    """Return the family that config.json at `where` names.

    `model_type` decides; the architectures, where listed, must agree with it. Raises ConfigError
    naming what is not supported and what is.
    """
    named = [key for key, family in FAMILIES.items() if family.architecture in architectures]
    if model_type is None:
        model_type = named[0] if named else None
    if model_type not in FAMILIES:
        what = f"model_type {model_type!r}" if model_type else f"architectures {[*architectures]}"
        raise ConfigError(f"{where}: {what} is not supported; legal: {', '.join(FAMILIES)}")
    if architectures and model_type not in named:
        raise ConfigError(
            f"{where}: architectures {[*architectures]} is not supported for model_type "
            f"{model_type!r}; legal: {FAMILIES[model_type].architecture}"
        )
    return model_type


def family_of_gguf(architecture: object, where: str) -> str:
    """Return the family of a GGUF file's `general.architecture`. Raises ConfigError."""
    for name, family in FAMILIES.items():
        if family.gguf == architecture:
            return name
    legal = ", ".join(family.gguf for family in FAMILIES.values())
    raise ConfigError(f"{where}: architecture {architecture!r} is not supported; legal: {legal}")


def model_class(family: str) -> type:
    """Import and return the torch model class of `family`. Raises ConfigError if unknown."""
    if family not in FAMILIES:
        raise ConfigError(f"model family {family!r} is not supported; legal: {', '.join(FAMILIES)}")
    module, name = FAMILIES[family].target.split(":")
    return getattr(importlib.import_module(module), name)
