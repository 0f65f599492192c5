"""`unisono eval ppl` of the demo model on 1, 2 and 3 ranks, against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.demo_oracle import demo_oracle
from tests.end_to_end.command import run

WINDOW, STRIDE = 96, 48
TEXT = (
    "The harbour was quiet before the sun came up. A few gulls walked along the wall and waited "
    "for the boats, which had left in the night and would be back by seven with herring, with "
    "crab if the pots had been kind, and with stories that nobody quite believed.\n\n"
    "Ana counted the lamps on the water. There were eleven, then ten. She asked her brother "
    "whether a lamp could go out by itself; he said that lamps do what the wind tells them. "
    "In 1987 the wind had told forty of them to go out, and the village still spoke about it: "
    "the price of oil, the new engine, the letter from the ministry. Zwölf Boxkämpfer, she wrote "
    "in her notebook, because the teacher liked the sentence.\n"
)


def oracle(ids: list[int]) -> tuple[float, int]:
    """Sum and number of the negative log-likelihoods, as transformers' documentation has them."""
    model, _ = demo_oracle()
    total, count, done = 0.0, 0, 0
    for start in range(0, len(ids), STRIDE):
        stop = min(start + WINDOW, len(ids))
        window = torch.tensor([ids[start:stop]])
        labels = window.clone()
        labels[:, : max(done - start, 0)] = -100
        with torch.no_grad():
            loss = model(window, labels=labels).loss
        tokens = int((labels[:, 1:] != -100).sum())
        total += loss.item() * tokens
        count += tokens
        done = stop
        if stop == len(ids):
            break
    return total, count


def evaluate(path: Path, *options: str) -> dict[str, Any]:
    settings = ("--window", str(WINDOW), "--stride", str(STRIDE), "--dtype", "float32", "--json")
    out, _ = run("eval", "ppl", "demo", "--text", str(path), *settings, *options)
    return json.loads(out)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((3,), marks=pytest.mark.soak)], ids=str)
def test_the_demo_models_is_transformers_on_any_rank_count(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """Two ranks hold unequal shares of its nine heads in three groups."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    total, count = oracle(demo_oracle()[1](TEXT)["input_ids"])
    results = [evaluate(path, "--tp", str(tp)) for tp in ranks]
    for result in results:
        assert result["tokens"] == count
        assert result["bytes"] == len(TEXT.encode())
        assert result["nll"] == pytest.approx(total, rel=1e-4)
        assert result["ppl"] == pytest.approx(math.exp(total / count), rel=1e-3)
    # However the windows are computed together, no bit changes.
    few = ("--max-requests", "1", "--max-step-tokens", "64")
    other = evaluate(path, "--tp", str(ranks[0]), *few)
    assert (other["nll"], other["digest"]) == (results[0]["nll"], results[0]["digest"])
