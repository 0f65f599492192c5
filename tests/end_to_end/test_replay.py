"""A crash leaves a flight, and `unisono replay` runs its step again on real ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import json_lines, plant, refused, run
from tests.tiny_tokenizers import long_model
from unisono.launcher.flight_file import read_flight

STEP = "unisono.workers.model_runner:ModelRunner.step"
RAISES = """def planted(original, self, plan):
    if plan.step == 7: raise ValueError('planted in a step')
    return original(self, plan)"""
DRAWN = ("--raw", "--ignore-eos", "--temperature", "1.2", "--seed", "3", "--max-model-len", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return long_model(tmp_path_factory.mktemp("model"))


def crash(
    model: str, tmp_path: Path, env: Mapping[str, str], *options: str
) -> tuple[dict[str, Any], Path]:
    """Let the engine fail under `env`; return the JSON of its last line and the flight."""
    flights = tmp_path / "flights"
    _, err = run(
        *("--json-errors", "generate", model, "hello", "good day", *DRAWN, *options),
        *("--flight-dir", str(flights)),
        env=env,
        code=1,
    )
    facts = json.loads(err.strip().splitlines()[-1])
    [file] = flights.iterdir()
    assert facts["flight"] == str(file)
    assert facts["message"].endswith(f"; to run the step again: unisono replay {file}")
    return facts, file


def replay(
    file: Path, *options: str, env: Mapping[str, str] | None = None, code: int = 0
) -> dict[str, Any]:
    before = sorted(file.parent.iterdir())
    out, _ = run("replay", str(file), "--json", *options, env=env, code=code)
    assert sorted(file.parent.iterdir()) == before, "a replay leaves no flight"
    [facts] = json_lines(out)
    return facts


def test_a_rank_that_raises_leaves_a_flight_that_shows_it_again(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it raised, and not what its peer saw of it."""
    env = plant(tmp_path, 1, {STEP: RAISES})
    facts, file = crash(model, tmp_path, env, "--tp", "2")
    fault = "rank 1 failed in phase 'step' (step 7): ValueError: planted in a step"
    assert facts == {
        "error": "ValueError",
        "message": f"{fault}; to run the step again: unisono replay {file}",
        "exit_code": 1,
        "rank": 1,
        "phase": "step",
        "step": 7,
        "flight": str(file),
    }
    again = replay(file, env=env, code=1)
    assert (again["step"], again["fault"]) == (7, fault)
    assert [row["replayed"] for row in again["rows"]] == [None, None]
    healthy = replay(file, "--tp", "1")
    assert healthy["fault"] == ""
    assert [row["recorded"] for row in healthy["rows"]] == [[], []]
    for options in (("--step", "8"), ("--tp", "50")):
        assert len(refused(capsys, "replay", str(file), *options).splitlines()) == 1


def test_a_wrong_token_of_every_rank_is_found(model: str, tmp_path: Path) -> None:
    """Nobody noticed it: the ranks agreed, and failed of something else later."""
    source = """from unisono.workers.model_runner import StepOutput
def planted(original, self, plan):
    if plan.step == 7: raise ValueError('planted in a step')
    tokens = original(self, plan).tokens
    if plan.step == 5: tokens[1] ^= 1
    return StepOutput(tokens, None)"""
    _, file = crash(model, tmp_path, plant(tmp_path, None, {STEP: source}), "--tp", "2")
    found = replay(file, "--step", "5", "--tp", "1", code=1)
    assert [row["equal"] for row in found["rows"]] == [True, False]
    [wrong] = [row for row in found["rows"] if not row["equal"]]
    assert wrong["recorded"] == [wrong["replayed"] ^ 1]


def test_ranks_that_disagree_leave_both_tokens(model: str, tmp_path: Path) -> None:
    source = """from unisono.workers.model_runner import StepOutput
def planted(original, self, plan):
    output = original(self, plan)
    return StepOutput([token ^ (plan.step == 3) for token in output.tokens], None)"""
    facts, file = crash(model, tmp_path, plant(tmp_path, 1, {STEP: source}), "--tp", "2")
    assert (facts["error"], facts["step"]) == ("Diverged", 3)
    fault = "rank 1 failed in phase 'step' (step 3): Diverged: other tokens than rank 0; "
    assert facts["message"].startswith(fault)
    found = replay(file, "--tp", "1", code=1)
    assert found["step"] == 3
    for row in found["rows"]:
        assert row["recorded"] == [row["replayed"], row["replayed"] ^ 1]
        assert row["equal"] is False


@pytest.mark.chaos
@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.soak), "2"])
def test_a_rank_that_dies_without_a_word_leaves_a_flight(
    model: str, tmp_path: Path, ranks: str
) -> None:
    source = f"""import os
def planted(original, self, plan):
    if plan.step == 9: os.kill(os.getpid(), {signal.SIGKILL.value})
    return original(self, plan)"""
    env = plant(tmp_path, int(ranks) - 1, {STEP: source})
    facts, file = crash(model, tmp_path, env, "--tp", ranks)
    assert facts["message"].startswith(f"rank {int(ranks) - 1} (pid ")
    assert "died in phase 'step' by signal 9 (SIGKILL); " in facts["message"]
    assert read_flight(file).find(None).plan.step == 9
    out, err = run("replay", str(file), "--step", "8", "--tp", "1")
    assert out.splitlines()[0].split()[-3:] == ["recorded", "replayed", "equal"]
    assert err.strip().splitlines()[-1] == "unisono: step 8: 0 of 2 tokens differ"


def test_foreign_and_damaged_files_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"foreign": b"{}\n", "missing": None}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        err = refused(capsys, "replay", str(tmp_path / name))
        assert len(err.splitlines()) == 1
        assert str(tmp_path / name) in err


def test_a_directory_for_flights_that_cannot_be_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    err = refused(capsys, "generate", model, "hello", "--flight-dir", str(tmp_path / "file"))
    assert err.startswith(f"unisono: error: --flight-dir {tmp_path / 'file'}: cannot be made")
