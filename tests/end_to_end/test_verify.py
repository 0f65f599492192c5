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


WHOLE = ("--batch", "1,4", "--chunk", "none,64", "--seeded", "--speculate", "off")
FEW = ("--prompts", "3", "--max-tokens", "3")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", ["tiny-mtp", pytest.param("demo", marks=pytest.mark.soak)])
def test_a_model_has_one_answer(tmp_path: Path, model: str) -> None:
    """On one rank and two: alone and in company, its prompt cut, cached, pre-empted, drawn."""
    page = tmp_path / "page.html"
    asked = ("verify", model, "--tp", "1,2", *WHOLE, *FEW, "--json", "--html", str(page))
    out, err = run(*asked, timeout_s=170)
    report = json.loads(out)
    assert report["ok"]
    for tp in (1, 2):
        of_count = [entry for entry in report["settings"] if entry["tp"] == tp]
        assert [entry["label"] for entry in of_count[:9]] == [
            "plain",
            "batch 4",
            "batch 8, chunk 64",
            "batch 8, prefix cache",
            "batch 8, pre-empt",
            "batch 8, chunk 64, pre-empt",
            "batch 4, chunk 64, prefix cache",
            "seeded",
            "batch 4, chunk 64, prefix cache, seeded",
        ]
    between = [entry for entry in report["settings"] if entry["bound"]]
    assert [entry["label"] for entry in between] == ["plain", "seeded"]
    for entry in between:
        assert (entry["tp"], entry["against"]) == (2, "1 rank")
        assert 0 < entry["relative_rms"] < entry["bound"] < 1e-4
    started = r"^unisono: (\d) ranks?, float32: started in [\d.]+ s$"
    assert re.findall(started, err, re.MULTILINE) == ["1", "2"]
    assert page.read_text().count("<svg") == len(report["settings"]) == 18


@pytest.mark.timeout(180)
def test_the_demo_model_answers_alike_in_company_and_chunks() -> None:
    """On two ranks. In all settings, on one rank too: the test above, as `soak`."""
    axes = ("--tp", "2", "--batch", "1,4", "--chunk", "none,64")
    off = ("--prefix-cache", "off", "--pre-empt", "off")
    out, _ = run("verify", "demo", *axes, *off, *FEW, "--json", timeout_s=170)
    report = json.loads(out)
    assert report["ok"]
    labels = [entry["label"] for entry in report["settings"]]
    assert labels == ["plain", "batch 4", "batch 8, chunk 64", "batch 4, chunk 64"]


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


LONGER = ("--load-format", "random", "--prompts", "4", "--max-tokens", "24", "--json")
ALONE = ("--batch", "1", "--chunk", "none", "--prefix-cache", "off", "--pre-empt", "off")


def test_answers_are_the_same_where_a_rank_sleeps_and_loads_again(tmp_path: Path) -> None:
    """Both by default. Weights of a bare config are made again, the same."""
    env = plant(tmp_path, None, {"unisono.workers.model_runner:ModelRunner.step": SLOW})
    out, _ = run("verify", model(tmp_path), *ALONE, *LONGER, env=env)
    report = json.loads(out)
    assert report["ok"]
    assert [entry["label"] for entry in report["settings"]] == [
        "plain",
        "batch 8, sleep",
        "batch 8, reload",
        "batch 8, sleep, reload",
    ]


SLOW = """def planted(original, self, plan):
    import time
    time.sleep(0.01)
    return original(self, plan)"""
"""Else an answer of a tiny model may have ended before an order comes."""
OTHER_WEIGHTS = """
def planted(original, self, path, load_format):
    original(self, path, load_format)
    if self.generation > 1:
        self._model.layers[1].mlp_norm.weight[0] += 1.0
"""


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["sleep", "reload"])
def test_weights_that_are_others_when_they_are_loaded_again_are_found(
    tmp_path: Path, axis: str
) -> None:
    patches = {
        "unisono.workers.weights:Weights.load": OTHER_WEIGHTS,
        "unisono.workers.model_runner:ModelRunner.step": SLOW,
    }
    env = plant(tmp_path, None, patches)
    other = {"sleep": "--reload", "reload": "--sleep"}[axis]
    out, _ = run("verify", model(tmp_path), *ALONE, *LONGER, other, "off", env=env, code=1)
    plain, bad = json.loads(out)["settings"]
    assert (plain["ok"], bad["ok"], bad["note"]) == (True, False, "")
    assert bad["first"]["token"] > 0
    assert bad["finding"] == (
        "first difference: layers.1.mlp_norm add_rms_norm, position 0, rank 0: other bits; with "
        "its reference the difference stays: look at what the op is given"
    )
