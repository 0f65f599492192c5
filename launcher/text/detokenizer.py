"""Turns token ids into text while they arrive: what is handed out is never taken back.

A character may be spread over several tokens, so some tokens say nothing until the next ones are
known. How ids become text is the business of the checkpoint's decoder; the few forms that language
models use are followed here token by token, so that the work per token is constant and the pieces
join to exactly what decoding all ids at once gives.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unisono.models.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FORMS = (
    "ByteLevel, Metaspace, none, or a Sequence of Replace, ByteFallback and Fuse with a Strip of"
    " leading characters"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderForm:
    """How a tokenizer's decoder joins pieces; read once, shared by all streams."""

    byte_level: bool = False
    """Pieces spell bytes in the byte-level alphabet; the other fields are then unused."""
    replacements: tuple[tuple[str, str], ...] = ()
    """(what, by what) inside each piece, in order."""
    byte_fallback: bool = False
    """A piece <0xNN> is a byte; a run of them is one text if it is valid UTF-8, else unknown."""
    strip: str = ""
    """Character removed at the start of the whole text ..."""
    max_strip: int = 0
    """... at most this many times."""
    remove_from_first: str = ""
    """Character removed everywhere in the first piece."""
    separator: str = ""
    """Stands between two pieces."""


class Detokenizer:
    """The text of one growing sequence of ids.

    All texts that `push` and `flush` return, joined, equal the tokenizer's `decode` of all ids,
    however they were cut into pushes. Held back is only what later ids may still change: less
    than one character of a byte-level vocabulary; a run of byte pieces of a SentencePiece
    vocabulary, for its last byte may make all of it unknown. Ids that the tokenizer does not know
    say nothing.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, form: DecoderForm, skipped_pieces: frozenset[str]
    ) -> None:
        """`skipped_pieces` are not shown: the special tokens, or nothing."""
        self._piece_of = tokenizer.id_to_token
        self._skipped = skipped_pieces
        self._joiner: _Joiner = _ByteJoiner() if form.byte_level else _PieceJoiner(form)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is certain now and was not before."""
        pieces = map(self._piece_of, ids)
        shown = [piece for piece in pieces if piece is not None and piece not in self._skipped]
        return "".join([self._joiner.add(piece) for piece in shown])

    def flush(self) -> str:
        """End the sequence and return the text that was held back."""
        return self._joiner.end()


def read_decoder_form(tokenizer: tokenizers.Tokenizer) -> DecoderForm:
    """Return how `tokenizer` joins pieces. Raises ConfigError for a form not known here."""
    if tokenizer.decoder is None:
        return DecoderForm(separator=" ")
    state = json.loads(tokenizer.decoder.__getstate__())
    kind = state["type"]
    if kind == "ByteLevel":
        return DecoderForm(byte_level=True)
    if kind == "Metaspace":
        space = state["replacement"]
        prefixed = state["prepend_scheme"] != "never"
        return DecoderForm(
            replacements=((space, " "),), remove_from_first=space if prefixed else ""
        )
    return _form_of_sequence(state["decoders"] if kind == "Sequence" else [state])


def piece_bytes(piece: str, form: DecoderForm) -> bytes:
    """Return what one piece spells by itself, wherever it stands; of a character perhaps a part."""
    if form.byte_level:
        return _bytes_of(piece)
    for old, new in form.replacements:
        piece = piece.replace(old, new)
    byte = _byte_of(piece) if form.byte_fallback else None
    return piece.encode("utf-8") if byte is None else bytes((byte,))


class _Joiner(Protocol):
    def add(self, piece: str) -> str: ...

    def end(self) -> str: ...


class _ByteJoiner:
    """Pieces that spell bytes: UTF-8 with every invalid part replaced by U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: str) -> str:
        return self._utf8.decode(_bytes_of(piece))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceJoiner:
    """Pieces that are text, and perhaps single bytes between them."""

    def __init__(self, form: DecoderForm) -> None:
        self._form = form
        self._at_first_piece = True
        self._may_strip = form.max_strip
        self._run: bytearray = bytearray()
        """Byte pieces since the last text piece, while they may still be valid UTF-8."""
        self._run_is_invalid = False
        self._utf8 = _strict_utf8()

    def add(self, piece: str) -> str:
        for old, new in self._form.replacements:
            if self._at_first_piece and old == self._form.remove_from_first:
                new = ""
            piece = piece.replace(old, new)
        separator = "" if self._at_first_piece else self._form.separator
        self._at_first_piece = False
        byte = _byte_of(piece) if self._form.byte_fallback else None
        if byte is not None:
            return self._strip(self._add_byte(byte))
        return self._strip(self._end_run() + separator + piece)

    def end(self) -> str:
        return self._strip(self._end_run())

    def _add_byte(self, byte: int) -> str:
        if self._run_is_invalid:
            return _UNKNOWN
        self._run.append(byte)
        try:
            self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._run_is_invalid = True
            text = _UNKNOWN * len(self._run)
            self._run.clear()
            return text
        return ""

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _UNKNOWN * len(self._run)
        self._run.clear()
        self._run_is_invalid = False
        self._utf8.reset()
        return text

    def _strip(self, text: str) -> str:
        while self._may_strip and text:
            if not text.startswith(self._form.strip):
                self._may_strip = 0
                break
            text = text[len(self._form.strip) :]
            self._may_strip -= 1
        return text


def _form_of_sequence(decoders: list[dict[str, Any]]) -> DecoderForm:
    """Read Replace*, ByteFallback?, Fuse, Strip? in this order; refuse everything else."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip, max_strip = "", 0
    for index, decoder in enumerate(decoders):
        match decoder:
            case {"type": "ByteLevel"} if len(decoders) == 1:
                return DecoderForm(byte_level=True)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                index == len(replacements)
            ):
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused and not byte_fallback:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if (
                fused and not max_strip
            ):
                strip, max_strip = content, start
            case _:
                kinds = " + ".join(str(each.get("type")) for each in decoders)
                raise ConfigError(
                    f"the tokenizer's decoder {kinds!r} is not supported; legal: {_FORMS}"
                )
    return DecoderForm(
        replacements=tuple(replacements),
        byte_fallback=byte_fallback,
        strip=strip,
        max_strip=max_strip,
    )


def _strict_utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("strict")


def _bytes_of(piece: str) -> bytes:
    """Return the bytes that a byte-level piece spells; a piece with other characters is text."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


def _byte_of(piece: str) -> int | None:
    """Return NN of a piece <0xNN>, else None."""
    found = _BYTE_PIECE.fullmatch(piece)
    return int(found[1], 16) if found else None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Map each of the 256 characters of byte-level vocabularies to its byte.

    Printable bytes stand for themselves; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
