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
    for model_type in (family, *entry.model_types, None):
        for architecture in entry.architectures:
            assert family_of(model_type, [architecture], "x") == family
    if entry.gguf:
        assert family_of_gguf(entry.gguf, "x") == family


def test_no_name_is_that_of_two_families() -> None:
    entries = FAMILIES.items()
    types = [name for key, entry in entries for name in (key, *entry.model_types)]
    architectures = [name for _, entry in entries for name in entry.architectures]
    assert len({*types}) == len(types)
    assert len({*architectures}) == len(architectures)


def test_a_wrapped_text_model_has_two_names_of_each_kind() -> None:
    for family in ("qwen3_5", "qwen3_5_moe"):
        assert family_of(f"{family}_text", [], "x") == family
        assert len(FAMILIES[family].architectures) == 2


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen3next", "qwen35", "qwen35moe"])
def test_gguf_files_of_hybrids_are_refused(architecture: str) -> None:
    words = f"x: architecture '{architecture}' is not supported; legal: llama, qwen2, qwen3$"
    with pytest.raises(ConfigError, match=words):
        family_of_gguf(architecture, "x")


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
