"""Which tensors of a model are replaced by random ones (`--overlay`). Torch-free."""

from __future__ import annotations

from unisono.models.config import ConfigError, ModelConfig

_RANDOM = "random"


def overlay_parts(model: ModelConfig) -> tuple[str, ...]:
    """The parts of `model` that an overlay can replace."""
    parts = ["norm"]
    if model.qkv_bias or model.o_bias or model.mlp_bias:
        parts.append("bias")
    if model.qk_norm:
        parts.append("qk-norm")
    return tuple(sorted(parts))


def parse_overlay(text: str, model: ModelConfig) -> frozenset[str]:
    """Return the parts that "bias=random,norm=random" names; none for an empty text.

    Raises ConfigError for what is no such list, and for parts that `model` does not have.
    """
    parts: set[str] = set()
    for entry in text.split(",") if text else ():
        part, _, value = entry.partition("=")
        if part not in overlay_parts(model) or value != _RANDOM or part in parts:
            legal = ",".join(f"{each}={_RANDOM}" for each in overlay_parts(model))
            raise ConfigError(
                f"--overlay {text}: {entry!r} is not a part of this model with its value, given "
                f"once; legal for this model: {legal}"
            )
        parts.add(part)
    return frozenset(parts)


def overlay_part_of(name: str) -> str:
    """The part that tensor `name` belongs to; "" for embedding, head and projections."""
    if name.endswith(".bias"):
        return "bias"
    if name.endswith((".q_norm.weight", ".k_norm.weight")):
        return "qk-norm"
    return "norm" if "norm" in name.removesuffix(".weight").rpartition(".")[2] else ""
