"""What the user may write for MODEL, and what is said about everything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono.launcher import demo_model, model_source
from unisono.launcher.model_source import resolve_model
from unisono.models.config import ConfigError

CHOICES = "choose 'demo', 'tiny-mtp', shape:NAME, a directory with config.json, or a .gguf file"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_directories_and_files_become_absolute(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "./model/", str(checkpoint), "~/model"):
        source = resolve_model(name)
        assert (source.name, source.path, source.kind) == (name, checkpoint, "huggingface")
    for name in ("m.GGUF", "~/m.GGUF"):
        source = resolve_model(name)
        assert (source.path, source.kind) == (tmp_path / "m.GGUF", "gguf")


def test_a_directory_may_end_in_gguf(tmp_path: Path, checkpoint: Path):
    named = checkpoint.rename(tmp_path / "x.gguf")
    assert resolve_model(str(named)).kind == "huggingface"


def test_demo_is_the_demo_model_also_beside_a_directory_of_that_name(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[object] = []

    def fetch(on_progress: object = None) -> Path:
        asked.append(on_progress)
        return tmp_path / "demo.gguf"

    monkeypatch.setattr(demo_model, "demo_model_path", fetch)
    checkpoint.rename(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    source = resolve_model("demo", print)
    assert (source.name, source.path, source.kind) == ("demo", tmp_path / "demo.gguf", "gguf")
    assert asked == [print]
    assert resolve_model("./demo").kind == "huggingface"


def test_tiny_mtp_is_part_of_the_package(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(model_source, "TINY_PATH", checkpoint)
    source = resolve_model("tiny-mtp")
    assert (source.name, source.path, source.kind) == ("tiny-mtp", checkpoint, "huggingface")
    monkeypatch.setattr(model_source, "TINY_PATH", tmp_path / "gone")
    with pytest.raises(ConfigError) as caught:
        resolve_model("tiny-mtp")
    assert str(caught.value) == (
        f"model 'tiny-mtp' is part of the package, and {tmp_path / 'gone'} is not there; install"
        " unisono again"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", f"model '' is empty; {CHOICES}"),
        ("nowhere", f"model 'nowhere' does not exist; {CHOICES}"),
        (
            "Qwen/Qwen3-0.6B",
            f"model 'Qwen/Qwen3-0.6B' does not exist; {CHOICES}; if it is a hub name, first run:"
            " hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B",
        ),
        ("./a/b", f"model './a/b' does not exist; {CHOICES}"),
        ("empty", f"model 'empty' is a directory without config.json; {CHOICES}"),
        (
            "ggufs",
            f"model 'ggufs' is a directory without config.json; {CHOICES};"
            " it holds a.gguf: name that file",
        ),
        ("w.safetensors", f"model 'w.safetensors' is a file that does not end in .gguf; {CHOICES}"),
        ("x" * 5000, f"cannot be opened (File name too long); {CHOICES}"),
        ("~nobody-of-this-name/x", f"; {CHOICES}"),
        ("line\nbreak", f"model 'line\\nbreak' does not exist; {CHOICES}"),
    ],
)
def test_everything_else_is_refused_with_the_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    for file in ("ggufs/b.gguf", "ggufs/a.gguf", "w.safetensors"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message) + "$") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
