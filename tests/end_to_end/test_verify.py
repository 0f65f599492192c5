"""`unisono verify` with real processes: a sound model passes, a faulty rank is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.command import plant, run
from tests.launcher.fakes import CONFIG

SMALL = ("--load-format", "random", "--prompts", "4", "--max-tokens", "4", "--json")
FAULT = """
def planted(original, *args):
    from unisono.ops import dispatch
    from unisono.ops.reference.activation import silu_and_mul

    def noisy(x):
        return silu_and_mul(x) * (1.0 + 1e-3 * (len(x) > 80))

    with dispatch.use(silu_and_mul=noisy):
        return original(*args)
"""


def model(directory: Path) -> str:
    config = {**CONFIG, "max_position_embeddings": 128}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.timeout(180)
def test_the_demo_model_has_one_answer(tmp_path: Path) -> None:
    """On one rank and two: alone and in company, its prompt cut, cached, pre-empted, drawn."""
    page = tmp_path / "page.html"
    axes = ("--tp", "1,2", "--batch", "1,8", "--chunk", "none,64", "--seeded")
    few = ("--prompts", "3", "--max-tokens", "3")
    out, err = run("verify", "demo", *axes, *few, "--json", "--html", str(page), timeout_s=170)
    report = json.loads(out)
    assert report["ok"]
    for tp in (1, 2):
        of_count = [entry for entry in report["settings"] if entry["tp"] == tp]
        assert [entry["label"] for entry in of_count[:9]] == [
            "plain",
            "batch 8",
            "chunk 64",
            "prefix cache",
            "batch 6, pre-empt",
            "batch 8, chunk 64, pre-empt",
            "batch 8, chunk 64, prefix cache",
            "seeded",
            "batch 8, chunk 64, prefix cache, seeded",
        ]
    [between] = [entry for entry in report["settings"] if entry["bound"]]
    assert (between["tp"], between["against"]) == (2, "1 rank")
    assert 0 < between["relative_rms"] < between["bound"] < 1e-4
    started = r"^unisono: (\d) ranks?, float32: started in [\d.]+ s$"
    assert re.findall(started, err, re.MULTILINE) == ["1", "2"]
    assert page.read_text().count("<svg") == len(report["settings"]) == 18


def test_a_faulty_rank_is_named(tmp_path: Path) -> None:
    name = model(tmp_path)
    env = plant(tmp_path, 1, {"unisono.ops.dispatch:resolve": FAULT})
    axes = ("--tp", "2", "--batch", "1,4", "--chunk", "none")
    off = ("--prefix-cache", "off", "--pre-empt", "off")
    out, _ = run("verify", name, *axes, *off, *SMALL, env=env, code=1)
    _, batch = json.loads(out)["settings"]
    assert not batch["ok"]
    assert batch["first"]["margin"] is not None
    assert batch["finding"] == (
        "first difference: layers.0.mlp silu_and_mul, position 0, rank 1: other bits; with its "
        "reference the difference is gone: the kernel is at fault"
    )
