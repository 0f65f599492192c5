"""Qwen3-Next, Qwen3.5 and the mixtures of experts: layers of two kinds of mixer and of MLP.

A mixer is attention or, in the hybrid families, a gated delta net, whose recurrent state takes the
place of a KV cache. An MLP is one gated MLP or a mixture of experts. Which layer has which is said
by `ModelConfig`. Behind them there may be one more layer, which drafts.
"""

from __future__ import annotations

from unisono.models.decoder import Decoder
from unisono.models.decoder_layer import MLP, DecoderLayer
from unisono.models.interface import Build
from unisono.models.layers.attention import Attention
from unisono.models.layers.delta_net import DeltaNet
from unisono.models.layers.experts import ExpertsMLP
from unisono.models.layers.mlp import GatedMLP
from unisono.models.mtp import MTP
from unisono.models.partition import ModelPartition


class Hybrid(Decoder):
    """One rank's part of the model."""

    def __init__(self, build: Build, partition: ModelPartition, max_model_len: int) -> None:
        layers = [
            _layer(build.within(f"layers.{i}"), partition, i)
            for i in range(partition.config.num_layers)
        ]
        mtp = _mtp(build.within("mtp"), partition) if partition.drafts else None
        super().__init__(build, partition, max_model_len, layers, mtp)


def _layer(build: Build, partition: ModelPartition, layer: int) -> DecoderLayer:
    if not partition.config.is_delta(layer):
        return _attention_layer(build, partition, layer)
    mixer = DeltaNet(build.within("delta_net"), partition)
    return DecoderLayer(build, partition, "linear_attn", mixer, _mlp(build, partition, layer))


def _mtp(build: Build, partition: ModelPartition) -> MTP:
    """Its layer is attention whatever layer 0 is, and has the MLP of that."""
    return MTP(build, partition, _attention_layer(build.within("layers.0"), partition, 0))


def _attention_layer(build: Build, partition: ModelPartition, layer: int) -> DecoderLayer:
    mixer = Attention(build.within("attention"), partition, layer)
    return DecoderLayer(build, partition, "self_attn", mixer, _mlp(build, partition, layer))


def _mlp(build: Build, partition: ModelPartition, layer: int) -> MLP:
    if partition.config.has_experts(layer):
        return ExpertsMLP(build.within("experts"), partition)
    return GatedMLP(build.within("mlp"), partition)
