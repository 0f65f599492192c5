"""Drafts on a GPU: the answers without them, bit for bit, replayed from graphs or not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.closeness import assert_same_bits
from tests.copying import write_copying_mtp
from tests.rig import LocalEngine
from tests.tiny import DRAFTING, random_ids
from unisono.launcher.model_source import resolve_model
from unisono.launcher.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

GPU = torch.device("cuda")
VOCABULARY = 199


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_drafts_of_which_a_third_is_wrong_change_nothing(
    name: str, dtype: str, state_dtype: str, tmp_path: Path
) -> None:
    wrong = random.Random(0).sample(range(3, VOCABULARY), VOCABULARY // 3)
    write_copying_mtp(name, tmp_path, wrong=wrong)
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in (1, 2, 3, 12, 63, 65, 66)]
    options = {"dtype": dtype, "state_dtype": state_dtype, "device": GPU, "max_step_tokens": 100}
    plain = LocalEngine(tmp_path, **options).generate(prompts, 24)
    replayed = LocalEngine(tmp_path, graphs=True, **options).generate(prompts, 24)
    assert [each.token_ids for each in replayed] == [each.token_ids for each in plain]
    for num_drafts in (1, 3, 8):
        engine = LocalEngine(tmp_path, num_drafts=num_drafts, **options)
        for number, got in enumerate(engine.generate(prompts, 24)):
            assert got.token_ids == plain[number].token_ids, f"{num_drafts} drafts, {number}"
            logits = (torch.stack(each.logits) for each in (got, plain[number]))
            assert_same_bits(f"logits of request {number}", *logits)
        assert 0 < sum(map(sum, engine.accepted)) < sum(map(sum, engine.drafted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_drafts_are_often_right_and_change_nothing(dtype: str) -> None:
    source = resolve_model("tiny-mtp")
    texts = ("def ", "class Reader:\n", "import os\n", "    def __init__(self, name):\n") * 8
    prompts = [Tokenizer.load(source).encode(text) for text in texts]
    options = {"dtype": dtype, "device": GPU, "max_model_len": 256, "max_step_tokens": 128}
    plain = LocalEngine(source.path, **options).generate(prompts, 100)
    engine = LocalEngine(source.path, num_drafts=3, **options)
    for number, got in enumerate(engine.generate(prompts, 100)):
        assert got.token_ids == plain[number].token_ids, f"request {number}"
        logits = (torch.stack(each.logits) for each in (got, plain[number]))
        assert_same_bits(f"logits of request {number}", *logits)
    right, made = sum(map(sum, engine.accepted)), sum(map(sum, engine.drafted))
    assert right > 0.4 * made, f"{right} of {made} drafts are right"
