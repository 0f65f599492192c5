"""What config.json says beyond a llama: experts, gated delta nets, a wrapper. Torch-free.

Formulas and names are those of the transformers classes; what they always do and config.json
denies is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from unisono.models.config import ConfigError, DeltaConfig, ExpertsConfig, ModelConfig
from unisono.models.config_defaults import DEFAULTS
from unisono.models.fields import Fields
from unisono.models.registry import FAMILIES
from unisono.models.weight_specs import MTP_EMBEDDING, MTP_HEAD

WITH_DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose layers may be gated delta nets, and whose attention has an output gate."""
_WRAPPED = ("qwen3_5", "qwen3_5_moe")
_OF_THE_WRAPPER = (
    *("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id"),
    *("quantization_config", "compression_config"),
)
"""Fields that a wrapper may give for its language model too; then they decide."""
_ANNOUNCED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields that may say how many layers a drafter has; the first that is there."""
_DRAFTER_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


def text_fields(fields: Fields, family: str) -> Fields:
    """Return the fields of the language model, which a wrapper nests in `text_config`.

    Ids that end an answer are those of both. Raises ConfigError for a language model of another
    family.
    """
    if family not in _WRAPPED or fields.values.get("text_config") is None:
        return fields
    inner = Fields(fields.mapping("text_config"), f"{fields.where}: text_config")
    legal = (family, *FAMILIES[family].model_types)
    if inner.text("model_type", family) not in legal:
        raise inner.fault("model_type", f"legal in a {family}: {', '.join(legal)}")
    outer = {name: fields.values[name] for name in _OF_THE_WRAPPER if name in fields}
    values = {**inner.values, **{name: v for name, v in outer.items() if v is not None}}
    if "eos_token_id" in fields or "eos_token_id" in inner:
        values["eos_token_id"] = [
            *inner.token_ids("eos_token_id"),
            *fields.token_ids("eos_token_id"),
        ]
    return Fields(values, fields.where)


def with_hybrid_fields(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Return `config` with its experts and gated delta nets, where its family has them.

    Raises ConfigError naming field, value and rule.
    """
    if DEFAULTS[config.family].experts is not None:
        config = replace(config, experts=_read_experts(config, fields))
    if config.family in WITH_DELTA_NETS:
        layers = _read_layers(fields, config.num_layers)
        config = replace(
            config,
            zero_centred_norms=True,
            attn_output_gate=True,
            delta=_read_delta(config.family, fields) if any(layers) else None,
            delta_layers=layers if any(layers) else (),
        )
    return config


def with_drafter(config: ModelConfig, fields: Fields, tensors: Iterable[str] | None) -> ModelConfig:
    """Return `config` with the drafter that the `tensors` of the checkpoint are of, whatever it
    announces; None: weights will be random, and there is the one that is announced.

    What it lacks is named where it is to draft, an embedding of its own too: the model's is none
    that it was trained on.
    """
    own_embedding = fields.flag("mtp_use_dedicated_embeddings", False)
    if config.family not in WITH_DELTA_NETS:
        return config
    if tensors is None:
        counts = (fields.whole_or_none(name, least=0) for name in _ANNOUNCED)
        count = next((count for count in counts if count is not None), 0)
        return replace(config, num_mtp_layers=count, mtp_embedding=own_embedding and count > 0)
    names = {name for name in tensors if name.startswith("mtp.")}
    layers = {match[1] for name in names if (match := _DRAFTER_LAYER.match(name))}
    if not names:
        return config
    return replace(
        config,
        num_mtp_layers=max(len(layers), 1),
        mtp_embedding=own_embedding or MTP_EMBEDDING in names,
        mtp_head=MTP_HEAD in names,
    )


def _read_experts(config: ModelConfig, fields: Fields) -> ExpertsConfig | None:
    """None where no layer has experts."""
    default = DEFAULTS[config.family].experts
    assert default is not None
    # transformers 5 writes the first name for qwen3_moe, all else the second.
    local = config.family == "qwen3_moe" and "num_local_experts" in fields
    name = "num_local_experts" if local else "num_experts"
    all_layers = not DEFAULTS[config.family].intermediate_size
    count = fields.whole(name, default.num_experts, least=int(all_layers))
    step, skipped = fields.whole("decoder_sparse_step", 1), fields.wholes("mlp_only_layers")
    layers = range(config.num_layers)
    dense = tuple(i for i in layers if i in skipped or (i + 1) % step)
    if dense and all_layers:
        guilty = "mlp_only_layers" if skipped else "decoder_sparse_step"
        raise fields.fault(guilty, f"every layer of a {config.family} has experts")
    if not count or len(dense) == len(layers):
        return None
    chosen = fields.whole("num_experts_per_tok", default.num_experts_per_tok)
    if chosen > count:
        raise ConfigError(
            f"{fields.where}: num_experts_per_tok {chosen} is above {name} {count}; legal: up to "
            "that many"
        )
    renormalise = fields.flag("norm_topk_prob", default.renormalise)
    if all_layers and not renormalise:
        raise fields.fault("norm_topk_prob", f"legal for {config.family}: true")
    return ExpertsConfig(
        num_experts=count,
        num_experts_per_tok=chosen,
        width=fields.whole("moe_intermediate_size", default.width),
        shared_width=default.shared_width
        and fields.whole("shared_expert_intermediate_size", default.shared_width),
        renormalise=renormalise,
        dense_layers=dense,
    )


def _read_layers(fields: Fields, count: int) -> tuple[bool, ...]:
    """Whether each layer is a gated delta net: `layer_types`, or all but every n-th."""
    types = fields.texts("layer_types")
    if types is None:
        interval = fields.whole("full_attention_interval", 4)
        layers = tuple((i + 1) % interval != 0 for i in range(count))
        name = "full_attention_interval"
    else:
        if len(types) != count or not {*types} <= {"full_attention", "linear_attention"}:
            raise fields.fault(
                "layer_types",
                f"it must name full_attention or linear_attention for each of {count} layers",
            )
        layers, name = tuple(kind == "linear_attention" for kind in types), "layer_types"
    if all(layers):
        raise fields.fault(name, f"at least one of {count} layers must be full_attention")
    return layers


def _read_delta(family: str, fields: Fields) -> DeltaConfig:
    for name, legal in (
        ("output_gate_type", ("swish", "silu")),
        ("mamba_ssm_dtype", ("float32",)),
    ):
        if fields.text(name) not in (None, *legal):
            raise fields.fault(name, f"legal: {', '.join(legal)}")
    keys = fields.whole("linear_num_key_heads", 16)
    values = fields.whole("linear_num_value_heads", 32)
    if values % keys:
        raise ConfigError(
            f"{fields.where}: {values} linear value heads do not divide into {keys} linear key "
            "heads; the second must divide the first"
        )
    return DeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_head_dim=fields.whole("linear_key_head_dim", 128),
        value_head_dim=fields.whole("linear_value_head_dim", 128),
        conv_width=fields.whole("linear_conv_kernel_dim", 4, least=2),
        is_grouped=family == "qwen3_next",
    )
