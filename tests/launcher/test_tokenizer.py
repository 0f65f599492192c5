"""The tokenizer of a checkpoint directory or of the demo file, beside that of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_tokenizers import (
    CHATML,
    TEXTS,
    byte_level_tokenizer,
    demo_oracle,
    sentence_piece_tokenizer,
)
from unisono.launcher.model_source import ModelSource, resolve_model
from unisono.launcher.text.tokenizer import Tokenizer
from unisono.models.config import ConfigError

START, END = 260, 261
"""Ids of <|im_start|> and <|im_end|> in the tiny byte-level tokenizer."""
TURNS = [{"role": "user", "content": "What is the capital of France?"}]
CONFIG = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., ModelSource]:
    """Write a checkpoint directory: tokenizer.json and the JSON files given by name."""

    def write(backend: Any = None, **files: dict[str, Any]) -> ModelSource:
        (backend or byte_level_tokenizer()).save(str(tmp_path / "tokenizer.json"))
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
        return ModelSource(name="x", path=tmp_path, kind="huggingface")

    return write


@cache
def demo() -> tuple[Tokenizer, Any]:
    return Tokenizer.load(resolve_model("demo")), demo_oracle()


def test_demo_equals_transformers():
    ours, oracle = demo()
    assert ours.size == len(oracle) == 49152
    assert (ours.bos_token, ours.eos_token) == (oracle.bos_token, oracle.eos_token)
    assert ours.eos_ids == (oracle.eos_token_id,)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == oracle(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.has_chat_template
    for prompted in (True, False):
        assert (
            ours.chat_ids(TURNS, prompted)
            == (oracle.apply_chat_template(TURNS, add_generation_prompt=prompted)["input_ids"])
        )


def test_the_demo_speaks_its_published_ids():
    ours, _ = demo()
    assert ours.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert (
        ours.chat_ids([{"role": "user", "content": "hi"}])[-9:]
        == [*(1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198)][1:]
    )


def test_ids_beyond_the_tokenizer_say_nothing():
    ours, _ = demo()
    ids = ours.encode("Paris")
    assert ours.decode([ours.size, *ids, ours.size + 700]) == "Paris"
    stream = ours.stream()
    assert stream.push([ours.size, *ids, ours.size + 700]) + stream.flush() == "Paris"


def test_a_directory_equals_transformers(checkpoint: Callable[..., ModelSource]):
    from transformers import PreTrainedTokenizerFast

    source = checkpoint(tokenizer_config=CONFIG)
    ours = Tokenizer.load(source)
    oracle = PreTrainedTokenizerFast.from_pretrained(source.path)
    assert ours.size == len(oracle)
    for text in TEXTS:
        ids = oracle(text)["input_ids"]
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
    assert (
        ours.chat_ids(TURNS)
        == (oracle.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"])
    )


def test_a_template_that_writes_the_bos_gets_no_second_one(checkpoint: Callable[..., ModelSource]):
    from tokenizers import processors

    backend = byte_level_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )
    ours = Tokenizer.load(checkpoint(backend, tokenizer_config=CONFIG))
    assert ours.encode("a")[0] == START
    assert START not in ours.encode("a", add_special_tokens=False)
    assert ours.chat_ids(TURNS)[:2] == [START, *ours.encode("u", add_special_tokens=False)]


def test_template_options_reach_the_template(checkpoint: Callable[..., ModelSource]):
    template = "{{ bos_token }}{{ eos_token }}{% if enable_thinking %}<think>{% endif %}"
    ours = Tokenizer.load(checkpoint(tokenizer_config={**CONFIG, "chat_template": template}))
    assert ours.chat_ids(TURNS) == [START, END]
    assert ours.chat_ids(TURNS, enable_thinking=True) == [START, END, 262]


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (END,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (END,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (END,)),
        ({"tokenizer_config": {"eos_token": "<absent>"}}, ()),
        ({"tokenizer_config": {"eos_token": None}}, ()),
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": [9, 8]}}, (9, 8)),
        (
            {
                "generation_config": {"eos_token_id": [9, 8]},
                "config": {"eos_token_id": [8, 7]},
                "tokenizer_config": {"eos_token": "<|im_start|>"},
            },
            (9, 8, 7, START),
        ),
        # The turns of this template end in a token that nothing else names.
        ({"tokenizer_config": {"chat_template": CHATML}}, (END,)),
        ({"config": {"eos_token_id": 7}, "tokenizer_config": CONFIG}, (7, END)),
        (
            {
                "tokenizer_config": {
                    "chat_template": "{% for m in messages %}{{ m.content }} </s>{% endfor %}"
                }
            },
            (),
        ),
        ({"tokenizer_config": {"chat_template": "{{ raise_exception('no') }}"}}, ()),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, ()),
    ],
    ids=range(14),
)
def test_every_source_of_an_end_counts(
    checkpoint: Callable[..., ModelSource], files: dict[str, Any], eos_ids: tuple[int, ...]
):
    assert Tokenizer.load(checkpoint(**files)).eos_ids == eos_ids


def test_named_tokens_that_are_ordinary_pieces_become_special(
    checkpoint: Callable[..., ModelSource],
):
    from transformers import PreTrainedTokenizerFast

    config = {"eos_token": "he", "additional_special_tokens": ["Ġhe", "<absent>"]}
    source = checkpoint(tokenizer_config=config)
    ours = Tokenizer.load(source)
    ids = ours.encode("ahe he")
    assert ours.decode(ids) == "a "
    assert ours.decode(ids, skip_special_tokens=False) == "ahe he"
    oracle = PreTrainedTokenizerFast.from_pretrained(source.path)
    assert ids == oracle("ahe he")["input_ids"]
    stream = ours.stream()
    assert stream.push(ids) + stream.flush() == "a "


def test_settings_of_a_training_run_do_not_cut_prompts(checkpoint: Callable[..., ModelSource]):
    backend = byte_level_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer.load(checkpoint(backend)).encode("0123456789")) == 10


def test_streams_show_or_hide_special_tokens(checkpoint: Callable[..., ModelSource]):
    ours = Tokenizer.load(checkpoint(tokenizer_config=CONFIG))
    ids = ours.encode("<|im_start|>a<think>👋<|im_end|>")
    for skip, text in ((True, "a<think>👋"), (False, "<|im_start|>a<think>👋<|im_end|>")):
        stream = ours.stream(skip_special_tokens=skip)
        assert "".join(stream.push([index]) for index in ids) + stream.flush() == text
        assert ours.decode(ids, skip) == text


def test_sentence_piece_keeps_its_spaces(checkpoint: Callable[..., ModelSource]):
    ours = Tokenizer.load(checkpoint(sentence_piece_tokenizer()))
    for text in ("hello  hell", "  he", "한국\n👋"):
        assert ours.decode(ours.encode(text)) == text.removeprefix(" " if text[0] == " " else "")


def test_without_a_template_there_is_no_chat(checkpoint: Callable[..., ModelSource]):
    ours = Tokenizer.load(checkpoint())
    assert not ours.has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        ours.chat_ids(TURNS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json, which is needed"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: Expecting property"),
        ("generation_config.json", "[]", "generation_config.json holds a list; it must hold a"),
        ("special_tokens_map.json", b"\xff", "special_tokens_map.json cannot be read"),
    ],
)
def test_bad_files_are_named_in_one_line(
    checkpoint: Callable[..., ModelSource], name: str, content: str | bytes | None, message: str
):
    source = checkpoint(tokenizer_config=CONFIG)
    if content is None:
        (source.path / name).unlink()
    else:
        (source.path / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.load(source)
    assert "\n" not in str(caught.value)
    assert str(source.path) in str(caught.value)
