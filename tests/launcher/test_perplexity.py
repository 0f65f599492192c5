"""Windows over a text: what counts, how often, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.fakes import FakeEngine, FakeTokenizer, tiny_model, write_checkpoint
from unisono.launcher import cli, perplexity
from unisono.launcher.perplexity import (
    check_windows,
    measure,
    resolve_windows,
    sliding_windows,
)
from unisono.models.config import ConfigError
from unisono.workers.config import WorkerConfig


@given(st.integers(2, 400), st.integers(2, 90), st.data())
def test_every_token_but_the_first_counts_once(count, window, data):
    stride = data.draw(st.integers(1, window - 1))
    windows = list(sliding_windows(count, window, stride))
    counted = [place for each in windows for place in range(each.first, each.stop)]
    assert counted == list(range(1, count))
    for index, each in enumerate(windows):
        assert each.start == index * stride
        assert each.start < each.first < each.stop <= each.start + window


@given(st.integers(2, 400), st.integers(2, 90))
def test_without_overlap_the_first_of_each_window_is_left_out(count, window):
    windows = list(sliding_windows(count, window, window))
    counted = [place for each in windows for place in range(each.first, each.stop)]
    assert counted == [place for place in range(count) if place % window]


def worker(max_model_len=128):
    return WorkerConfig(model_path="m", model=tiny_model(), max_model_len=max_model_len)


def test_defaults():
    assert resolve_windows(None, None, worker(9000)) == (2048, 1024)
    assert resolve_windows(None, None, worker(128)) == (127, 63)
    assert resolve_windows(3, None, worker(128)) == (3, 1)
    assert resolve_windows(None, 100, worker(128)) == (127, 100)
    assert resolve_windows(50, 50, worker(128)) == (50, 50)


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [
        (1, None, "--window 1: must be at least 2"),
        (8, 9, "--stride 9: must be at most --window, 8"),
        (None, 128, "--stride 128: must be at most --window, 127"),
        (None, 0, "--stride 0: must be at least 1"),
        (
            128,
            None,
            "--window 128: with one token of answer that is more than the 128 of "
            "--max-model-len; choose 2 to 127",
        ),
    ],
)
def test_illegal_windows(window, stride, message):
    with pytest.raises(ConfigError) as caught:
        resolve_windows(window, stride, worker())
    assert str(caught.value) == message


def test_a_window_needs_room():
    check_windows(None, None)
    with pytest.raises(ConfigError, match="--max-model-len 2: a window of 2 tokens and one"):
        resolve_windows(None, None, worker(2))


def result_of(in_flight, text=b"The sea is blue and deep.", window=8, stride=5):
    FakeEngine.made = []
    heard = []
    windows = list(sliding_windows(len(text), window, stride))
    result = measure(
        FakeEngine(None),
        FakeTokenizer(),
        list(text),
        windows,
        in_flight=in_flight,
        num_bytes=len(text),
        numerics="cpu",
        on_windows=heard.append,
    )
    assert heard == list(range(1, len(windows) + 1))
    return result


def test_the_sum_takes_each_token_from_its_own_window():
    """The fake engine says -place / 8 of a window's token at `place`."""
    result = result_of(in_flight=2)
    want = sum(
        (place - each.start) / 8
        for each in sliding_windows(25, 8, 5)
        for place in range(each.first, each.stop)
    )
    assert (result.nll, result.tokens, result.num_bytes) == (want, 24, 25)
    assert result.ppl == math.exp(want / 24)
    assert result.bits_per_byte == want / math.log(2) / 25
    for in_flight in (1, 3, 100):
        assert result_of(in_flight) == result
    assert result_of(2, stride=4).digest != result.digest
    assert result_of(2, text=b"The sea is blue and deep!").digest == result.digest


def test_a_likelihood_beyond_numbers_is_infinite():
    numbers = {"tokens": 2, "num_bytes": 4, "digest": ""}
    assert perplexity.Perplexity(nll=math.inf, **numbers).ppl == math.inf
    assert perplexity.Perplexity(nll=5000.0, **numbers).ppl == math.inf


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """`unisono eval ppl` on a tiny checkpoint with a fake engine, of a text's bytes."""
    FakeEngine.made = []
    monkeypatch.setattr("unisono.launcher.engine_client.Engine", FakeEngine)
    monkeypatch.setattr("unisono.launcher.text.tokenizer.Tokenizer", FakeTokenizer)
    model = write_checkpoint(tmp_path / "model")
    text = tmp_path / "text.txt"

    def call(content, *options):
        if content is not None:
            text.write_bytes(content)
        code = cli.run(["eval", "ppl", str(model), "--text", str(text), *options])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(text), "text.txt")

    return call


def test_json_and_text(run):
    code, out, err = run(b"\xef\xbb\xbfThe sea is", "--window", "6", "--stride", "3", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert (facts["tokens"], facts["text_tokens"], facts["bytes"]) == (9, 10, 10)
    assert (facts["window"], facts["stride"], facts["windows"], facts["tp"]) == (6, 3, 3, 1)
    assert facts["ppl"] == pytest.approx(math.exp(facts["nll"] / 9), rel=1e-15)
    assert len(facts["digest"]) == 32
    code, out, err = run(b"The sea is", "--window", "6", "--stride", "3")
    assert (code, err) == (0, "")
    assert f"perplexity     {facts['ppl']:.6g}\n" in out
    assert facts["digest"] in out
    assert FakeEngine.made[-1].log == ["enter", "start", "close"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", (), "--text text.txt: is empty"),
        (b"T", (), "--text text.txt: has 1 token, and the first never counts: at least 2 are "
         "needed"),
        (b"ab\xff", (), "--text text.txt: not UTF-8 at byte 2"),
        (None, (), "--text text.txt: No such file or directory; choose a text file"),
        (b"The sea", ("--window", "4", "--stride", "5"), "--stride 5: must be at most --window, 4"),
        (b"The sea", ("--window", "4000"), "--window 4000: with one token of answer that is more "
         "than the 128 of --max-model-len; choose 2 to 127"),
        (b"The sea", ("--tp", "0"), "--tp 0: must be at least 1"),
        (b"The sea " * 12, ("--kv-tokens", "64"), "--kv-tokens 64: a window has 96 tokens; choose "
         "128 or more, or a --window of 2 to 64"),
    ],
)  # fmt: skip
def test_errors_are_one_line_before_any_rank_starts(run, content, options, message):
    assert run(content, *options) == (2, "", f"unisono: error: {message}\n")
    assert FakeEngine.made == []


def test_a_window_that_never_fits_is_the_users_to_fix(run):
    """The others are aborted before the engine closes."""
    code, out, err = run(b"reject me", "--window", "6", "--stride", "1")
    assert (code, out) == (2, "")
    assert err == ("unisono: error: a window cannot be served: needs 9 blocks, there are 8\n")
    assert FakeEngine.made[-1].log[-1] == "close"
    assert len(FakeEngine.made[-1].aborted) == 3


def test_a_small_cache_serves_windows_and_texts_that_fit(run):
    text = b"The sea " * 12
    assert run(text, "--kv-tokens", "64", "--window", "64")[0] == 0
    assert run(text[:64], "--kv-tokens", "1", "--window", "100")[0] == 0


def test_the_group_shows_its_commands(capsys):
    assert cli.run(["eval"]) == 0
    assert "ppl" in capsys.readouterr().out
