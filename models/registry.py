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

    architectures: tuple[str, ...]
    """What config.json lists under `architectures`: one of these."""
    gguf: str | None = None
    """What a GGUF file calls `general.architecture`; None: such files are not read."""
    target: str
    """The torch model, as "module:Class"."""
    model_types: tuple[str, ...] = ()
    """Other values of `model_type` that mean the same."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that its checkpoints hold and no rank reads."""


_HYBRID = "unisono.models.hybrid:Hybrid"
_IMAGES = ("model.visual.*", "visual.*")
"""Of a checkpoint that can see; text is read without."""
_DRAFTER = "mtp.*"
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architectures=("LlamaForCausalLM",), gguf="llama", target="unisono.models.llama:Llama"
    ),
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM",), gguf="qwen2", target="unisono.models.llama:Llama"
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",), gguf="qwen3", target="unisono.models.llama:Llama"
    ),
    "qwen3_moe": Family(architectures=("Qwen3MoeForCausalLM",), target=_HYBRID),
    "qwen3_next": Family(
        architectures=("Qwen3NextForCausalLM",), target=_HYBRID, ignored=(_DRAFTER,)
    ),
    "qwen3_5": Family(
        architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        target=_HYBRID,
        model_types=("qwen3_5_text",),
        ignored=(_DRAFTER, *_IMAGES),
    ),
    "qwen3_5_moe": Family(
        architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        target=_HYBRID,
        model_types=("qwen3_5_moe_text",),
        ignored=(_DRAFTER, *_IMAGES),
    ),
}
"""Keys are the `model_type` of config.json."""


def family_of(model_type: str | None, architectures: Sequence[str], where: str) -> str:
    """Return the family that config.json at `where` names.

    `model_type` decides; the architectures, where listed, must agree with it. Raises ConfigError
    naming what is not supported and what is.
    """
    named = [key for key, family in FAMILIES.items() if {*family.architectures} & {*architectures}]
    if model_type is None:
        model_type = named[0] if named else None
    for key, family in FAMILIES.items():
        if model_type == key or model_type in family.model_types:
            break
    else:
        what = f"model_type {model_type!r}" if model_type else f"architectures {[*architectures]}"
        raise ConfigError(f"{where}: {what} is not supported; legal: {', '.join(FAMILIES)}")
    if architectures and key not in named:
        raise ConfigError(
            f"{where}: architectures {[*architectures]} is not supported for model_type "
            f"{model_type!r}; legal: {', '.join(family.architectures)}"
        )
    return key


def family_of_gguf(architecture: object, where: str) -> str:
    """Return the family of a GGUF file's `general.architecture`. Raises ConfigError."""
    legal = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
    if isinstance(architecture, str) and architecture in legal:
        return legal[architecture]
    raise ConfigError(
        f"{where}: architecture {architecture!r} is not supported; legal: {', '.join(legal)}"
    )


def model_class(family: str) -> type:
    """Import and return the torch model class of `family`. Raises ConfigError if unknown."""
    if family not in FAMILIES:
        raise ConfigError(f"model family {family!r} is not supported; legal: {', '.join(FAMILIES)}")
    module, name = FAMILIES[family].target.split(":")
    return getattr(importlib.import_module(module), name)
