"""`unisono generate` in front of an engine that answers each prompt in capitals."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from array import array
from contextlib import nullcontext
from dataclasses import replace

import pytest

import unisono
from tests.launcher.fakes import EOS, FakeEngine, FakeTokenizer, tiny_model, write_checkpoint
from unisono.launcher import cli
from unisono.launcher.answering import (
    Answer,
    Piece,
    Request,
    answer_all,
    numerics_of,
)
from unisono.launcher.console import Console
from unisono.launcher.generate import closing_line, ready_line, show
from unisono.launcher.prompts import Prompt, check_prompts
from unisono.launcher.roofline import H200_COPY
from unisono.models.shapes import SHAPES
from unisono.runtime.protocol import EngineReady, RequestRejected, SamplingParams, WorkerLost
from unisono.workers.config import WorkerConfig

RENDEZVOUS = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def model(tmp_path):
    return str(write_checkpoint(tmp_path / "model"))


@pytest.fixture
def generate(model, monkeypatch, capsys):
    """Run `unisono generate MODEL ...`; return exit code, stdout, lines of stderr."""
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setattr("unisono.launcher.engine_client.Engine", FakeEngine)
    monkeypatch.setattr("unisono.launcher.text.tokenizer.Tokenizer", FakeTokenizer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", *RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.run(["generate", model, *arguments])
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return call


def test_one_prompt_streams_and_ends_with_a_closing_line(generate):
    code, out, err = generate("hello é")
    assert (code, out) == (0, "HELLO É\n")
    assert err == [
        "9 tokens in 1.30 s: 10.0 tok/s, 100.0 ms a token, first token 0.50 s (38 %) "
        "(1 rank, cpu, float32)"
    ]
    assert FakeEngine.made[0].log == ["enter", "start", "close"]


def test_several_prompts_come_in_order_under_headings(generate):
    code, out, err = generate("a longer prompt", "short", "--raw", "--tp", "2")
    assert code == 0
    assert out == "[1/2] a longer prompt\nA LONGER PROMPT\n\n[2/2] short\nSHORT\n\n"
    assert err[-1].startswith("22 tokens of 2 prompts in ")
    assert err[-1].endswith("first token 0.50 s (2 ranks, cpu, float32)")


def test_json_is_one_line_a_prompt_and_nothing_else(generate, tmp_path):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "Grüß dich"}]
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    code, out, _ = generate("one two three", "--json", "--prompts-file", str(file))
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert first == {
        "index": 0,
        "prompt": "one two three",
        "text": "ONE TWO THREE",
        "token_ids": [*b"ONE TWO THREE", EOS],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": len("<user>one two three<assistant>"),
            "completion_tokens": 14,
            "cached_tokens": 0,
        },
        "timing": {"first_token_s": 0.5, "total_s": 1.8},
        "digest": first["digest"],
    }
    assert len(bytes.fromhex(first["digest"])) == 16
    assert first["digest"] != second["digest"]
    assert (second["index"], second["prompt"], second["text"]) == (1, messages, "GRÜSS DICH")


def test_json_of_a_single_prompt_does_not_stream(generate):
    _, out, _ = generate("hi", "--json")
    assert json.loads(out)["text"] == "HI"
    assert out.count("\n") == 1


def test_a_rejected_prompt_stops_no_other(generate):
    code, out, err = generate("reject me", "serve me", "--json")
    rejected, served = map(json.loads, out.splitlines())
    assert code == 2
    assert (rejected["finish_reason"], rejected["token_ids"]) == ("rejected", [])
    assert rejected["error"] == "needs 9 blocks, there are 8"
    assert rejected["usage"]["completion_tokens"] == 0
    assert (served["finish_reason"], served["text"]) == ("stop", "SERVE ME")
    assert "error" not in served
    assert err[-1] == "unisono: error: prompt 1 of 2 was rejected: needs 9 blocks, there are 8"


def test_a_single_rejected_prompt(generate):
    code, out, err = generate("reject me")
    assert (code, out) == (2, "")
    assert err[-1] == "unisono: error: the prompt was rejected: needs 9 blocks, there are 8"


def test_a_lost_worker_is_the_last_line_after_a_finished_line_of_text(generate):
    code, out, err = generate("die now")
    assert (code, out) == (1, "DIE NOW\n")
    assert err[-1] == "unisono: rank 1 failed in step 3: KilledBySignal: SIGKILL"
    assert FakeEngine.made[0].log == ["enter", "start", "close"]
    assert FakeEngine.made[0].aborted == []


def test_sampling_options_reach_the_engine(generate):
    _, out, _ = generate(
        "hello", "--max-tokens", "3", "--ignore-eos", "--stop-token-ids", "5,6", "--stop", "x"
    )
    assert out == "HEL\n"
    assert FakeEngine.made[0].params == [
        SamplingParams(max_tokens=3, ignore_eos=True, stop_token_ids=(5, 6), stop=("x",))
    ]


def test_the_engine_gets_a_config_without_auto(generate, model):
    generate("hello", "--tp", "3", "--max-requests", "4", "--log-level", "error")
    config = FakeEngine.made[0].config
    worker = config.runtime.worker
    assert (config.log_level, worker.model_path) == ("error", model)
    assert (worker.tp, worker.max_requests, worker.max_model_len) == (3, 4, 128)
    assert (worker.device, worker.dtype, worker.num_token_ids) == ("cpu", "float32", 300)
    assert worker.model.eos_token_ids == (2, EOS)


def test_standard_input_is_a_prompt(generate):
    assert generate("--raw", stdin=b"two\nlines\n")[1] == "TWO\nLINES\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 128, "--raw"], "the prompt has 128 tokens: with one token of answer that is more"),
        (["ok", "x" * 128, "--raw"], "prompt 2 of 2 has 128 tokens: with one token of answer"),
        (["abc", "--raw", "--max-model-len", "3"], "the prompt has 3 tokens: with one token of"),
        (["hi", "--stop-token-ids", "300"], "--stop-token-ids 300: the model's token ids run"),
        (["hi", "--tp", "10"], "tp=10: 9 query heads in 3 groups"),
        (["hi", "--device", "cuda"], "--device cuda: no GPU is visible here"),
        (["hi", "--raw", "--system", "x"], "--system needs the chat template"),
        ([], "no prompt: standard input is empty"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else None,
)
def test_user_errors_are_found_before_any_process_starts(generate, arguments, message):
    code, out, err = generate(*arguments)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"unisono: error: {message}")
    assert FakeEngine.made == []


def test_the_longest_prompt_that_fits_is_served(generate):
    assert generate("x" * 127, "--raw")[0] == 0


def test_damaged_weights_are_found_before_any_process_starts(generate, model):
    with open(os.path.join(model, "model.safetensors"), "r+b") as file:
        file.truncate(5000)
    code, out, err = generate("hi")
    assert (code, out, len(err)) == (2, "", 1)
    assert "truncated" in err[0]
    assert FakeEngine.made == []


def test_rank_zero_of_a_cluster_launches_and_says_so(generate, monkeypatch):
    for name, value in {**RENDEZVOUS, "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = generate("hello")
    assert (code, out) == (0, "HELLO\n")
    assert err[0] == "unisono: launched by torchrun, rank 0 of 2"
    assert err[-1].endswith("(2 ranks, cpu, float32)")
    engine = FakeEngine.made[0]
    assert engine.config.runtime.worker.tp == engine.cluster.world_size == 2


def test_other_ranks_of_a_cluster_obey_and_print_nothing(generate, monkeypatch):
    for name, value in {**RENDEZVOUS, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    handlers = []

    class Entry:
        @staticmethod
        def main_in_cluster():
            handlers.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))

    monkeypatch.setitem(sys.modules, "unisono.workers.entry", Entry)
    assert generate("hello") == (0, "", [])
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]
    assert FakeEngine.made == []


# The loop itself


def requests_of(*texts):
    return [
        Request(index=index, prompt=text, prompt_ids=tuple(text.encode()))
        for index, text in enumerate(texts)
    ]


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    return FakeEngine(config=None)  # type: ignore[arg-type]


def test_pieces_join_to_the_answer_for_interleaved_requests(engine):
    texts = ("naïve 猫", "b", "日本語 text")
    events = list(answer_all(engine, FakeTokenizer(), requests_of(*texts), SamplingParams()))
    answers = {event.index: event for event in events if isinstance(event, Answer)}
    pieces = [event for event in events if isinstance(event, Piece)]
    assert [piece.index for piece in pieces[:4]] == [0, 1, 0, 2]
    for index, text in enumerate(texts):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == answers[index].text == text.upper()
        assert sum((piece.token_ids for piece in mine), ()) == answers[index].token_ids[:-1]
        assert answers[index].token_ids[-1] == EOS
        assert answers[index].prompt == text
        assert answers[index].num_prompt_tokens == len(text.encode())


def test_whole_answers_become_text_once(engine):
    """Where nobody reads along, no token is turned into text by itself."""
    pushed = []

    class Words(FakeTokenizer):
        def stream(self):
            stream = super().stream()
            push = stream.push
            stream.push = lambda ids: pushed.append(list(ids)) or push(pushed[-1])
            return stream

    texts = ("naïve 猫", "b")
    first, second = answer_all(engine, Words(), requests_of(*texts), SamplingParams(), whole=True)
    assert (first.text, second.text) == ("B", "NAÏVE 猫")
    assert sorted(pushed, key=len) == [list(first.token_ids), list(second.token_ids)]


def test_what_is_left_of_a_cut_character_is_shown_at_the_end(engine):
    params = SamplingParams(max_tokens=1)
    events = list(answer_all(engine, FakeTokenizer(), requests_of("é"), params))
    assert [event.text for event in events] == ["\ufffd", "\ufffd"]


def test_a_stop_string_cuts_the_answer_and_aborts_the_request(engine):
    params = SamplingParams(stop=("LO", "W"))
    events = list(answer_all(engine, FakeTokenizer(), requests_of("hello", "b"), params))
    answers = {event.index: event for event in events if isinstance(event, Answer)}
    assert (answers[0].text, answers[0].finish_reason) == ("HEL", "stop")
    assert answers[0].token_ids == tuple(b"HELLO")
    assert (answers[1].text, answers[1].token_ids) == ("B", (66, EOS))
    assert engine.aborted == [101]


def test_leaving_early_aborts_what_runs(engine):
    events = answer_all(engine, FakeTokenizer(), requests_of("a", "longer"), SamplingParams())
    for event in events:
        if isinstance(event, Answer):
            break
    events.close()
    assert engine.aborted == [102]


def test_a_lost_engine_is_not_asked_to_abort(engine):
    with pytest.raises(WorkerLost):
        list(answer_all(engine, FakeTokenizer(), requests_of("die", "other"), SamplingParams()))
    assert engine.aborted == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "the prompt is empty: it has no tokens"),
        ((1, 2, 3, 4), "the prompt has 4 tokens: .* more than the 4 of --max-model-len"),
        ((1, 300), "the prompt has token id 300: the model's ids run from 0 to 299"),
    ],
)
def test_prompts_are_checked(ids, message):
    worker = WorkerConfig(model_path="m", model=tiny_model(), max_model_len=4)
    check_prompts([Request(index=0, prompt="x", prompt_ids=(1, 2, 3))], worker, 16)
    with pytest.raises(RequestRejected, match=message):
        check_prompts([Request(index=0, prompt="x", prompt_ids=ids)], worker, 16)


@pytest.mark.parametrize(
    ("count", "max_tokens", "kv_tokens", "needed"),
    [
        (60, 5, 64, 0),
        (60, 6, 64, 128),
        (60, 6, 65, 0),
        (64, 1, 1, 0),
        (65, 1, 1, 128),
        (9, 200, 64, 0),
    ],
)
def test_what_no_cache_of_the_asked_size_holds_is_refused(count, max_tokens, kv_tokens, needed):
    """The last token of an answer needs no place, and a request ends at the model's limit."""
    worker = WorkerConfig(
        model_path="m",
        model=tiny_model(),
        max_model_len=65 if max_tokens == 200 else 128,
        kv_tokens=kv_tokens,
    )
    asked = [Request(index=0, prompt="x", prompt_ids=(5,) * count)]
    said = (
        f"^the prompt has {count} tokens: with up to {max_tokens} of answer that is more than the "
        f"64 of --kv-tokens; choose {needed} or more, or a smaller --max-tokens$"
    )
    with pytest.raises(RequestRejected, match=said) if needed else nullcontext():
        check_prompts(asked, worker, max_tokens)


# What is shown


def test_the_ready_line_says_where_the_memory_goes():
    ready = replace(READY, num_blocks=18816, weight_bytes=2**33, block_bytes=6 << 20)
    assert ready_line(ready, 1) == (
        "ready: 1 rank on cuda, weights 8.0 GiB, KV 110.2 GiB (1,204,224 tokens)"
    )
    assert ready_line(replace(ready, activation_bytes=400 << 20), 2) == (
        "ready: 2 ranks on cuda, weights 8.0 GiB, activations 400.0 MiB, "
        "KV 110.2 GiB (1,204,224 tokens) a rank"
    )
    assert ready_line(replace(ready, graph_bytes=84 << 20), 1) == (
        "ready: 1 rank on cuda, weights 8.0 GiB, graphs 84.0 MiB, KV 110.2 GiB (1,204,224 tokens)"
    )


def test_a_digest_names_the_dtype_of_states_where_there_are_some():
    worker = WorkerConfig(model_path="m", model=tiny_model(), attn="tiled")
    plain = f"cuda bfloat16 tp=1 attn=tiled numerics=exact unisono {unisono.__version__}"
    assert numerics_of(READY, worker) == plain
    hybrid = replace(worker, model=tiny_model(delta_layers=(True, False)), state_dtype="bfloat16")
    assert numerics_of(READY, hybrid) == plain.replace(" unisono", " states=bfloat16 unisono")


def test_the_ready_line_says_how_many_states_there_are():
    ready = replace(READY, num_states=18, state_bytes=64 << 20, max_requests=9)
    assert ready_line(ready, 1).endswith(", states 1.1 GiB (18, for 9 requests at a time)")


READY = EngineReady(
    num_blocks=8, block_size=64, device="cuda", dtype="bfloat16", rank_pids=array("i")
)


WORKER = WorkerConfig(model_path="m", model=tiny_model(), tp=2, device="cuda", dtype="bfloat16")


def answer(index=0, tokens=256, first=0.41, total=3.1, reason="length", cached=0, waited=0.0):
    return Answer(
        index=index,
        prompt="p",
        text="t" * tokens,
        token_ids=(7,) * tokens,
        finish_reason=reason,
        num_prompt_tokens=5,
        first_token_s=first,
        total_s=total,
        num_cached_tokens=cached,
        waited_s=waited,
    )


@pytest.mark.parametrize(
    ("answers", "seconds", "line"),
    [
        (
            [answer(tokens=270)],
            9.9,
            "270 tokens in 3.10 s: 100.0 tok/s, 10.0 ms a token, first token 0.41 s (13 %)",
        ),
        ([answer(tokens=1, total=0.41)], 9.9, "1 token in 0.41 s: first token 0.41 s"),
        (
            [answer(0, 2, cached=64, waited=3.0), answer(1, 1, cached=128, total=3.2, waited=2.4)],
            0.5,
            "3 tokens of 2 prompts in 0.50 s: 6.0 tok/s, 166.7 ms a token, first token 0.41 s, "
            "192 prompt tokens cached, 75 % waiting for the ranks",
        ),
        (
            [answer(0, 1000), answer(1, 500, first=0.2)],
            3.0,
            "1,500 tokens of 2 prompts in 3.00 s: 500.0 tok/s, 2.0 ms a token, first token 0.20 s",
        ),
        (
            [answer(0, 300), answer(1, 0, first=0.0, total=0.0, reason="rejected")],
            3.0,
            "300 tokens of 1 prompt in 3.00 s: 100.0 tok/s, 10.0 ms a token, first token 0.41 s",
        ),
        ([answer(tokens=0, reason="rejected")], 0.5, "0 tokens in 0.50 s"),
    ],
)
def test_closing_line(answers, seconds, line):
    assert closing_line(answers, seconds, READY, WORKER) == f"{line} (2 ranks, cuda, bfloat16)"


def test_what_came_from_graphs_is_said_where_there_are_any():
    """Of a GPU also that nothing did, and why; a CPU's line has no word of it, its JSON has."""
    eager = (("first run", 2), ("prompt tokens", 2))
    answers = [replace(answer(0), num_replays=20, eager=eager), replace(answer(1), num_replays=510)]
    line = closing_line(answers, 3.0, READY, WORKER)
    assert line.endswith("first token 0.41 s, 510 graph replays (2 ranks, cuda, bfloat16)")
    answers[1] = replace(answers[1], eager=eager)
    line = closing_line(answers, 3.0, READY, WORKER)
    said = "510 graph replays, 4 eager runs (2 first run, 2 prompt tokens)"
    assert line.endswith(f"first token 0.41 s, {said} (2 ranks, cuda, bfloat16)")
    none = [replace(answer(), eager=(("--no-graphs", 512),))]
    line = closing_line(none, 3.0, READY, WORKER)
    assert "0 graph replays, 512 eager runs (512 --no-graphs)" in line
    assert "graph" not in closing_line(none, 3.0, READY, replace(WORKER, device="cpu"))
    out = io.StringIO()
    prompts = [Prompt(text="p", origin="o")]
    show(iter(none), prompts, Console(out, io.StringIO()), as_json=True)
    assert json.loads(out.getvalue())["graphs"] == {"replays": 0, "eager": {"--no-graphs": 512}}


def test_the_floor_is_told_of_one_answer_on_a_known_card():
    """Half of what the card gives: a token reads 15.1 GB of weights, half of them on each rank."""
    worker = replace(WORKER, model=SHAPES["qwen3-8b"])
    token_s = 15.14e9 / 2 / (H200_COPY.bandwidth_tb_s * 1e12) / 0.5
    alone = answer(tokens=101, first=0.1, total=0.1 + 100 * token_s, waited=0.2)
    line = closing_line([alone], 9.9, READY, worker, H200_COPY)
    assert "ms a token, 50 % of the floor at 4.3 TB/s, first token 0.10 s (22 %), 44 %" in line
    on_cpu = replace(worker, device="cpu")
    assert "floor" not in closing_line([alone], 9.9, READY, on_cpu, H200_COPY)
    assert "floor" not in closing_line([alone], 9.9, READY, worker)
    assert "floor" not in closing_line([alone, alone], 9.9, READY, worker, H200_COPY)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_piece_is_flushed_before_the_next_is_asked_for():
    out = io.StringIO()
    seen = []

    def events():
        for text in ("one ", "two"):
            yield Piece(index=0, text=text, token_ids=(1,))
            seen.append(out.getvalue())
        yield answer()

    show(events(), [Prompt(text="p", origin="o")], Console(out, io.StringIO()), as_json=False)
    assert (seen, out.getvalue()) == (["one ", "one two"], "one two\n")


def test_an_answer_is_written_as_soon_as_those_before_it_are():
    out = io.StringIO()
    seen = []

    def events():
        for index in (1, 0, 2):
            yield answer(index)
            seen.append([json.loads(line)["index"] for line in out.getvalue().splitlines()])

    prompts = [Prompt(text=str(index), origin="o") for index in range(3)]
    answers = show(events(), prompts, Console(out, io.StringIO()), as_json=True)
    assert seen == [[], [0, 1], [0, 1, 2]]
    assert [each.index for each in answers] == [0, 1, 2]


def test_bars_are_drawn_on_a_terminal_and_leave_stdout_alone():
    out, err = io.StringIO(), Screen()
    prompts = [Prompt(text=str(index), origin="o") for index in range(2)]
    show(iter([answer(0, 3), answer(1, 2)]), prompts, Console(out, err), as_json=False)
    assert out.getvalue() == "[1/2] p\nttt\n\n[2/2] p\ntt\n\n"
    assert "prompts" in err.getvalue()
    assert "2/2" in err.getvalue()


def test_loading_sums_the_ranks():
    from unisono.runtime.protocol import Starting

    err = Screen()
    with Console(io.StringIO(), err).loading() as progress:
        progress(Starting(rank=-1, phase="starting"))
        progress(Starting(rank=0, phase="loading", done=10_000_000, total=100_000_000))
        progress(Starting(rank=1, phase="loading", done=50_000_000, total=100_000_000))
    assert "loading" in err.getvalue()
    assert "60.0/200.0 MB" in err.getvalue()


def test_nothing_is_drawn_where_stderr_is_no_terminal():
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    with console.loading() as progress, console.fetching() as fetched:
        from unisono.runtime.protocol import Starting

        progress(Starting(rank=0, phase="loading", done=1, total=2))
        fetched(1, 2)
    assert err.getvalue() == ""
