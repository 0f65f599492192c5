"""Builds a tokenizer from what a GGUF file says of its vocabulary.

A GGUF file names the kind of tokenizer and lists pieces, scores and merges, but not how text is cut
before merging; that is known by the name in `tokenizer.ggml.pre`. The tokenizers built here give
the ids that transformers gives for the same file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.models.config import ConfigError

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import models

    from unisono.models.gguf import GgufTokenizerData

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSplit:
    """What a byte-level tokenizer does to text before merging, as its tokenizer.json says."""

    pattern: str | None = None
    """Regular expression of the parts that never merge with each other; None: that of GPT-2."""
    digits_apart: bool = False
    """Whether every digit is a part of its own, cut off before the pattern sees the text."""
    nfc: bool = False
    """Whether text is brought into Unicode normal form C first."""
    whole_words_first: bool = False
    """Whether a part that is a piece by itself is taken as it is, without merging."""
    adds_bos: bool = False
    """Whether a text begins with a BOS where the file does not say."""


_GPT2 = TextSplit()
_LLAMA3 = TextSplit(
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    whole_words_first=True,
    adds_bos=True,
)
_QWEN2 = TextSplit(
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    nfc=True,
)

TEXT_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    # As published in its tokenizer.json. transformers forgets the digits when it reads a GGUF
    # file, so its ids differ where several spaces or line ends stand right before a number.
    "smollm": TextSplit(digits_apart=True),
}


def build_gguf_tokenizer(data: GgufTokenizerData) -> tokenizers.Tokenizer:
    """Return the tokenizer that `data` describes.

    Control tokens become special tokens, also where they stand inside a text; user-defined ones
    are matched whole. Unused pieces at the end of the list, which only pad the embedding, are left
    out. Raises ConfigError for a kind or a text split that is not known, naming the known ones.
    """
    _check(data)
    match data.model:
        case "gpt2":
            split = _text_split(data.pre or "default")
            tokenizer, adds_bos = _byte_level(data, split), split.adds_bos
        case "llama":
            tokenizer, adds_bos = _sentence_piece(data), True
        case _:
            raise ConfigError(
                f"tokenizer.ggml.model is {data.model!r}; supported: gpt2 (byte-level BPE),"
                " llama (SentencePiece BPE)"
            )
    _add_marked_tokens(tokenizer, data)
    if data.add_bos_token is not None:
        adds_bos = data.add_bos_token
    _surround(
        tokenizer,
        data.tokens,
        before=data.bos_token_id if adds_bos else None,
        after=data.eos_token_id if data.add_eos_token else None,
    )
    return tokenizer


def _text_split(pre: str) -> TextSplit:
    if pre not in TEXT_SPLITS:
        raise ConfigError(
            f"tokenizer.ggml.pre is {pre!r}, whose way of cutting text is not known here;"
            f" supported: {', '.join(TEXT_SPLITS)}"
        )
    return TEXT_SPLITS[pre]


def _byte_level(data: GgufTokenizerData, split: TextSplit) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(_bpe(data, _listed_merges(data), ignore_merges=split.whole_words_first))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(data: GgufTokenizerData) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    merges = _listed_merges(data) if data.merges else _merges_from_scores(data)
    unknown = None if data.unknown_token_id is None else data.tokens[data.unknown_token_id]
    prefixed = data.add_space_prefix is not False
    tokenizer = Tokenizer(_bpe(data, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE,
        prepend_scheme="first" if prefixed else "never",
        split=False,
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _check(data: GgufTokenizerData) -> None:
    """Refuse lists that do not belong together; they would shift every id."""
    size = len(data.tokens)
    for name, length in (("token_type", len(data.token_types)), ("scores", len(data.scores))):
        if length not in (0, size):
            raise ConfigError(f"tokenizer.ggml.{name} has {length} entries for {size} tokens")
    for name in ("bos", "eos", "eot", "unknown", "padding"):
        index = getattr(data, f"{name}_token_id")
        if index is not None and not 0 <= index < size:
            raise ConfigError(f"tokenizer.ggml.{name}_token_id is {index}; there are {size} tokens")
    if data.model == "llama" and not data.merges and not data.scores:
        raise ConfigError("the file has neither tokenizer.ggml.merges nor tokenizer.ggml.scores")


def _bpe(data: GgufTokenizerData, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    from tokenizers import models

    size = len(data.tokens)
    while size and data.token_types and data.token_types[size - 1] == _UNUSED:
        size -= 1
    vocabulary = {piece: index for index, piece in enumerate(data.tokens[:size])}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises Exception itself, for a merge of unknown pieces
        raise ConfigError(f"tokenizer.ggml.merges does not fit its tokens: {error}") from error


def _listed_merges(data: GgufTokenizerData) -> list[tuple[str, str]]:
    pairs = []
    for merge in data.merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _merges_from_scores(data: GgufTokenizerData) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's scores stand for, the first to apply first.

    Every way to cut a normal piece into two normal pieces is a merge; the better score of the whole
    goes first, then the longer left part.
    """
    normal = {
        piece: index
        for index, piece in enumerate(data.tokens)
        if not data.token_types or data.token_types[index] == _NORMAL
    }
    merges = []
    for piece, index in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                merges.append((-data.scores[index], -len(left), -len(right), left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


def _add_marked_tokens(tokenizer: tokenizers.Tokenizer, data: GgufTokenizerData) -> None:
    """Make control and user-defined tokens match whole, wherever they stand in a text."""
    from tokenizers import AddedToken

    special, whole = [], []
    for index, piece in enumerate(data.tokens):
        kind = data.token_types[index] if data.token_types else _NORMAL
        # Where the file gives types they decide: some files name an ordinary piece as their
        # padding or beginning. The end of an answer is never text.
        named = index == data.eos_token_id or (
            not data.token_types and index in (data.bos_token_id, data.unknown_token_id)
        )
        if kind in (_CONTROL, _UNKNOWN) or named:
            special.append(AddedToken(piece, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            whole.append(AddedToken(piece, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


def _surround(
    tokenizer: tokenizers.Tokenizer,
    tokens: Sequence[str],
    *,
    before: int | None,
    after: int | None,
) -> None:
    """Put the tokens with the ids `before` and `after`, if any, around every encoded text."""
    from tokenizers import processors

    used = [(tokens[index], index) for index in (before, after) if index is not None]
    if used:
        first = [] if before is None else [f"{tokens[before]}:0"]
        last = [] if after is None else [f"{tokens[after]}:0"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A:0", *last], special_tokens=used
        )
