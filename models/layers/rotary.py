"""The rotary table of a model: cos and sin for every position, made once at start."""

from __future__ import annotations

from torch import Tensor

from unisono.models.config import ModelConfig
from unisono.models.interface import Build
from unisono.models.rope import rope_table


class RotaryTable:
    """cos and sin [max_model_len, rotary_dim / 2] fp32, shared by all layers."""

    def __init__(self, build: Build, config: ModelConfig, max_model_len: int) -> None:
        cos, sin = rope_table(
            config.rope, config.head_dim, max_model_len, config.max_position_embeddings
        )
        self._cos, self._sin = cos.to(build.device), sin.to(build.device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary_dim / 2] of positions [T] int64."""
        return (
            self._cos.index_select(0, positions).unsqueeze(1),
            self._sin.index_select(0, positions).unsqueeze(1),
        )
