"""`unisono verify` with real processes: a sound model passes, a faulty rank is named."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_a_sound_model_passes_on_one_and_two_ranks(tmp_path: Path) -> None:
    out, err = run(
        "verify", model(tmp_path), "--tp", "1,2", "--batch", "1,4", "--chunk", "none", *SMALL
    )
    report = json.loads(out)
    assert report["ok"]
    assert {entry["tp"] for entry in report["settings"]} == {1, 2}
    labels = [entry["label"] for entry in report["settings"] if entry["tp"] == 2]
    assert labels[:4] == ["plain", "batch 4", "prefix cache", "batch 6, pre-empt"]
    assert all(entry["tokens"] >= 16 for entry in report["settings"])
    assert "promises hold" in err


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


def test_bad_options_end_with_2_before_anything_starts(tmp_path: Path) -> None:
    _, err = run("verify", model(tmp_path), "--chunk", "8", *SMALL, code=2)
    assert err == ("unisono: error: --chunk 8: expected none or a whole number from 64 up\n")
