"""`--against transformers`: what is refused, what its process answers, how it fails."""

from __future__ import annotations

import importlib.util
import os
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launcher import fake_oracle
from tests.launcher.fakes import logprob_items, tiny_model
from tests.paths import python_path
from tests.rig import LocalEngine
from tests.tiny import random_ids, write_checkpoint
from unisono.launcher.model_source import ModelSource
from unisono.launcher.verify import oracle as verify_oracle
from unisono.launcher.verify import oracle_process
from unisono.launcher.verify.bounds import closeness, entries, oracle_bound
from unisono.launcher.verify.oracle import Oracle, OracleBroken, ask_oracle, check_oracle
from unisono.launcher.verify.oracle_process import (
    ORACLE_REPORTS,
    OracleAnswer,
    OracleFailed,
    OracleOrders,
    _answers,
)
from unisono.launcher.verify.run import NUM_TOP
from unisono.models.config import ConfigError, ExpertsConfig, RopeConfig
from unisono.runtime.protocol import SamplingParams
from unisono.workers.channel import Hub
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import int32s

DIRECTORY = ModelSource(name="dir", path=Path("/dir"), kind="huggingface")
FILE = ModelSource(name="m.gguf", path=Path("/dir/m.gguf"), kind="gguf")
SHAPE = ModelSource(name="shape:x", path=Path("shape:x"), kind="shape")


def worker(**changes: Any) -> WorkerConfig:
    return WorkerConfig(model_path="/dir", **{"model": tiny_model(), **changes})


def rope(kind: str, **changes: Any) -> WorkerConfig:
    return worker(model=tiny_model(rope=RopeConfig(rope_type=kind, rotary_dim=4, **changes)))


def experts() -> WorkerConfig:
    return worker(
        model=tiny_model(experts=ExpertsConfig(num_experts=8, num_experts_per_tok=2, width=16))
    )


@pytest.mark.parametrize(
    ("source", "config", "absent", "message"),
    [
        (SHAPE, worker(), "", "the weights of shape:x are random here, and transformers would"),
        (DIRECTORY, worker(load_format="random"), "", "the weights of dir are random here"),
        (DIRECTORY, worker(overlay="bias=random"), "", "--overlay bias=random replaces weights"),
        (DIRECTORY, worker(), "transformers", "transformers is not installed; run pip install tr"),
        (FILE, worker(), "accelerate", "accelerate is not installed; run pip install accelerate"),
        (
            DIRECTORY,
            experts(),
            "",
            "in bfloat16 a near tie sends a token to other experts than in float32",
        ),
        (DIRECTORY, rope("dynamic"), "", "rotary embedding of type dynamic changes its freq"),
        (
            DIRECTORY,
            rope("longrope", original_max_position_embeddings=64),
            "",
            "rotary embedding of type longrope changes its frequencies there as a request grows "
            "past 64 tokens",
        ),
    ],
)
def test_what_transformers_cannot_be_asked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    source: ModelSource,
    config: WorkerConfig,
    absent: str,
    message: str,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == absent else find(name)
    )
    with pytest.raises(ConfigError) as caught:
        check_oracle(source, config, ("float32", "bfloat16"), 129)
    assert str(caught.value).startswith(f"--against transformers: {message}")


def test_what_it_can_be_asked_passes() -> None:
    check_oracle(DIRECTORY, worker(), ("bfloat16",), 129)
    check_oracle(DIRECTORY, experts(), ("float32",), 129)
    check_oracle(FILE, worker(), ("bfloat16",), 129)
    check_oracle(DIRECTORY, rope("dynamic"), ("bfloat16",), 128)
    check_oracle(
        DIRECTORY, rope("yarn", factor=2.0, original_max_position_embeddings=64), ("bfloat16",), 129
    )


@pytest.mark.parametrize("name", ["llama-bias-llama3", "qwen2-sliding", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_process_says_what_we_say(name: str, dtype: str, tmp_path: Path) -> None:
    """And a rotation by another base is far beyond the bound."""
    write_checkpoint(name, tmp_path)
    engine = LocalEngine(tmp_path, dtype=dtype)
    sequences = [random_ids(count, engine.config.vocab_size, seed=count) for count in (70, 3)]
    params = [SamplingParams(prompt_logprobs=NUM_TOP)] * 2
    ours = [int32s(a.prompt_logprobs) for a in engine.generate(sequences, 1, params=params)]
    bound = oracle_bound(engine.config, dtype)

    def distance(path: Path) -> float:
        theirs = [answer.logprobs for answer in _answers(orders(path, sequences, ours))]
        pairs = [
            (list(entries(mine, NUM_TOP)), list(entries(other, NUM_TOP + 1)))
            for mine, other in zip(ours, theirs, strict=True)
        ]
        assert [len(other) for _, other in pairs] == [69, 2]
        for mine, other in pairs:
            for (_, top), (own, base_top) in zip(mine, other, strict=True):
                assert top.keys() <= base_top.keys()
                assert own <= max(base_top.values()) == next(iter(base_top.values()))
        return closeness(pairs).relative_rms

    assert distance(tmp_path) < bound
    config = (tmp_path / "config.json").read_text()
    base = "500000.0" if "llama" in name else "1000000.0" if name == "qwen3" else "10000.0"
    assert base in config
    (tmp_path / "config.json").write_text(config.replace(base, "5000.0"))
    assert distance(tmp_path) > bound


def test_its_process_answers_over_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence is answered, then one that no model can have ends it; all without a process."""
    write_checkpoint("qwen3", tmp_path)
    ids = logprob_items([4], NUM_TOP, 1) or int32s()
    asked = replace(
        orders(tmp_path, [[3, 4], [3, 99999]], [ids, ids]),
        endpoint=f"ipc://{tmp_path}/oracle",
        session="s",
    )
    monkeypatch.setattr(oracle_process, "read_orders", lambda kind: (asked, os.getpid()))
    monkeypatch.setattr(oracle_process, "die_with_parent", lambda parent: None)
    with Hub(asked.endpoint, ORACLE_REPORTS, "s") as hub:
        oracle_process.main()
        _, answer = hub.receive(5) or ("", None)
        _, failed = hub.receive(5) or ("", None)
    assert isinstance(answer, OracleAnswer)
    assert len(list(entries(answer.logprobs, NUM_TOP + 1))) == 1
    assert isinstance(failed, OracleFailed)
    assert failed.message.startswith("IndexError: ")


def orders(path: Path, sequences: list[list[int]], ours: list[array[int]]) -> OracleOrders:
    return OracleOrders(
        directory=str(path),
        gguf_file="",
        device="cpu",
        threads=torch.get_num_threads(),
        endpoint="",
        session="",
        num_ids=NUM_TOP,
        sequences=tuple(map(int32s, sequences)),
        ids=tuple(map(verify_oracle._ids_of, ours)),
    )


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_checkpoint("qwen3", tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(LookupError, match=r"no weights for model\.norm\.weight"):
        next(_answers(orders(tmp_path, [[3, 4]], [int32s()])))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[array[int]]]:
    monkeypatch.setattr(verify_oracle, "ENTRY", fake_oracle.ENTRY)

    def ask_about(name: str, silence_s: float = 20.0) -> list[array[int]]:
        source = replace(DIRECTORY, path=tmp_path / name)
        oracle = Oracle(source=source, device="cpu", threads=1, silence_s=silence_s)
        forced = [logprob_items([7, 8], NUM_TOP, 1) or int32s(), int32s()]
        environ = {**os.environ, "PYTHONPATH": python_path()}
        monkeypatch.setenv("PYTHONPATH", python_path())
        return list(ask_oracle(oracle, [[6, 7, 8], [9]], forced, environ))

    return ask_about


def test_sequences_and_ids_reach_it_and_answers_come_in_order(
    ask: Callable[..., list[array[int]]],
) -> None:
    first, second = ask("answers")
    ids = [0, 1, *[-1] * (NUM_TOP - 2)]
    assert first == int32s([6, 7, 8, *ids, *ids])
    assert second == int32s([9])


@pytest.mark.parametrize(
    ("name", "silence_s", "message"),
    [
        ("fails", 20.0, "OSError: no such architecture"),
        ("dies", 20.0, "its process ended with signal 9"),
        ("hangs", 0.5, "it said nothing for 0.5 s"),
    ],
)
def test_its_end_is_told(
    ask: Callable[..., list[array[int]]], name: str, silence_s: float, message: str
) -> None:
    with pytest.raises(OracleBroken, match=message):
        ask(name, silence_s)
