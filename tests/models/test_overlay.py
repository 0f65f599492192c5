"""Overlays: which parts a model has, what is refused, and that a checkpoint keeps the rest."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.closeness import assert_same_bits
from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.models.checkpoint import open_checkpoint
from unisono.models.config import ConfigError, ModelConfig
from unisono.models.config_reader import read_model_config
from unisono.models.ledger import fill_weights
from unisono.models.overlay import overlay_part_of, parse_overlay
from unisono.models.partition import ModelPartition
from unisono.models.random_weights import fill_random, open_weights
from unisono.models.shapes import SHAPES

PLAIN = SHAPES["smollm2-135m"]
BIASED = replace(SHAPES["qwen3-8b"], o_bias=True)


def test_parts_are_read() -> None:
    assert parse_overlay("", PLAIN) == frozenset()
    assert parse_overlay("norm=random", PLAIN) == {"norm"}
    everything = "bias=random,norm=random,qk-norm=random"
    assert parse_overlay(everything, BIASED) == {"bias", "norm", "qk-norm"}


@pytest.mark.parametrize(
    ("text", "entry", "model", "legal"),
    [
        ("bias=random", "bias=random", PLAIN, "norm=random"),
        ("norm=random,qk-norm=random", "qk-norm=random", PLAIN, "norm=random"),
        (
            "norm=random,bias=random",
            "bias=random",
            SHAPES["qwen3-8b"],
            "norm=random,qk-norm=random",
        ),
        ("norms=random", "norms=random", BIASED, "bias=random,norm=random,qk-norm=random"),
        ("norm", "norm", PLAIN, "norm=random"),
        ("norm=zero", "norm=zero", PLAIN, "norm=random"),
        ("norm=random,", "", PLAIN, "norm=random"),
        ("norm=random,norm=random", "norm=random", PLAIN, "norm=random"),
    ],
)
def test_others_are_refused_with_the_parts_of_this_model(
    text: str, entry: str, model: ModelConfig, legal: str
) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"--overlay {text}: {entry!r} is not")
    ) as found:
        parse_overlay(text, model)
    assert str(found.value).endswith(f"legal for this model: {legal}")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["llama-bias-llama3", "qwen2", "qwen3-bias-untied-1003"])
@pytest.mark.parametrize("part", ["bias", "norm", "qk-norm"])
def test_exactly_the_named_part_is_replaced(name: str, part: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    config = read_model_config(tmp_path)
    if part == "qk-norm" and not config.qk_norm:
        with pytest.raises(ConfigError):
            parse_overlay("qk-norm=random", config)
        return
    specs = list(ModelPartition.of(config, 2).weights(1))
    filled = {spec.name: torch.full(spec.local_shape, torch.nan) for spec in specs}
    parts = parse_overlay(f"{part}=random", config)
    heard: list[tuple[int, int]] = []
    with open_weights(str(tmp_path), "auto", parts, torch.float32) as source:
        fill_weights(specs, filled, source, lambda *now: heard.append(now))
    assert heard[-1][0] == heard[-1][1] > 0
    replaced = 0
    with open_checkpoint(tmp_path) as checkpoint:
        for spec in specs:
            want = checkpoint.read(spec)
            if overlay_part_of(spec.name) == part:
                replaced += 1
                assert not torch.equal(want, filled[spec.name])
                fill_random(spec, want)
                assert want.count_nonzero() > 0.9 * want.numel()
            assert_same_bits(spec.name, filled[spec.name], want)
    assert replaced >= config.num_layers


def test_an_overlay_changes_answers_and_ranks_still_agree(tmp_path: Path) -> None:
    write_checkpoint("qwen2", tmp_path)
    ids = random_ids(20)
    overlay = "bias=random,norm=random"
    alone, cut = (LocalEngine(tmp_path, tp=tp, overlay=overlay).prompt_logits(ids) for tp in (1, 2))
    assert float((alone - cut).abs().max()) < 1e-3
    assert not torch.equal(alone, LocalEngine(tmp_path).prompt_logits(ids))
