"""`unisono chat` in front of an engine that answers each message in capitals."""

from __future__ import annotations

import io
import os
import signal
import sys
from array import array

import pytest

from tests.launcher.fakes import FakeEngine, FakeTokenizer, tiny_model, write_checkpoint
from unisono.launcher import cli
from unisono.launcher.chat import HELP, Conversation
from unisono.models.config import ConfigError
from unisono.runtime.protocol import Delta, RequestRejected, SamplingParams
from unisono.workers.config import WorkerConfig


class ListeningEngine(FakeEngine):
    """Keeps the prompts. To "endless" it says "x" for ever, and Ctrl-C is pressed at the third;
    "terminate" does the same with SIGTERM."""

    def __init__(self, config, cluster=None):
        super().__init__(config, cluster)
        self.prompts: list[str] = []
        self._endless: dict[int, int] = {}

    def submit(self, prompt_ids, params, priority=0):
        text = bytes(prompt_ids).decode()
        self.prompts.append(text)
        request_id = super().submit(prompt_ids, params)
        for word, number in (("endless", signal.SIGINT), ("terminate", signal.SIGTERM)):
            if text.endswith(f"{word}<assistant>"):
                del self._queues[request_id]
                self._endless[request_id] = number
                self._polls = 0
        return request_id

    def abort(self, request_id):
        super().abort(request_id)
        self._endless.pop(request_id)

    def poll(self, timeout_s):
        for number in self._endless.values():
            self._polls += 1
            if self._polls == 3:
                os.kill(os.getpid(), number)
            assert self._polls < 10, "nobody listens to Ctrl-C"
        words = [Delta(request_id=i, token_ids=array("i", [120])) for i in self._endless]
        return [*words, *super().poll(timeout_s)]


@pytest.fixture
def chat(tmp_path, monkeypatch, capsys):
    """Run `unisono chat MODEL ...` on lines; return exit code, stdout, lines of stderr."""
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setattr("unisono.launcher.engine_client.Engine", ListeningEngine)
    monkeypatch.setattr("unisono.launcher.text.tokenizer.Tokenizer", FakeTokenizer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = write_checkpoint(tmp_path / "model")

    def call(*arguments, lines=()):
        typed = b"".join(line.encode(errors="surrogateescape") + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        handler = signal.getsignal(signal.SIGINT)
        code = cli.run(["chat", str(model), *arguments])
        assert signal.getsignal(signal.SIGINT) is handler
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return call


def prompts() -> list[str]:
    [made] = FakeEngine.made
    assert isinstance(made, ListeningEngine)
    return made.prompts


def test_turns_are_remembered_and_the_end_of_input_ends_the_chat(chat):
    lines = ["one", "", "  two é ", "three"]
    assert chat("--max-tokens", "20", lines=lines) == (0, "ONE\nTWO É\nTHREE\n", [])
    assert prompts() == [
        "<user>one<assistant>",
        "<user>one<assistant>ONE<user>two é<assistant>",
        "<user>one<assistant>ONE<user>two é<assistant>TWO É<user>three<assistant>",
    ]
    assert FakeEngine.made[0].log == ["enter", "start", "close"]


def test_commands(chat):
    lines = ["a", "/system be kind", "b", "/reset", "c", "/system", "/help", "d", "/exit", "e"]
    code, out, err = chat("--system", "s", lines=lines)
    assert (code, out, err) == (0, "A\nB\nC\nD\n", HELP.splitlines())
    assert prompts() == [
        "<system>s<user>a<assistant>",
        "<system>be kind<user>a<assistant>A<user>b<assistant>",
        "<system>be kind<user>c<assistant>",
        "<user>c<assistant>C<user>d<assistant>",
    ]


def test_a_path_is_no_command_and_a_wrong_command_ends_nothing(chat):
    code, out, err = chat(lines=["/etc/hosts", "/quit", "/reset all", "ok"])
    assert (code, out) == (0, "/ETC/HOSTS\nOK\n")
    assert err == [
        "unisono: error: no command /quit: choose /reset, /system, /exit or /help",
        "unisono: error: /reset takes no text: it was given 'all'",
    ]


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat):
    code, out, err = chat(lines=["endless", "go on"])
    assert (code, out, err) == (0, "xxx\nGO ON\n", ["unisono: stopped"])
    assert prompts()[1] == "<user>endless<assistant>xxx<user>go on<assistant>"
    assert len(FakeEngine.made[0].aborted) == 1


def test_ctrl_c_at_the_prompt_ends_with_130(chat, monkeypatch):
    lines = iter(["hi"])

    def read(prompt):
        for line in lines:
            return line
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("Ctrl-C was not heard")

    monkeypatch.setattr("builtins.input", read)
    assert chat() == (130, "HI\n", [])
    assert FakeEngine.made[0].log == ["enter", "start", "close"]


def test_sigterm_in_an_answer_ends_the_chat(chat):
    code, out, _ = chat(lines=["terminate", "never"])
    assert (code, out) == (143, "xx\n")
    assert FakeEngine.made[0].log[-1] == "close"


def test_speed_is_shown_on_request(chat):
    code, _, err = chat("--stats", lines=["hello"])
    assert code == 0
    assert err == [
        "6 tokens in 1.00 s: 10.0 tok/s, 100.0 ms a token, first token 0.50 s (50 %) "
        "(1 rank, cpu, float32)"
    ]


def test_options_reach_the_engine(chat):
    _, out, _ = chat("--max-tokens", "6", "--stop", "LL", "--tp", "2", lines=["abcdefg", "hello"])
    assert out == "ABCDEF\nHE\n"
    [engine] = FakeEngine.made
    assert engine.params == [SamplingParams(max_tokens=6, stop=("LL",))] * 2
    assert engine.config.runtime.worker.tp == 2


def test_bad_messages_are_refused_and_the_chat_goes_on(chat):
    lines = ["reject", "bad \udcff", "x" * 128, "/system \udcff", "ok"]
    code, out, err = chat("--system", "s", lines=lines)
    assert (code, out) == (0, "OK\n")
    assert err[:2] == [
        "unisono: error: the message was rejected: needs 9 blocks, there are 8",
        "unisono: error: the message is not valid Unicode",
    ]
    assert err[2].startswith("unisono: error: the prompt has 154 tokens: with one token of answer")
    assert err[3:] == ["unisono: error: the system message is not valid Unicode"]
    assert prompts()[-1] == "<system>s<user>ok<assistant>"


def test_old_turns_are_forgotten_with_a_note(chat):
    code, out, err = chat("--max-tokens", "40", "--system", "s", lines=["a" * 20, "b", "c" * 20])
    assert (code, len(out.splitlines())) == (0, 3)
    assert err == ["unisono: the oldest turn no longer fit the context: forgotten"]
    assert prompts()[-1] == f"<system>s<user>b<assistant>B<user>{'c' * 20}<assistant>"


def test_a_lost_worker_ends_the_chat(chat):
    code, out, err = chat(lines=["die", "never"])
    assert (code, out, FakeEngine.made[0].aborted) == (1, "DIE\n", [])
    assert err == ["unisono: rank 1 failed in step 3: KilledBySignal: SIGKILL"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop", ""], "--stop ('',): expected a tuple of texts"),
        (["--stop-token-ids", "300"], "--stop-token-ids 300: the model's token ids run"),
        (["--system", "\udcff"], "the system message is not valid Unicode"),
        (["--tp", "10"], "tp=10: 9 query heads in 3 groups"),
    ],
)
def test_user_errors_are_found_before_any_process_starts(chat, arguments, message):
    code, out, err = chat(*arguments, lines=["hi"])
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"unisono: error: {message}")
    assert FakeEngine.made == []


def test_a_model_without_template_is_refused_by_name(chat, tmp_path):
    (tmp_path / "model" / "no_template").touch()
    code, _, [line] = chat(lines=["hi"])
    assert code == 2
    assert line == f"unisono: error: {tmp_path}/model has no chat template: use unisono generate"


def test_ranks_of_a_cluster_job_are_refused(chat, monkeypatch):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, _, [line] = chat(lines=["hi"])
    assert code == 2
    assert "unisono chat starts its own ranks" in line


class StrictTokenizer(FakeTokenizer):
    def chat_ids(self, messages):
        if messages[0]["role"] == "system":
            raise ConfigError("System role not supported")
        return super().chat_ids(messages)


def conversation(tokenizer=None, max_tokens=10, max_model_len=60):
    worker = WorkerConfig(model_path="m", model=tiny_model(), max_model_len=max_model_len)
    return Conversation(tokenizer or FakeTokenizer(), worker, max_tokens)


def test_a_template_without_system_role_keeps_the_old_state():
    talk = conversation(StrictTokenizer())
    with pytest.raises(ConfigError, match="System role not supported"):
        talk.set_system("be kind")
    assert talk.system is None
    assert bytes(talk.request("hi")[0].prompt_ids) == b"<user>hi<assistant>"


def test_as_few_turns_as_needed_are_dropped_and_the_answer_has_room():
    talk = conversation()
    talk.turns = [("1", "one"), ("2", "two"), ("3", "three")]
    request, dropped = talk.request("4")
    assert bytes(request.prompt_ids) == b"<user>3<assistant>three<user>4<assistant>"
    assert (dropped, len(request.prompt_ids) + 10 <= 60) == (2, True)
    assert talk.turns == [("3", "three")]


def test_a_message_that_never_fits_costs_no_turn():
    talk = conversation()
    talk.turns = [("1", "one")]
    with pytest.raises(RequestRejected, match="the prompt has 77 tokens"):
        talk.request("x" * 60)
    assert talk.turns == [("1", "one")]


def test_a_long_answer_limit_leaves_half_of_the_context_to_the_conversation():
    talk = conversation(max_tokens=10_000, max_model_len=100)
    talk.turns = [("1", "one")]
    assert talk.request("2")[1] == 0
