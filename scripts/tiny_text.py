"""The text that scripts/train_tiny.py trains on: the sources of Python's own standard library."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

END = "<|endoftext|>"
"""Token 0: between files, and the end of an answer."""
APART = 50
"""One file of so many is held out."""


@dataclass(frozen=True)
class Corpus:
    """Token ids of all files, each behind END."""

    tokenizer: Any
    train: Tensor
    held_out: Tensor
    held_out_bytes: int
    facts: dict[str, Any]


def read_corpus(vocab_size: int, most: int) -> Corpus:
    """Read the library (`most` files of it, 0: all), train a tokenizer on it, tokenise it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    began = time.perf_counter()
    files = list(library_files())[-most:]
    held = [zlib.crc32(name.encode()) % APART == 0 for name, _ in files]
    if not any(held):
        held[0] = True
    texts = [text for _, text in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # A third of the files says enough about words.
    tokenizer.train_from_iterator(texts[::3] if len(texts) > 100 else texts, trainer)
    ids: dict[bool, list[Tensor]] = {True: [], False: []}
    for start in range(0, len(texts), 200):
        encoded = tokenizer.encode_batch(texts[start : start + 200])
        for is_held, each in zip(held[start:], encoded, strict=False):
            ids[is_held].append(torch.tensor([0, *each.ids], dtype=torch.int16))
    train, held_out = torch.cat(ids[False]), torch.cat(ids[True])
    facts = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "files": len(files),
        "bytes": sum(len(text.encode()) for text in texts),
        "sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        "num_train": len(train),
        "num_held_out": len(held_out),
    }
    print(f"text: {json.dumps(facts)}, {time.perf_counter() - began:.1f} s", flush=True)
    size = sum(len(text.encode()) for text, each in zip(texts, held, strict=True) if each)
    return Corpus(tokenizer, train, held_out, size, facts)


def library_files() -> Iterator[tuple[str, str]]:
    """Name and text of the library's own files, in the order of their names.

    Without what others installed, what a build wrote down, and tables of characters.
    """
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages", "encodings", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if foreign & set(path.parts) or path.name.startswith(("_sysconfigdata", "sitecustom")):
            continue
        if name.startswith("config-") or path.stat().st_size > 1_000_000:
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # tests of the parser hold files that are meant to be broken
