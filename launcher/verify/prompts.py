"""The prompts of `unisono verify`: lengths around block borders, shared beginnings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from unisono.launcher.prompts import whole_blocks

LENGTHS = (1, 70, 63, 64, 62, 66, 200, 130, 33, 128, 129, 17, 65, 192, 5, 300)
"""Tokens of a prompt, in turn. Of the first three, all that a quick check has, one (`LONG`) is made
longer than the largest chunk, one grows over a border, and one has room beside it until then: where
memory is short it is pre-empted."""
LONG = 1
TEXTS = (
    "The sea was calm that morning, and the old lighthouse keeper counted the boats as they left "
    "the harbour. There were nine of them, as every day, and he wrote the number into a book that "
    "his father had begun. Nobody had ever asked to see it. On the first page stood a sentence: "
    "whoever counts must not hurry. He thought of it whenever a fog came up. ",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    result = []\n    i = j = 0\n"
    "    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n"
    "            result.append(left[i])\n            i += 1\n        else:\n"
    "            result.append(right[j])\n            j += 1\n"
    "    return result + left[i:] + right[j:]\n\n",
    "Zażółć gęślą jaźń; Größe, Übermut und Straße; 東京は雨です。Привет, как дела? "
    "Ελληνικά, עברית, العربية. 🙂🚀 naïve café, 1½ µs, €20, x² + y² ≠ z². ",
)


def prompt_lengths(count: int, chunk: int, longest: int) -> list[int]:
    """Tokens of each of `count` prompts; one of the first two is cut by a step of `chunk` tokens.

    None has more than `longest`, which is more than `chunk`.
    """
    lengths = [*LENGTHS]
    long = LENGTHS[LONG]
    # At a border, so that it wants another block at once, which the one before it may have.
    lengths[min(LONG, count - 1)] = long if chunk < long else whole_blocks(chunk + 1)
    return [min(lengths[number % len(lengths)], longest) for number in range(count)]


def id_prompts(lengths: Sequence[int], vocab_size: int) -> list[tuple[int, ...]]:
    """Random ids, the same every time; every second prompt begins like the others of its kind."""
    longest = max(lengths)
    stems = [_random_ids(number, vocab_size, longest) for number in range(2)]
    prompts = []
    for number, length in enumerate(lengths):
        own = _random_ids(100 + number, vocab_size, longest)
        # The first block is shared, what follows is not.
        prompts.append((stems[number % 2][:64] + own[64:])[:length])
    return prompts


def text_prompts(
    lengths: Sequence[int], encode: Callable[[str], Sequence[int]]
) -> list[tuple[int, ...]]:
    """Real text, cut at many lengths; what comes from one text begins alike."""
    texts, longest = [], max(lengths)
    for text in TEXTS:
        ids = list(encode(text))
        texts.append(tuple((ids * (longest // len(ids) + 1))[:longest]))
    return [texts[number % len(texts)][:length] for number, length in enumerate(lengths)]


def _random_ids(seed: int, vocab_size: int, count: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(vocab_size) for _ in range(count))
