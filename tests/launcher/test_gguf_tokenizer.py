"""Tokenizers built from GGUF metadata give the ids that transformers gives."""

from __future__ import annotations

import dataclasses
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizers import TEXTS, demo_oracle, oracle_of
from unisono.launcher.demo_model import demo_model_path
from unisono.launcher.text.gguf_tokenizer import TEXT_SPLITS, build_gguf_tokenizer
from unisono.models.config import ConfigError
from unisono.models.gguf import GgufTokenizerData, read_gguf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@cache
def demo_data() -> GgufTokenizerData:
    return read_gguf_tokenizer(demo_model_path())


def ids_of(data: GgufTokenizerData, text: str, add_special_tokens: bool = True) -> list[int]:
    return build_gguf_tokenizer(data).encode(text, add_special_tokens=add_special_tokens).ids


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_demo_gives_the_ids_of_transformers(text: str):
    assert demo_backend().encode(text).ids == demo_oracle()(text)["input_ids"]


PARTS = st.sampled_from([*"ab1 2.\n\t'sé한ก👋🏽<|", "<|im_start|>", "<|im_end|>"])


@settings(max_examples=300)
@given(text=st.lists(PARTS, max_size=30).map("".join))
def test_demo_gives_the_ids_of_transformers_on_any_text(text: str):
    tokenizer = demo_backend()
    assert tokenizer.encode(text).ids == demo_oracle()(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@cache
def demo_backend() -> Any:
    return build_gguf_tokenizer(demo_data())


def test_the_demo_tokenizer_is_built_fast():
    data = demo_data()
    began = time.process_time()
    build_gguf_tokenizer(data)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_qwen2_cuts_text_as_its_transformers_class(text: str):
    ours, oracle = qwen2_and_its_oracle()
    assert ours.encode(text).ids == oracle(text)["input_ids"]


@cache
def qwen2_and_its_oracle() -> tuple[Any, Any]:
    from transformers import Qwen2Tokenizer

    data = dataclasses.replace(demo_data(), pre="qwen2")
    return build_gguf_tokenizer(data), Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(data.tokens)},
        merges=[tuple(merge.split(" ")) for merge in data.merges],
        eos_token="<|im_end|>",
        additional_special_tokens=list(data.tokens[:17]),
    )


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("llama-bpe", "12345 x", ["123", "45", "Ġx"]),
        ("llama-bpe", "IT'S (ok)\n\n  z", ["IT", "'S", "Ġ(", "ok", ")ĊĊ", "Ġ", "Ġz"]),
        ("qwen2", "123 x", ["1", "2", "3", "Ġx"]),
        ("qwen2", "IT'S (ok)\n\n  z", ["IT", "'S", "Ġ(", "ok", ")ĊĊ", "Ġ", "Ġz"]),
        ("gpt-2", "12345 x", ["12345", "Ġx"]),
        ("smollm", "12 x\n\n1.", ["1", "2", "Ġx", "ĊĊ", "1", "."]),
        ("gpt-2", "IT'S (ok)\n\n  z", ["IT", "'", "S", "Ġ(", "ok", ")", "ĊĊĠ", "Ġz"]),
        ("default", "a  1", ["a", "Ġ", "Ġ1"]),
    ],
)
def test_text_is_cut_as_published(pre: str, text: str, parts: list[str]):
    tokenizer = build_gguf_tokenizer(dataclasses.replace(demo_data(), pre=pre))
    assert [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == parts


def test_the_names_of_one_split_are_equal_and_none_means_default():
    assert TEXT_SPLITS["llama3"] is TEXT_SPLITS["llama-bpe"] is TEXT_SPLITS["llama-v3"]
    unnamed = dataclasses.replace(demo_data(), pre=None)
    assert ids_of(unnamed, "IT'S 12  3") == ids_of(
        dataclasses.replace(unnamed, pre="default"), "IT'S 12  3"
    )


def small_byte_level(**fields: Any) -> GgufTokenizerData:
    tokens = ("a", "b", "c", "ab", "abc", "<s>", "</s>", "<think>", "[PAD8]", "[PAD9]")
    types = (NORMAL,) * 5 + (CONTROL, CONTROL, USER_DEFINED, UNUSED, UNUSED)
    merges = ("a b",)
    given = {"bos_token_id": 5, "eos_token_id": 6, **fields}
    return GgufTokenizerData(
        **{
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_types": types,
            "merges": merges,
        }
        | given
    )


def test_control_is_special_user_defined_is_whole_and_padding_is_left_out():
    tokenizer = build_gguf_tokenizer(small_byte_level())
    ids = tokenizer.encode("ab</s><think>a").ids
    assert ids == [3, 6, 7, 0]
    assert tokenizer.decode(ids) == "ab<think>a"
    assert tokenizer.get_vocab_size() == 8
    assert tokenizer.id_to_token(8) is None


def test_an_ordinary_piece_named_as_padding_stays_text():
    tokenizer = build_gguf_tokenizer(small_byte_level(padding_token_id=0, unknown_token_id=1))
    assert tokenizer.encode("ab").ids == [3]
    assert tokenizer.decode([0, 1]) == "ab"


def test_without_types_the_named_tokens_are_special():
    tokenizer = build_gguf_tokenizer(small_byte_level(token_types=(), unknown_token_id=7))
    assert tokenizer.decode(tokenizer.encode("a<s></s><think>").ids) == "a"


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, [3]),
        ({"add_bos_token": True}, [5, 3]),
        ({"add_bos_token": True, "add_eos_token": True}, [5, 3, 6]),
        ({"add_eos_token": True}, [3, 6]),
        ({"pre": "llama-bpe"}, [5, 3]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [3]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [3]),
    ],
    ids=str,
)
def test_bos_and_eos_are_added_as_the_file_says(fields: dict[str, Any], ids: list[int]):
    data = small_byte_level(**fields)
    assert ids_of(data, "ab") == ids
    assert ids_of(data, "ab", add_special_tokens=False) == [3]


def test_llama3_takes_whole_words_that_no_merge_leads_to():
    assert ids_of(small_byte_level(pre="llama-bpe", bos_token_id=None), "abc") == [4]
    assert ids_of(small_byte_level(pre="gpt-2"), "abc") == [3, 2]


def sentence_piece_file(directory: Path, **fields: Any) -> Path:
    """Write a GGUF file whose vocabulary has scores and no merges, as llama 2 files do."""
    import gguf

    words = ["▁", "t", "h", "e", "s", "n", "o", "▁t", "he", "▁the", "th", "▁th", "▁s", "no", "ow"]
    words += ["▁▁", "w", "▁sn", "▁snow", "é", "1", "2", "12", "▁▁▁▁", "▁2"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    # The order of scores is not the order of ids.
    scores = [0.0] * 259 + [-float(index * 7 % len(words)) for index in range(len(words))] + [0.0]
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("context_length", 64), ("embedding_length", 8), ("block_count", 1)):
        getattr(writer, f"add_{name}")(value)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, "<tool>"])
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentence_piece_gives_the_ids_and_text_of_transformers(tmp_path: Path):
    path = sentence_piece_file(tmp_path)
    ours, oracle = build_gguf_tokenizer(read_gguf_tokenizer(path)), oracle_of(path)
    own_texts = ("the snow", "then 12 snow the  the    2", " the", "no<tool>the</s>snow", "th1 2é")
    for text in (*own_texts, *TEXTS):
        ids = oracle(text)["input_ids"]
        assert ours.encode(text).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(
                ids, skip_special_tokens=skip
            )
    assert ours.encode("the snow").tokens == ["<s>", "▁the", "▁s", "no", "w"]


def test_sentence_piece_without_prefix_space(tmp_path: Path):
    data = read_gguf_tokenizer(sentence_piece_file(tmp_path, add_space_prefix=False))
    tokenizer = build_gguf_tokenizer(data)
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["t", "he"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_sentence_piece_takes_listed_merges_where_there_are_some(tmp_path: Path):
    data = read_gguf_tokenizer(sentence_piece_file(tmp_path))
    listed = dataclasses.replace(data, merges=("h e", "t he"), scores=())
    with pytest.raises(ConfigError, match="merges does not fit its tokens"):
        build_gguf_tokenizer(listed)
    listed = dataclasses.replace(data, merges=("h e",), scores=())
    assert build_gguf_tokenizer(listed).encode("the").tokens == ["<s>", "▁", "t", "he"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'.*supported: default, gpt-2"),
        ({"token_types": (1, 1)}, "token_type has 2 entries for 10 tokens"),
        ({"scores": (1.0,)}, "scores has 1 entries for 10 tokens"),
        ({"eos_token_id": 10}, "eos_token_id is 10; there are 10 tokens"),
        ({"merges": ("a x",)}, "merges does not fit its tokens"),
        ({"model": "llama", "merges": ()}, "neither tokenizer.ggml.merges nor"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_line(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        build_gguf_tokenizer(small_byte_level(**fields))
    assert "\n" not in str(caught.value)
