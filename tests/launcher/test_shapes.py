"""Shapes, random weights and overlays at the front door, before an engine that echoes ids."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests.launcher.fakes import CONFIG, FakeEngine, FakeTokenizer, write_checkpoint
from tests.launcher.test_doctor import HOST
from unisono import LLM, SamplingParams
from unisono.launcher import cli
from unisono.launcher.doctor.command import _partition, model_fit
from unisono.launcher.resolve import prepare
from unisono.models.config import ConfigError
from unisono.models.shapes import PREFIX, SHAPES
from unisono.runtime.protocol import RequestRejected

SMALL = "shape:smollm2-135m"


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setattr("unisono.launcher.engine_client.Engine", FakeEngine)
    monkeypatch.setattr("unisono.launcher.offline.Engine", FakeEngine)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(capsys):
    """Run `unisono ...`; return exit code, stdout, lines of stderr."""

    def run(*arguments):
        code = cli.run(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run


@pytest.fixture
def bare(tmp_path):
    """A directory that holds a config and nothing else."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "bare")


def worker():
    [engine] = FakeEngine.made
    return engine.config.runtime.worker


def test_a_shape_answers_ids_with_ids(call):
    code, out, err = call("generate", SMALL, "--prompt-ids", "97,98", "--max-tokens", "3")
    assert (code, out) == (0, "65 66 257\n")
    assert err[-1].startswith("3 tokens in ")
    assert (worker().model_path, worker().load_format) == (SMALL, "random")
    assert worker().model == SHAPES["smollm2-135m"]
    assert worker().num_token_ids == 49152


def test_json_of_a_shape_says_ids_and_their_text(call, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_ids": [98]}\n')
    _, out, _ = call("generate", SMALL, "--prompt-ids", "97", "--prompts-file", str(file), "--json")
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], first["token_ids"], first["text"]) == ([97], [65, 257], "65 257")
    assert (second["prompt"], second["token_ids"]) == ([98], [66, 257])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello"], f"{SMALL} has no tokenizer: give token ids (--prompt-ids"),
        (["--prompt-ids", "49152"], "the prompt has token id 49152: the model's ids run from 0 to"),
        (["--prompt-ids", "1", "--stop", "x"], f"--stop 'x': {SMALL} has no tokenizer"),
        (["--prompt-ids", "1", "--load-format", "dummy"], "--load-format dummy: choose auto or"),
        (["--prompt-ids", "1", "--overlay", "bias=random"], "--overlay bias=random: 'bias=random'"),
        (["--prompt-ids", "1", "--tp", "10"], "tp=10: 9 query heads"),
        (["--prompt-ids", "1", "--max-model-len", "8193"], "--max-model-len 8193: the model's"),
    ],
    ids=str,
)
def test_a_shape_refuses_before_anything_starts(call, arguments, message):
    code, out, err = call("generate", SMALL, *arguments)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("unisono: error: " + message)
    assert FakeEngine.made == []


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "doctor"])
def test_unknown_shapes_are_refused_everywhere(call, command):
    code, _, err = call(command, "shape:nope", *(["x"] if command == "generate" else []))
    legal = ", ".join(PREFIX + name for name in SHAPES)
    assert (code, err) == (
        2,
        [f"unisono: error: model 'shape:nope' is no known shape; choose {legal}"],
    )


def test_chat_needs_a_tokenizer(call):
    code, _, err = call("chat", SMALL)
    wanted = f"unisono: error: {SMALL} has no tokenizer: use unisono generate with --prompt-ids"
    assert (code, err) == (2, [wanted])


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_inspected(call, name):
    code, out, err = call("inspect", PREFIX + name, "--tp", "2", "--dtype", "bfloat16", "--json")
    report = json.loads(out)
    assert (code, err) == (0, [])
    assert report["weights_from"] == "random"
    assert len(report["ranks"]) == 2
    assert report["facts"]["layers"] == SHAPES[name].num_layers


def test_inspect_says_what_is_random(call, tmp_path, bare):
    model = str(write_checkpoint(tmp_path / "model"))
    assert "on 1 rank, from files\n" in call("inspect", model)[1]
    overlay = ("--overlay", "norm=random")
    assert "on 1 rank, from files, norm random\n" in call("inspect", model, *overlay)[1]
    assert "on 1 rank, random\n" in call("inspect", bare, "--load-format", "random")[1]
    code, _, err = call("inspect", bare, "--overlay", "qk-norm=random")
    assert (code, err[-1][-33:]) == (2, "legal for this model: norm=random")


def test_random_weights_need_a_config_only(call, bare):
    arguments = ["generate", bare, "--prompt-ids", "97", "--load-format", "random"]
    code, out, _ = call(*arguments, "--overlay", "norm=random")
    assert (code, out) == (0, "65 257\n")
    assert (worker().model_path, worker().load_format) == (bare, "random")
    assert worker().overlay == "norm=random"
    code, _, err = call(*arguments[:-2])
    assert code == 2
    assert "safetensors" in err[0]


def test_random_weights_ignore_broken_files_and_keep_the_tokenizer(tmp_path):
    path = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        prepare(str(path), {}, {})
    prepared = prepare(str(path), {"load_format": "random"}, {})
    assert prepared.worker.model.tie_word_embeddings
    assert prepared.has_tokenizer


def test_a_library_takes_ids(tmp_path, monkeypatch):
    monkeypatch.setattr("unisono.launcher.offline.Tokenizer", FakeTokenizer)
    with LLM(str(write_checkpoint(tmp_path / "model")), tp=2) as llm:
        assert [each.text for each in llm.generate([[97, 98], "c", (100,)])] == ["AB", "C", "D"]
        [answer] = llm.generate([97, 98])
        assert (answer.prompt, answer.text, answer.num_prompt_tokens) == ("97 98", "AB", 2)
        assert "".join(piece.text for piece in llm.stream([97, 98])) == "AB"
        with pytest.raises(
            RequestRejected, match=r"token id 300: the model's ids run from 0 to 299$"
        ):
            llm.generate([300])
        with pytest.raises(RequestRejected, match="prompt 2 of 2 has token id -1"):
            llm.generate([[1], [-1]])
        for bad in ([1.5], [[1, "a"]], [[]], [True]):
            with pytest.raises(ConfigError, match=r"prompt 1 is a \w+: choose a text or a list of"):
                llm.generate(bad)


def test_a_library_serves_shapes():
    with LLM(SMALL, overlay="norm=random") as llm:
        [answer] = llm.generate([97, 98], SamplingParams(max_tokens=2))
        assert (answer.text, answer.token_ids) == ("65 66", (65, 66))
        with pytest.raises(ConfigError, match="has no tokenizer: give token ids"):
            llm.generate("text")
        with pytest.raises(ConfigError, match="--stop 'x': shape:smollm2-135m has no tokenizer"):
            llm.generate([1], SamplingParams(stop=("x",)))
        with pytest.raises(ConfigError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_doctor_knows_what_a_shape_needs():
    partition = _partition("shape:qwen3-32b", {"tp": 2})
    fit = model_fit("shape:qwen3-32b", partition, "bfloat16", HOST)
    head = 151936 * 5120
    assert fit.weight_bytes >= 2 * 32_762_123_264 + 2 * head
    assert not fit.fits
