"""Log-probabilities at the front door: cut with their tokens, and shown or refused."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launcher.fakes import (
    EOS,
    FakeEngine,
    FakeTokenizer,
    logprob_items,
    write_checkpoint,
)
from tests.tiny_tokenizers import TEXTS, byte_level_tokenizer, sentence_piece_tokenizer
from unisono.launcher import cli
from unisono.launcher.answering import Request, answer_all
from unisono.launcher.logprobs import TopLogprob
from unisono.launcher.offline import LLM
from unisono.launcher.text.tokenizer import Tokenizer
from unisono.models.config import ConfigError
from unisono.runtime.protocol import Delta, Finished, SamplingParams


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setattr("unisono.launcher.engine_client.Engine", FakeEngine)
    monkeypatch.setattr("unisono.launcher.offline.Engine", FakeEngine)
    monkeypatch.setattr("unisono.launcher.text.tokenizer.Tokenizer", FakeTokenizer)
    monkeypatch.setattr("unisono.launcher.offline.Tokenizer", FakeTokenizer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return str(write_checkpoint(tmp_path / "model"))


class OneAnswer:
    """An engine whose deltas carry several tokens, and their log-probabilities, at a time."""

    def __init__(self, ids, sizes, params):
        self.events = []
        at = 0
        while at < len(ids):
            new = ids[at : at + sizes[len(self.events) % len(sizes)]]
            self.events.append(
                Delta(
                    request_id=1,
                    token_ids=array("i", new),
                    logprobs=logprob_items(new, params.logprobs, at),
                    prompt_logprobs=None
                    if at
                    else logprob_items([5, 6], params.prompt_logprobs, 1),
                )
            )
            at += len(new)
        self.events.append(
            Finished(
                request_id=1,
                reason="length",
                num_prompt_tokens=3,
                num_tokens=len(ids),
                first_token_s=0.1,
                total_s=0.2,
            )
        )

    def submit(self, prompt_ids, params, priority):
        return 1

    def abort(self, request_id):
        pass

    def poll(self, timeout_s):
        return [self.events.pop(0)]


@settings(max_examples=200)
@given(
    ids=st.lists(st.sampled_from([*b"ab.\xc3\xa9", EOS]), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    stops=st.lists(st.sampled_from(["a", "b.", ".a", "\u00e9"]), max_size=2).map(tuple),
    num_top=st.integers(0, 3),
)
def test_text_ids_and_log_probabilities_are_cut_at_the_same_token(ids, sizes, stops, num_top):
    """B62, B72: also where one delta carries tokens past a stop string; as many as tokens."""
    params = SamplingParams(stop=stops, logprobs=num_top, prompt_logprobs=0)
    request = Request(index=0, prompt="p", prompt_ids=(4, 5, 6))
    engine = OneAnswer(ids, sizes, params)
    *pieces, answer = answer_all(engine, FakeTokenizer(), [request], params)
    assert answer.token_ids == tuple(ids[: len(answer.token_ids)])
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    places = range(len(answer.token_ids))
    assert [entry.logprob for entry in answer.logprobs] == [-place / 8 for place in places]
    assert [entry.rank for entry in answer.logprobs] == [place + 1 for place in places]
    for entry in answer.logprobs:
        assert [top.token_id for top in entry.top] == list(range(min(num_top, 2)))
        assert [top.logprob for top in entry.top] == [-0.5, -1.5][:num_top]
    carried = [entry for piece in pieces for entry in piece.logprobs]
    assert carried == list(answer.logprobs[: len(carried)])
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    first, *others = answer.prompt_logprobs
    assert first is None
    assert [(entry.token_id, entry.logprob) for entry in others] == [(5, -0.125), (6, -0.25)]
    assert [piece.prompt_logprobs for piece in pieces] == [
        answer.prompt_logprobs if place == 0 else None for place in range(len(pieces))
    ]


def test_nobody_gets_what_was_not_asked_for():
    request = Request(index=0, prompt="p", prompt_ids=(4, 5, 6))
    for params, has_own, has_prompts in (
        (SamplingParams(), False, False),
        (SamplingParams(logprobs=0), True, False),
        (SamplingParams(prompt_logprobs=0), False, True),
    ):
        engine = OneAnswer([*b"ab"], [1], params)
        piece, *_, answer = answer_all(engine, FakeTokenizer(), [request], params)
        for event in (piece, answer):
            assert (event.logprobs is not None) == has_own
            assert (event.prompt_logprobs is not None) == has_prompts


def test_the_only_token_of_a_prompt_has_none(model):
    with LLM(model) as llm:
        [answer] = llm.generate("a", SamplingParams(prompt_logprobs=1))
    assert answer.prompt_logprobs == (None,)


def test_every_way_to_ask_gives_them(model):
    params = SamplingParams(logprobs=1, prompt_logprobs=0)

    async def read(llm):
        async with llm.astream("ab", params) as stream:
            pieces = [piece async for piece in stream]
        return pieces, stream.answer, (await llm.agenerate("ab", params))[0]

    with LLM(model) as llm:
        [whole] = llm.generate("ab", params)
        with llm.stream("ab", params) as stream:
            pieces = list(stream)
        chat = llm.chat([{"role": "user", "content": "ab"}], params)
        apieces, astreamed, agenerated = asyncio.run(read(llm))
    assert [entry.token for entry in whole.logprobs] == [b"A", b"B", b"<257>"]
    assert [entry.token for entry in whole.prompt_logprobs[1:]] == [b"b"]
    assert whole.logprobs[2].top == (TopLogprob(token_id=0, token=b"\0", logprob=-0.5),)
    for answer in (stream.answer, astreamed, agenerated):
        assert (answer.logprobs, answer.prompt_logprobs) == (whole.logprobs, whole.prompt_logprobs)
    assert chat.logprobs == whole.logprobs
    assert len(chat.prompt_logprobs) == chat.num_prompt_tokens
    for found in (pieces, apieces):
        assert sum((piece.logprobs for piece in found), ()) == whole.logprobs[:2]
        assert found[0].prompt_logprobs == whole.prompt_logprobs


def test_illegal_numbers_are_refused_before_anything_runs(model):
    with LLM(model) as llm, pytest.raises(ConfigError, match=r"^--logprobs 21: must be at least 0"):
        llm.generate("a", SamplingParams(logprobs=21))


def test_json_holds_ids_text_bytes_and_the_likeliest(model, capsys):
    arguments = ["generate", model, "\u00e9", "--raw", "--json", "--max-tokens", "1"]
    assert cli.run([*arguments, "--logprobs", "2", "--prompt-logprobs", "0"]) == 0
    line = json.loads(capsys.readouterr().out)
    # The answer is cut in the middle of a character.
    assert line["logprobs"] == [
        {
            "id": 0xC3,
            "text": "\ufffd",
            "bytes": [0xC3],
            "logprob": 0.0,
            "rank": 1,
            "top": [
                {"id": 0, "text": "\0", "bytes": [0], "logprob": -0.5},
                {"id": 1, "text": "\x01", "bytes": [1], "logprob": -1.5},
            ],
        }
    ]
    assert line["prompt_logprobs"] == [
        None,
        {
            "id": 0xA9,
            "text": "\ufffd",
            "bytes": [0xA9],
            "logprob": -0.125,
            "rank": 2,
            "top": [],
        },
    ]
    assert cli.run(arguments) == 0
    assert not {"logprobs", "prompt_logprobs"} & json.loads(capsys.readouterr().out).keys()


def test_a_rejected_prompt_has_none(model, capsys):
    options = ["--json", "--logprobs", "1", "--prompt-logprobs", "1"]
    assert cli.run(["generate", model, "reject", *options]) == 2
    line = json.loads(capsys.readouterr().out)
    assert line["logprobs"] == []
    assert "prompt_logprobs" not in line


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_where_they_cannot_be_shown_they_are_refused(model, capsys, flag):
    """Never ignored: text has no place for them, a chat neither."""
    assert cli.run(["generate", model, "hi", flag, "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"unisono: error: {flag} 3: log-probabilities are JSON only: add --json\n"
    assert cli.run(["chat", model, flag, "3"]) == 2
    err = capsys.readouterr().err
    assert f"No such option '{flag}'" in err.replace(": -", " '-")
    assert err.endswith("see unisono chat --help\n")
    assert FakeEngine.made == []


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
@given(pieces=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4))
def test_the_bytes_of_tokens_join_to_the_text(kind, pieces):
    backend = byte_level_tokenizer() if kind == "byte-level" else sentence_piece_tokenizer()
    tokenizer = Tokenizer(backend, special_tokens={}, templates={})
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8")
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    # What a decoder removes at the start of a text stays with the first token.
    assert joined in (whole, " " + whole)
    assert tokenizer.token_bytes(10**6) == b""
