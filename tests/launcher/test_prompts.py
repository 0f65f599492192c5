"""Prompts from arguments, files and standard input; every wrong line is named."""

from __future__ import annotations

import io
import json

import pytest

from tests.launcher.fakes import FakeTokenizer
from unisono.launcher.prompts import Prompt, gather_prompts, tokenize_prompts
from unisono.models.config import ConfigError


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def stdin_of(content: bytes, kind=io.TextIOWrapper):
    return kind(io.BytesIO(content), encoding="utf-8")


def gather(arguments=(), file=None, stdin=b""):
    return [prompt.as_given() for prompt in gather_prompts(arguments, file, stdin_of(stdin))]


def write(tmp_path, content, name="prompts.txt"):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_arguments_come_before_the_file(tmp_path):
    file = write(tmp_path, "three\nfour\n")
    assert gather(["one", "two"], file) == ["one", "two", "three", "four"]


def test_lines_keep_their_spaces_and_only_newlines_cut(tmp_path):
    content = "\ufeff  indented\r\n\r\n \t\nline\u2028separator\rstill\nlast"
    assert gather(file=write(tmp_path, content)) == [
        "  indented",
        "line\u2028separator\rstill",
        "last",
    ]


def test_jsonl_holds_prompts_and_messages(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = '{"prompt": "one\\ntwo"}\n\n' + json.dumps({"messages": chat}) + "\n"
    file = write(tmp_path, lines, "prompts.jsonl")
    assert gather(file=file) == ["one\ntwo", chat]
    assert gather_prompts([], file, None)[1].text == "Hi"


def test_priorities_come_from_the_line_or_from_the_command(tmp_path):
    file = write(tmp_path, '{"prompt": "a", "priority": -3}\n{"prompt": "b"}', "prompts.jsonl")
    asked = gather_prompts(["c"], file, None)
    requests = tokenize_prompts(asked, FakeTokenizer(), raw=True, system=None, priority=7)
    assert [request.priority for request in requests] == [7, -3, 7]
    assert [request.prompt for request in requests] == ["c", "a", "b"]


def test_dash_reads_lines_of_standard_input():
    assert gather(["zero"], "-", b"one\ntwo\n") == ["zero", "one", "two"]


def test_without_prompts_all_of_standard_input_is_one():
    assert gather(stdin=b"line one\n\nline two \n\n") == ["line one\n\nline two \n"]
    assert gather(["given"], stdin=b"never read") == ["given"]


@pytest.mark.parametrize("stdin", [None, stdin_of(b"", Terminal)], ids=["closed", "terminal"])
def test_no_prompt_at_all_names_the_choices(stdin):
    with pytest.raises(ConfigError, match="no prompt: give PROMPT arguments, --prompts-file FILE"):
        gather_prompts([], None, stdin)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON (Expecting value)"),
        (b'{"prompt": "a", "priority": "high"}', "line 1: --priority 'high': expected a whole"),
        (b'{"priority": 1}', 'line 1: expected an object with one of "prompt", "messages"'),
        (
            b'"text"\n',
            'line 1: expected an object with one of "prompt", "messages" and "prompt_ids"',
        ),
        (b"{}\n", 'line 1: expected an object with one of "prompt", "messages" and "prompt_ids"'),
        (b'{"prompt": "a", "messages": []}', 'line 1: expected an object with one of "prompt"'),
        (b'{"prompt": "a", "prompt_ids": [1]}', "line 1: expected an object with one of"),
        (b'{"prompt": "a", "max_tokens": 3}', "line 1: expected an object with one of"),
        (b'{"prompt_ids": []}', 'line 1: "prompt_ids" must be a list of at least one token id'),
        (b'{"prompt_ids": "1,2"}', 'line 1: "prompt_ids" must be a list of at least one token id'),
        (b'{"prompt_ids": [1, true]}', 'line 1: "prompt_ids" must be a list of at least one'),
        (b'{"prompt_ids": [1, 2.0]}', 'line 1: "prompt_ids" must be a list of at least one'),
        (b'{"prompt_ids": [1, -2]}', "line 1: token id -2 is negative"),
        (b'\n\n{"prompt": 5}', "line 3: the prompt must be a text that is not empty"),
        (b'{"prompt": ""}', "line 1: the prompt must be a text that is not empty"),
        (b'{"prompt": "\\ud800"}', "line 1: the prompt is not valid Unicode"),
        (b'{"messages": []}', 'line 1: "messages" must be a list of at least one message'),
        (b'{"messages": "hi"}', 'line 1: "messages" must be a list of at least one message'),
        (b'{"messages": [{"role": "user"}]}', 'line 1: message 1 must have "role" and "content"'),
        (b'{"messages": ["hi"]}', 'line 1: message 1 must have "role" and "content"'),
        (
            b'{"messages": [{"role": "user", "content": null}]}',
            "line 1: content of message 1 must be a text",
        ),
        (b'{"prompt": "a"}\n\xff\n', "line 2: not UTF-8 at byte 0"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"\n \n", "prompts.jsonl: holds no prompt"),
        (b"", "prompts.jsonl: holds no prompt"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_lines_are_named(tmp_path, content, message):
    with pytest.raises(ConfigError) as caught:
        gather(file=write(tmp_path, content, "prompts.jsonl"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "file", "stdin", "message"),
    [
        (["a", ""], None, b"", "prompt argument 2: the prompt must be a text that is not empty"),
        (["a\udcff"], None, b"", "prompt argument 1: the prompt is not valid Unicode"),
        ([], None, b"\n", "no prompt: standard input is empty; give PROMPT"),
        ([], None, b"ok \xff", "standard input: not UTF-8 at byte 3"),
        ([], "-", b"", "--prompts-file -: holds no prompt"),
        ([], "-", b"a\n\xff", "standard input line 2: not UTF-8 at byte 0"),
        ([], "/no/such/file", b"", "--prompts-file /no/such/file: No such file or directory"),
        ([], "/", b"", "--prompts-file /: Is a directory"),
    ],
    ids=str,
)
def test_other_refusals(arguments, file, stdin, message):
    with pytest.raises(ConfigError) as caught:
        gather(arguments, file, stdin)
    assert message in str(caught.value)


def texts(prompts, *, chat=True, raw=False, system=None):
    requests = tokenize_prompts(prompts, FakeTokenizer(chat), raw=raw, system=system)
    assert [request.index for request in requests] == list(range(len(prompts)))
    return [bytes(request.prompt_ids).decode() for request in requests]


HELLO = Prompt(text="hello", origin="prompt argument 1")
CHAT = Prompt(
    text="hi",
    messages=({"role": "user", "content": "hi"},),
    origin="f.jsonl line 3",
)
BRIEF = Prompt(
    text="hi",
    messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
    origin="f.jsonl line 4",
)


def test_the_chat_template_is_used_where_there_is_one():
    assert texts([HELLO, BRIEF]) == [
        "<user>hello<assistant>",
        "<system>be brief<user>hi<assistant>",
    ]
    assert texts([HELLO], chat=False) == texts([HELLO], raw=True) == ["hello"]


def test_system_goes_before_every_prompt():
    assert texts([HELLO, CHAT], system="rhyme") == [
        "<system>rhyme<user>hello<assistant>",
        "<system>rhyme<user>hi<assistant>",
    ]


@pytest.mark.parametrize(
    ("prompt", "how", "message"),
    [
        (HELLO, {"raw": True, "system": "x"}, "--system needs the chat template, and --raw leaves"),
        (HELLO, {"chat": False, "system": "x"}, "--system needs the chat template, and the model"),
        (CHAT, {"raw": True}, "f.jsonl line 3: messages need a chat template, and --raw is given"),
        (CHAT, {"chat": False}, "f.jsonl line 3: messages need a chat template, and the model has"),
        (BRIEF, {"system": "x"}, "f.jsonl line 4: has a system message; leave --system out"),
    ],
    ids=str,
)
def test_what_needs_a_template_is_refused_without_one(prompt, how, message):
    with pytest.raises(ConfigError) as caught:
        texts([prompt], **how)
    assert str(caught.value).startswith(message)


def test_ids_are_prompts_as_they_are(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_ids": [7, 0, 7]}\n{"prompt": "x"}\n')
    prompts = gather_prompts(["hi"], str(file), None, ["1,2,3", "4"])
    assert [prompt.as_given() for prompt in prompts] == ["hi", [1, 2, 3], [4], [7, 0, 7], "x"]
    requests = tokenize_prompts(prompts[1:4], FakeTokenizer(chat=True), raw=False, system=None)
    assert [request.prompt_ids for request in requests] == [(1, 2, 3), (4,), (7, 0, 7)]
    assert [request.prompt for request in requests] == ["1 2 3", "4", "7 0 7"]
    with pytest.raises(ConfigError, match="--prompt-ids 1,2,3: token ids take no --system"):
        tokenize_prompts(prompts[1:2], FakeTokenizer(chat=True), raw=False, system="Be brief.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected token ids separated by commas"),
        ("1,,2", "expected token ids separated by commas"),
        ("one", "expected token ids separated by commas"),
        ("1,-2", "token id -2 is negative"),
    ],
)
def test_lists_that_are_no_ids_are_refused(text, message):
    with pytest.raises(ConfigError, match=f"^--prompt-ids {text}: {message}"):
        gather_prompts([], None, None, [text])
