"""tiny-mtp as it is shipped: its files, and its numbers against transformers reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.closeness import assert_close
from tests.models.draft_rig import DraftingRank, on_ranks
from tests.models.test_mtp import CHAIN, ORACLE, RANKS, oracle
from tests.tiny import MTP_FIELDS
from unisono.launcher.model_source import ModelSource, resolve_model
from unisono.launcher.text.tokenizer import Tokenizer

TEXT = '''
class Reader:
    """Reads lines and counts them."""

    def __init__(self, file, encoding="utf-8"):
        self.file = file
        self.count = 0

    def __iter__(self):
        for line in self.file:
            self.count += 1
            yield line.rstrip("\\n")
'''
LIMIT = 12 << 20
"""Bytes that the model may add to a clone and to an installation."""


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("tiny-mtp")


@pytest.fixture(scope="module")
def ids(source: ModelSource) -> list[int]:
    return Tokenizer.load(source).encode(TEXT)


@pytest.fixture(scope="module")
def theirs(source: ModelSource) -> Any:
    """transformers' model of the files, float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    fields = json.loads((source.path / "config.json").read_text())
    config = Qwen3_5TextConfig(**fields, **MTP_FIELDS)
    model = Qwen3_5ForCausalLM.from_pretrained(source.path, config=config, dtype=torch.float32)
    return model.eval()


def test_it_is_small_and_says_what_it_learnt_from(source: ModelSource) -> None:
    files = {file.name: file.stat().st_size for file in source.path.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "README.md"} <= set(files)
    assert sum(files.values()) <= LIMIT
    card = (source.path / "README.md").read_text()
    assert "Python Software Foundation License Version 2" in card
    assert "scripts/train_tiny.py" in card


def test_the_tokenizer_is_that_of_transformers(source: ModelSource, ids: list[int]) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(source.path), Tokenizer.load(source)
    assert theirs(TEXT)["input_ids"] == ids
    assert ours.decode(ids) == TEXT
    assert ours.eos_ids == (0,) == (theirs.eos_token_id,)
    assert ours.size == json.loads((source.path / "config.json").read_text())["vocab_size"]


def test_logits_and_drafts_equal_transformers(
    source: ModelSource, ids: list[int], theirs: Any
) -> None:
    from transformers.modeling_layers import MtpModel

    theirs.config.name_or_path = str(source.path)
    theirs.config.dtype = torch.float32
    mtp = MtpModel.from_pretrained(theirs).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
    states, drafts, draft_logits = oracle(theirs, mtp, ids)

    def ours(rank: DraftingRank) -> tuple[Any, ...]:
        hidden = rank.forward(ids)
        known = hidden[:-1]
        own = rank.whole(rank.model.logits(hidden))
        return own, rank.draft(ids[1:], known), *rank.chain(ids, known, CHAIN)

    [alone] = on_ranks(source.path, 1, ours)
    assert_close("logits", alone[0], logits, ORACLE)
    assert_close("states of drafts", alone[1], states, ORACLE)
    assert alone[2] == drafts
    assert_close("draft logits", alone[3], draft_logits, ORACLE)
    for number, cut in enumerate(on_ranks(source.path, 2, ours)):
        assert_close(f"logits of rank {number}", cut[0], alone[0], RANKS)
        assert_close(f"draft logits of rank {number}", cut[3], alone[3], RANKS)


def test_it_has_learnt_python(source: ModelSource, ids: list[int], theirs: Any) -> None:
    """Untrained it would be at log2(2048) = 11 bits a token; text of another kind costs more."""
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert nats < 3, f"{nats:.2f} nats a token"


def test_the_weights_are_whole(source: ModelSource) -> None:
    import safetensors.torch

    tensors = safetensors.torch.load_file(Path(source.path) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert sum(name.startswith("mtp.") for name in tensors) == 15
