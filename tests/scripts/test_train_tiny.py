"""scripts/train_tiny.py: a few steps on the CPU leave a checkpoint that the engine serves."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.closeness import assert_close
from tests.end_to_end.command import environment, run
from tests.models.draft_rig import DraftingRank, on_ranks
from tests.paths import ROOT
from tests.tiny import random_ids

COMMAND = (sys.executable, str(ROOT / "scripts" / "train_tiny.py"), "--tiny", "--device", "cpu")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Products are so small here that threads would only wait for each other."""
SAME = 1e-5
"""Relative rms in fp32: the same sums in another order."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory and what was printed."""
    path = tmp_path_factory.mktemp("trained")
    command = [*COMMAND, "--output", str(path), "--steps", "3"]
    done = subprocess.run(
        command, env=environment(ONE_THREAD), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return path, done.stdout


@pytest.fixture
def model(trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was trained, as the script has it, fp32."""
    import safetensors.torch

    monkeypatch.syspath_prepend(ROOT / "scripts")
    config = json.loads((trained[0] / "config.json").read_text())
    model = importlib.import_module("tiny_model").TinyModel(config)
    tensors = safetensors.torch.load_file(trained[0] / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def test_it_says_how_it_goes(trained: tuple[Path, str]) -> None:
    path, out = trained
    assert re.search(r"step 2, \d+ s: loss \d\.\d+, drafts .* rate .* tok/s, .* epochs", out)
    assert re.search(r"step 3: held out \d\.\d+ nats a token, drafts agree .*%, .*%, .*%", out)
    assert out.count("tokens a step, drafts right") == 4
    facts = json.loads(out.splitlines()[-1])
    assert facts["steps"] == 3
    assert facts["files"] == {each.name: each.stat().st_size for each in path.iterdir()}


def test_the_engine_serves_what_was_trained(trained: tuple[Path, str]) -> None:
    out, err = run(
        *("generate", str(trained[0]), "import", "--max-tokens", "8"),
        *("--ignore-eos", "--speculate", "3", "--json"),
    )
    answer = json.loads(out)
    assert len(answer["token_ids"]) == 8
    assert "drafts right" in err


def test_it_trains_what_the_engine_computes(trained: tuple[Path, str], model: Any) -> None:
    """States, drafts of true states, and drafts behind drafts, which read what they themselves
    made of the first."""
    ids = random_ids(128, 512)

    def ours(rank: DraftingRank) -> tuple[Any, ...]:
        hidden = rank.forward(ids)
        return hidden, rank.draft(ids[1:], hidden[:-1]), *rank.chain(ids[:100], hidden[:99], 3)

    [(hidden, states, drafts, logits)] = on_ranks(trained[0], 1, ours)
    with torch.no_grad():
        want = model.hidden(torch.tensor([ids]))
        assert_close("states", hidden, want[0], SAME)
        following = torch.tensor([[*ids[1:100], *drafts[:2]]])
        chain = model.drafts(want[:, :99], following, 3)
        assert_close("states of drafts", states[:99], chain[0][0], SAME)
        last = model.logits(torch.stack([state[0, -1] for state in chain]))
        assert_close("logits of a chain", logits, last, SAME)


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    command = [*COMMAND, "--output", str(tmp_path), "--seconds", "80"]
    process = subprocess.Popen(
        command, env=environment(ONE_THREAD), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith("step"):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=80)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "interrupted: the weights so far are kept" in out
    assert (tmp_path / "model.safetensors").stat().st_size > 1 << 18
