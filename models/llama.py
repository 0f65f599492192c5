"""The llama decoder: every layer is attention and a gated MLP.

Serves llama, qwen2 (bias on q, k, v) and qwen3 (a norm on each head of q and k before the
rotation): their differences are fields of `ModelConfig`, set by the family's defaults.
"""

from __future__ import annotations

from unisono.models.decoder import Decoder, DecoderLayer
from unisono.models.interface import Build
from unisono.models.layers.attention import Attention
from unisono.models.layers.mlp import GatedMLP
from unisono.models.partition import ModelPartition


class Llama(Decoder):
    """One rank's part of the model."""

    def __init__(self, build: Build, partition: ModelPartition, max_model_len: int) -> None:
        layers = [_layer(build, partition, i) for i in range(partition.config.num_layers)]
        super().__init__(build, partition, max_model_len, layers)


def _layer(build: Build, partition: ModelPartition, layer: int) -> DecoderLayer:
    build = build.within(f"layers.{layer}")
    mixer = Attention(build.within("attention"), partition, layer)
    mlp = GatedMLP(build.within("mlp"), partition)
    return DecoderLayer(build, partition, "self_attn", mixer, mlp)
