"""Streaming text: the pieces join to what decoding at once gives, and each comes in time."""

from __future__ import annotations

import itertools
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.tiny_tokenizers import (
    TEXTS,
    byte_level_tokenizer,
    piece_of_byte,
    sentence_piece_tokenizer,
)
from unisono.launcher.demo_model import demo_model_path
from unisono.launcher.model_source import resolve_model
from unisono.launcher.text.detokenizer import Detokenizer, read_decoder_form
from unisono.launcher.text.tokenizer import Tokenizer as OurTokenizer
from unisono.models.config import ConfigError

KINDS = ("byte-level", "sentence-piece", "sentence-piece-unstripped", "metaspace", "plain", "demo")


@cache
def backend_of(kind: str) -> Tokenizer:
    match kind:
        case "byte-level":
            return byte_level_tokenizer()
        case "sentence-piece":
            return sentence_piece_tokenizer()
        case "sentence-piece-unstripped":
            return sentence_piece_tokenizer(strips=False)
        case "metaspace":
            tokenizer = sentence_piece_tokenizer()
            tokenizer.decoder = decoders.Metaspace()
            return tokenizer
        case "plain":
            pieces = ["a", "bc", " ", "한", "<x>", ""]
            plain = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "a"))
            plain.add_special_tokens(["<x>"])
            return plain
        case _:
            assert demo_model_path().is_file()
            return OurTokenizer.load(resolve_model("demo"))._backend


def stream_of(kind: str, skip_special_tokens: bool = True) -> Detokenizer:
    tokenizer = backend_of(kind)
    added = tokenizer.get_added_tokens_decoder().values()
    skipped = frozenset(each.content for each in added if each.special and skip_special_tokens)
    return Detokenizer(tokenizer, read_decoder_form(tokenizer), skipped)


def pieces_of(kind: str, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """Push `ids` in chunks of `sizes`, round and round; the last piece is the flush."""
    stream, rest, pieces = stream_of(kind, skip), list(ids), []
    for size in itertools.cycle(sizes):
        if not rest:
            break
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    return [*pieces, stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False], ids=["skip", "show"])
@settings(max_examples=150)
@given(data=st.data())
def test_any_ids_in_any_chunks_join_to_the_decoded_text(kind: str, skip: bool, data: st.DataObject):
    size = backend_of(kind).get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    assert "".join(pieces_of(kind, ids, sizes, skip)) == backend_of(kind).decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
@settings(max_examples=300)
@given(data=st.data())
def test_raw_bytes_join_to_the_decoded_text(kind: str, data: st.DataObject):
    """Bytes that begin, continue or break characters, which random ids seldom bring together."""
    byte = st.sampled_from([0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xFF])
    values = data.draw(st.lists(st.one_of(byte, st.integers(0, 255)), max_size=12))
    names = [piece_of_byte(v) if kind == "byte-level" else f"<0x{v:02X}>" for v in values]
    ids = [backend_of(kind).token_to_id(name) for name in names]
    assert None not in ids
    assert "".join(pieces_of(kind, ids, [1])) == backend_of(kind).decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece", "demo"])
@pytest.mark.parametrize("size", range(1, 9))
def test_varied_text_survives_chunks(kind: str, size: int):
    """B77: emoji, Hangul, Thai, spaces, code, special tokens."""
    for text in TEXTS:
        ids = backend_of(kind).encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            joined = "".join(pieces_of(kind, ids, [size], skip))
            assert joined == backend_of(kind).decode(ids, skip_special_tokens=skip)
            if kind == "demo" and not skip:
                assert joined == text


def test_no_piece_holds_half_a_character():
    for text in (text for text in TEXTS if "\ufffd" not in text):
        ids = backend_of("demo").encode(text, add_special_tokens=False).ids
        pieces = pieces_of("demo", ids, [1], skip=False)
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_with_the_token_that_completes_it():
    wave = backend_of("byte-level").encode("a👋b").ids
    assert pieces_of("byte-level", wave, [1]) == ["a", "", "", "👋", "b", ""]
    cut = wave[:3]
    assert pieces_of("byte-level", cut, [1]) == ["a", "", "", "\ufffd"]
    broken = [*cut, *backend_of("byte-level").encode("b").ids]
    assert pieces_of("byte-level", broken, [1]) == ["a", "", "", "\ufffdb", ""]


def test_special_tokens_between_the_bytes_of_a_character_vanish():
    tokenizer = backend_of("byte-level")
    first, *others = tokenizer.encode("👋").ids
    ids = [first, tokenizer.token_to_id("<|im_end|>"), *others]
    assert "".join(pieces_of("byte-level", ids, [1])) == "👋"
    assert "".join(pieces_of("byte-level", ids, [1], skip=False)).startswith("\ufffd<|im_end|>")


def test_a_run_of_byte_pieces_waits_for_its_end_and_not_longer():
    tokenizer = backend_of("sentence-piece")
    e_acute = [tokenizer.token_to_id("<0xC3>"), tokenizer.token_to_id("<0xA9>")]
    h, broken = tokenizer.token_to_id("h"), tokenizer.token_to_id("<0xFF>")
    assert pieces_of("sentence-piece", [*e_acute, h], [1]) == ["", "", "éh", ""]
    # One bad byte makes the whole run unknown; the rest of it need not wait then.
    assert pieces_of("sentence-piece", [*e_acute, broken, *e_acute, h], [1]) == [
        *("", "", "\ufffd" * 3, "\ufffd", "\ufffd", "h", "")
    ]


def test_only_the_first_space_of_a_text_is_stripped():
    tokenizer = backend_of("sentence-piece")
    space, he = tokenizer.token_to_id("▁"), tokenizer.token_to_id("▁he")
    assert pieces_of("sentence-piece", [space, space, he, he], [1]) == ["", " ", " he", " he", ""]


@pytest.mark.parametrize(
    ("kind", "piece"),
    [("byte-level", 0x80), ("byte-level", 0xE2), ("sentence-piece", 0x80), ("demo", 0xE2)],
)
def test_a_long_stream_of_unknown_characters_is_delivered_in_linear_time(kind: str, piece: int):
    """B75: each token is a U+FFFD of its own and is delivered."""
    name = f"<0x{piece:02X}>" if kind == "sentence-piece" else piece_of_byte(piece)
    ids = [backend_of(kind).token_to_id(name)] * 4000
    stream = stream_of(kind)
    delivered = 0
    took = []
    for start in range(0, 4000, 1000):
        began = time.process_time()
        for index in ids[start : start + 1000]:
            delivered += len(stream.push([index]))
        took.append(time.process_time() - began)
        assert delivered >= start + 999
    assert delivered + len(stream.flush()) == 4000
    # Quadratic work would make the last quarter seven times as long as the first.
    assert took[3] < 4 * took[0] + 0.05


def test_a_valid_run_of_byte_pieces_is_delivered_at_the_end():
    tokenizer = backend_of("sentence-piece")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "ก".encode()] * 1000
    began = time.process_time()
    assert pieces_of("sentence-piece", ids, [1])[-1] == "ก" * 1000
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(content=" ", left=0, right=1)]),
        decoders.Sequence([decoders.Strip(content=" ", left=1)]),
    ],
    ids=["ctc", "replace-after-fuse", "strip-at-the-end", "strip-each-piece"],
)
def test_decoders_that_cannot_be_followed_are_refused(decoder: decoders.Decoder):
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match="is not supported; legal: ByteLevel") as caught:
        read_decoder_form(tokenizer)
    assert "\n" not in str(caught.value)
