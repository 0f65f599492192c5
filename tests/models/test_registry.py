"""Families by each of their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unisono.models.config import ConfigError
from unisono.models.registry import FAMILIES, family_of, family_of_gguf, model_class


@pytest.mark.parametrize("family", FAMILIES)
def test_each_name_leads_to_the_family(family: str) -> None:
    entry = FAMILIES[family]
    assert family_of(family, [entry.architecture], "x") == family
    assert family_of(None, [entry.architecture], "x") == family
    assert family_of_gguf(entry.gguf, "x") == family


@pytest.mark.parametrize("family", FAMILIES)
def test_target_is_a_class_in_a_file_of_this_room(family: str) -> None:
    module, name = FAMILIES[family].target.split(":")
    room, file = module.rsplit(".", 1)
    assert room == "unisono.models"
    text = (Path(__file__).parents[2] / "models" / f"{file}.py").read_text()
    assert f"class {name}" in text


def test_class_is_imported_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stand:
        Llama = type("Llama", (), {})

    monkeypatch.setitem(sys.modules, "unisono.models.llama", Stand)  # type: ignore[arg-type]
    assert model_class("llama") is Stand.Llama


def test_others_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'gpt2' is not supported; legal: llama, qwen2, qwen3"):
        model_class("gpt2")
    with pytest.raises(ConfigError, match="x: architecture 'phi3' is not supported; legal: llama"):
        family_of_gguf("phi3", "x")
    with pytest.raises(ConfigError, match="x: architecture None is not supported"):
        family_of_gguf(None, "x")
