"""Small tokenizers of the two kinds that language models use, and text to try them on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.demo_oracle import parsed_once
from tests.tiny import write_checkpoint
from unisono.launcher.demo_model import demo_model_path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXTS = (
    "",
    "Hello, world! It's John's book; they'll see. IT'S",
    "  two leading spaces, \t tabs\t\t and trailing  ",
    "1234567 3.14 +49-170 1,000,000 x2y ½ ² ٣٤",
    "def f(x):\n    if x > 10:\n        return [1, 2]\n\n\n    return None\r\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] = b[i];\n}",
    "The family 👨‍👩‍👧‍👦 waves 👋🏽 and the flag 🇰🇷 flies 🎉",
    "한국어 문장은 받침이 있는 음절로 이루어져 있습니다.",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "中文字符和日本語のテキスト、ひらがな",
    "naïve café e\u0301 Ω \u212b ﬁ Straße",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> and <|im_start|><|im_end|> <|im_star|>",
    "</s><s>[INST] hi [/INST] <unk>",
    "\u200b\ufeff\u00a0\u3000\ufffd \x00\x07",
    "a\n\n\n\nb   c\t \n d",
    'https://example.org/a_b?c=%20d&e=f#g user@host.tld $HOME `ls -la` {"k": [null, true]}',
)


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges, two special tokens and an added one that is not special."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Merges across the borders of characters, as trained vocabularies have them.
    emoji, hangul = _spelled("👋"), _spelled("한")
    merges = [(emoji[0], emoji[1]), (hangul[1], hangul[2]), ("h", "e"), ("Ġ", "he")]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    # A character of the byte alphabet that is no letter of it here, and one outside of it.
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("<é>"), AddedToken("<▁한>")])
    return tokenizer


def sentence_piece_tokenizer(*, strips: bool = True) -> Tokenizer:
    """<unk>, <s>, </s>, all 256 byte pieces and a few others; decodes as llama 2 does."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "한", "▁h", "▁he", "▁▁", "ll", "\n", "."]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "e"), ("▁", "▁"), ("l", "l")]
    model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strips else steps
    )
    marks = ("<unk>", "<s>", "</s>")
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


def piece_of_byte(byte: int) -> str:
    """Return the piece that stands for `byte` in a byte-level vocabulary."""
    if byte < 0x80:
        return _spelled(chr(byte))[0]
    # U+00C0 to U+00FF are written C3 80 to C3 BF; the bytes above BF stand for themselves.
    return _spelled(chr(byte + 0x40))[1] if byte < 0xC0 else chr(byte)


def _spelled(character: str) -> list[str]:
    """Return the pieces of the byte alphabet that spell `character`."""
    [(spelling, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(character)
    return list(spelling)


@cache
def demo_oracle() -> Any:
    """transformers' tokenizer, with the split into digits that it forgets for GGUF files."""
    oracle = oracle_of(demo_model_path())
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return oracle


def oracle_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    with parsed_once():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def long_model(directory: Path) -> str:
    """A tiny checkpoint that answers for a long time, with a tokenizer; its path."""
    write_checkpoint("long", directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return str(directory)
