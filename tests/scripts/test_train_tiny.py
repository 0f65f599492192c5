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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "-1", "--seconds", "5"), "--steps -1: must be at least 1"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--steps", "x"), "argument --steps: invalid int value: 'x'"),
        (("--seconds", "0"), "--seconds 0.0: must be a number above 0"),
        (("--seconds", "nan"), "--seconds nan: must be a number above 0"),
        (("--seconds", "inf"), "--seconds inf: must be a number above 0"),
        (("--batch", "-3"), "--batch -3: must be at least 1 and at most 4096"),
        (("--batch", "0"), "--batch 0: must be at least 1 and at most 4096"),
        (("--length", "-64"), "--length -64: must be a multiple of 64, at least 64 and at most 2"),
        (("--length", "0"), "--length 0: must be a multiple of 64"),
        (("--length", "100"), "--length 100: must be a multiple of 64"),
        (("--length", "4096"), "--length 4096: must be a multiple of 64"),
        (("--lr", "nan"), "--lr nan: must be above 0 and at most 1"),
        (("--lr", "-1"), "--lr -1.0: must be above 0 and at most 1"),
        (("--seed", "-1"), "--seed -1: must be at least 0"),
        (("--seed", str(2**63)), f"--seed {2**63}: must be at least 0 and at most {2**63 - 1}"),
        (("--device", "foo"), "argument --device: invalid choice: 'foo' (choose from "),
        (("--device", "cuda"), "--device cuda: torch sees no GPU here; choose cpu"),
        (("--output", ""), "--output '': must be a directory, new or one to write to"),
        (("--output", __file__), f"--output {__file__}: File exists; choose a directory, new or"),
        (("--output", f"{__file__}/x"), f"--output {__file__}/x: Not a directory; choose a dir"),
        (("--output", "x\0"), "embedded null byte; choose a directory, new or one to write to"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    parse = importlib.import_module("tiny_arguments").parse_arguments
    path = tmp_path / "new"
    with pytest.raises(SystemExit) as caught:
        parse("", ["--output", str(path), *arguments])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not path.exists()


def test_untrained_weights_replace_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("trained")
    command = [*COMMAND, "--output", str(tmp_path), "--seconds", "1e-9"]
    done = subprocess.run(
        command, env=environment(ONE_THREAD), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"nothing was trained: {tmp_path} is left as it is" in done.stderr
    assert [file.read_text() for file in tmp_path.iterdir()] == ["trained"]


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
