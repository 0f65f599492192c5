"""Qwen3-Next, Qwen3.5 and the mixtures of experts: layers of two kinds of mixer and of MLP.

A mixer is attention or, in the hybrid families, a gated delta net, whose recurrent state takes the
place of a KV cache. An MLP is one gated MLP or a mixture of experts. Which layer has which is said
by `ModelConfig`.
"""

from __future__ import annotations

from unisono.models.decoder import MLP, Decoder, DecoderLayer, Mixer
from unisono.models.interface import Build
from unisono.models.layers.attention import Attention
from unisono.models.layers.delta_net import DeltaNet
from unisono.models.layers.experts import ExpertsMLP
from unisono.models.layers.mlp import GatedMLP
from unisono.models.partition import ModelPartition


class Hybrid(Decoder):
    """One rank's part of the model."""

    def __init__(self, build: Build, partition: ModelPartition, max_model_len: int) -> None:
        layers = [_layer(build, partition, i) for i in range(partition.config.num_layers)]
        super().__init__(build, partition, max_model_len, layers)


def _layer(build: Build, partition: ModelPartition, layer: int) -> DecoderLayer:
    config = partition.config
    build = build.within(f"layers.{layer}")
    mixer: Mixer
    if config.is_delta(layer):
        name, mixer = "linear_attn", DeltaNet(build.within("delta_net"), partition)
    else:
        name, mixer = "self_attn", Attention(build.within("attention"), partition, layer)
    mlp: MLP
    if config.has_experts(layer):
        mlp = ExpertsMLP(build.within("experts"), partition)
    else:
        mlp = GatedMLP(build.within("mlp"), partition)
    return DecoderLayer(build, partition, name, mixer, mlp)
