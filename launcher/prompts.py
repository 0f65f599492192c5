"""Where prompts come from: arguments, a file, or standard input; and how they become token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from unisono.launcher.answering import Request, ids_request
from unisono.launcher.options import option_spec
from unisono.models.config import ConfigError
from unisono.runtime.protocol import RequestRejected
from unisono.workers.config import BLOCK_SIZE, WorkerConfig

if TYPE_CHECKING:
    from unisono.launcher.text.ids_only import IdsOnly
    from unisono.launcher.text.tokenizer import Tokenizer

_CHOICES = (
    "give PROMPT arguments, --prompts-file FILE, --prompt-ids ID,ID,..., or text on standard input"
)
_KEYS = ({"prompt"}, {"messages"}, {"prompt_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the user asks: a text, the messages of a chat, or token ids."""

    text: str
    """The text; of a chat, its last message; of ids, what spells them."""
    messages: tuple[dict[str, str], ...] = ()
    ids: tuple[int, ...] = ()
    """Taken as they are, without tokenizer and template."""
    priority: int | None = None
    """None: that of the command."""
    origin: str
    """Where it was found, for error messages."""

    def as_given(self) -> str | list[dict[str, str]] | list[int]:
        """Return the text, the messages or the ids, as JSON output repeats them."""
        return list(self.messages) or list(self.ids) or self.text


def gather_prompts(
    arguments: Sequence[str],
    prompts_file: str | None,
    stdin: TextIO | None,
    id_lists: Sequence[str] = (),
) -> list[Prompt]:
    """Return the prompts of the arguments, those of `id_lists` ("1,2,3") and those of the file.

    With none of them all of stdin is the prompt. A file holds one prompt a line, or, if its name
    ends in .jsonl, one object a line with "prompt", "messages" or "prompt_ids" and maybe
    "priority"; empty lines are skipped; `-` is standard input, read as text lines. Raises
    ConfigError naming the argument or line that is wrong.
    """
    if not arguments and not id_lists and prompts_file is None:
        return [_whole_stdin(stdin)]
    prompts = [
        _text_prompt(text, f"prompt argument {place}")
        for place, text in enumerate(arguments, start=1)
    ]
    prompts += [_listed_ids(text) for text in id_lists]
    if prompts_file is not None:
        prompts += _file_prompts(prompts_file, stdin)
    return prompts


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | IdsOnly,
    *,
    raw: bool,
    system: str | None,
    priority: int = 0,
) -> list[Request]:
    """Turn prompts into requests, through the chat template unless `raw` or there is none.

    `priority` is for those that have none of their own.

    Raises ConfigError where a system text or messages have no template to go through, or a text
    no tokenizer.
    """
    template = tokenizer.has_chat_template and not raw
    if system is not None and not template:
        why = "--raw leaves out the chat template" if raw else "the model has no chat template"
        raise ConfigError(f"--system needs the chat template, and {why}")
    requests = []
    for index, prompt in enumerate(prompts):
        own = priority if prompt.priority is None else prompt.priority
        if prompt.ids:
            if system is not None:
                raise ConfigError(f"{prompt.origin}: token ids take no --system: leave one out")
            requests.append(ids_request(index, prompt.ids, own))
            continue
        if template:
            prompt_ids = tokenizer.chat_ids(_conversation(prompt, system))
        elif prompt.messages:
            why = "--raw is given" if raw else "the model has none"
            raise ConfigError(f"{prompt.origin}: messages need a chat template, and {why}")
        else:
            prompt_ids = tokenizer.encode(prompt.text)
        requests.append(
            Request(index=index, prompt=prompt.text, prompt_ids=tuple(prompt_ids), priority=own)
        )
    return requests


def check_prompts(requests: Sequence[Request], worker: WorkerConfig, max_tokens: int) -> None:
    """Raise RequestRejected if a prompt is empty, leaves no room for an answer, has more tokens
    with `max_tokens` of answer than a KV cache of the size that was asked for, or holds ids that
    the model has no row for (given so, or by a tokenizer of another model)."""
    for place, request in enumerate(requests, start=1):
        name = f"prompt {place} of {len(requests)}" if len(requests) > 1 else "the prompt"
        count = len(request.prompt_ids)
        if count == 0:
            raise RequestRejected(f"{name} is empty: it has no tokens")
        if count + 1 > worker.max_model_len:
            raise RequestRejected(
                f"{name} has {count} tokens: with one token of answer that is more than the "
                f"{worker.max_model_len} of {option_spec('max_model_len').flag}"
            )
        most = min(count + max_tokens, worker.max_model_len)
        if wanted := wanted_kv_tokens(most - 1, worker):
            raise RequestRejected(
                f"{name} has {count} tokens: with up to {most - count} of answer that is more than "
                f"the {whole_blocks(worker.kv_tokens)} of {option_spec('kv_tokens').flag}; choose "
                f"{wanted} or more, or a smaller {option_spec('max_tokens').flag}"
            )
        last = worker.model.vocab_size - 1
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token <= last:
                why = "" if request.gives_ids else ", so the tokenizer is not this model's"
                raise RequestRejected(
                    f"{name} has token id {token}: the model's ids run from 0 to {last}{why}"
                )


def wanted_kv_tokens(num_tokens: int, worker: WorkerConfig) -> int:
    """The least size of a KV cache that holds so many tokens, if one that does not was asked for;
    else 0."""
    wanted = whole_blocks(num_tokens)
    return wanted if 0 < whole_blocks(worker.kv_tokens) < wanted else 0


def whole_blocks(num_tokens: int) -> int:
    """The tokens of the KV blocks that hold so many."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE


def _conversation(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(f"{prompt.origin}: has a system message; leave --system out")
    return [{"role": "system", "content": system}, *messages]


def _whole_stdin(stdin: TextIO | None) -> Prompt:
    if stdin is None or stdin.isatty():
        raise ConfigError(f"no prompt: {_CHOICES}")
    text = _decode(stdin.buffer.read(), "standard input").removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(f"no prompt: standard input is empty; {_CHOICES}")
    return _text_prompt(text, "standard input")


def _file_prompts(name: str, stdin: TextIO | None) -> list[Prompt]:
    title = "standard input" if name == "-" else name
    read = _json_prompt if name.endswith(".jsonl") else _text_prompt
    prompts = [read(line, origin) for line, origin in _lines(_read_bytes(name, stdin), title)]
    if not prompts:
        raise ConfigError(f"--prompts-file {name}: holds no prompt")
    return prompts


def _read_bytes(name: str, stdin: TextIO | None) -> bytes:
    if name == "-":
        return b"" if stdin is None else stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--prompts-file {name}: {error.strerror}; choose a text file, or - for stdin"
        ) from None


def _lines(content: bytes, title: str) -> Iterator[tuple[str, str]]:
    """Lines that hold something, each with its origin; only \\n and \\r\\n end a line."""
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        origin = f"{title} line {number}"
        text = _decode(line.removesuffix(b"\r"), origin)
        if text.strip():
            yield text, origin


def _decode(content: bytes, origin: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}: not UTF-8 at byte {error.start}") from None


def _text_prompt(text: str, origin: str) -> Prompt:
    return Prompt(text=_checked(text, "the prompt", origin), origin=origin)


def _listed_ids(text: str) -> Prompt:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--prompt-ids {text}: expected token ids separated by commas, such as 1,2,3"
        ) from None
    return _ids_prompt(ids, f"--prompt-ids {text}")


def _ids_prompt(ids: Any, origin: str) -> Prompt:
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ConfigError(f'{origin}: "prompt_ids" must be a list of at least one token id')
    if min(ids) < 0:
        raise ConfigError(f"{origin}: token id {min(ids)} is negative")
    return Prompt(text=" ".join(map(str, ids)), ids=tuple(ids), origin=origin)


def _json_prompt(line: str, origin: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not readable"
        raise ConfigError(f"{origin}: not JSON ({reason})") from None
    keys = entry.keys() - {"priority"} if isinstance(entry, dict) else set()
    if keys not in _KEYS:
        raise ConfigError(
            f'{origin}: expected an object with one of "prompt", "messages" and "prompt_ids", '
            'maybe "priority", and nothing else'
        )
    prompt = _prompt_of(entry, origin)
    return replace(prompt, priority=_priority(entry, origin)) if "priority" in entry else prompt


def _prompt_of(entry: Mapping[str, Any], origin: str) -> Prompt:
    if "prompt_ids" in entry:
        return _ids_prompt(entry["prompt_ids"], origin)
    if "prompt" in entry:
        return _text_prompt(entry["prompt"], origin)
    messages = _messages(entry["messages"], origin)
    return Prompt(text=messages[-1]["content"], messages=messages, origin=origin)


def _priority(entry: Mapping[str, Any], origin: str) -> int:
    try:
        option_spec("priority").check(entry["priority"])
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    priority: int = entry["priority"]
    return priority


def _messages(value: Any, origin: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f'{origin}: "messages" must be a list of at least one message')
    return tuple(_message(item, place, origin) for place, item in enumerate(value, start=1))


def _message(item: Any, place: int, origin: str) -> dict[str, str]:
    if not isinstance(item, Mapping) or item.keys() != {"role", "content"}:
        raise ConfigError(f'{origin}: message {place} must have "role" and "content", no more')
    return {key: _checked(item[key], f"{key} of message {place}", origin) for key in item}


def _checked(text: Any, what: str, origin: str) -> str:
    """Return `text` if it is a text that can be tokenised."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{origin}: {what} must be a text that is not empty")
    try:
        # Arguments that are no UTF-8, and \ud800 in JSON, arrive as half a surrogate pair.
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{origin}: {what} is not valid Unicode") from None
    return text
