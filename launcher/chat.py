"""`unisono chat MODEL`: a conversation in the terminal, or with lines of standard input.

Ctrl-C stops the answer that is being written; at the prompt it ends the command like any other.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from unisono.launcher.answering import (
    POLL_S,
    Answer,
    Answering,
    Piece,
    Request,
    numerics_of,
)
from unisono.launcher.console import Console
from unisono.launcher.generate import closing_line
from unisono.launcher.options import (
    LAUNCH_OPTIONS,
    LOGPROB_OPTIONS,
    SAMPLING_OPTIONS,
    check_sampling_params,
    config_options,
    given,
    make_sampling_params,
)
from unisono.launcher.prompts import check_prompts
from unisono.launcher.roofline import card_here
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError, EngineReady, RequestRejected, SamplingParams
from unisono.workers.config import WorkerConfig

if TYPE_CHECKING:
    from unisono.launcher.text.tokenizer import Tokenizer

HELP = """\
/reset         forget the conversation, but not the system message
/system TEXT   set the system message; without TEXT: remove it
/exit          end, like Ctrl-D
/help          show this
Ctrl-C stops an answer; at the prompt it ends the chat. Everything else is a message."""
_SAMPLING = tuple(name for name in SAMPLING_OPTIONS if name not in LOGPROB_OPTIONS)
_COMMAND = re.compile(r"/[a-z]+")


@click.command("chat")
@click.argument("model")
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option(
    "--stats", is_flag=True, help="Show the speed of each answer, also where stderr is no terminal."
)
@config_options(*_SAMPLING, *LAUNCH_OPTIONS)
def command(model: str, system: str | None, stats: bool, **options: Any) -> int:
    """Talk with MODEL: a checkpoint directory, a GGUF file, or "demo". /help lists commands.

    What no longer fits the context is forgotten turn by turn, the oldest first; half of the context
    is kept for prompts. With standard input from a file or a pipe each line is a message.
    """
    from unisono.launcher.engine_client import Engine
    from unisono.launcher.resolve import prepare, with_tokenizer
    from unisono.launcher.text.tokenizer import Tokenizer
    from unisono.launcher.timed import TimedEngine, text_for

    _refuse_cluster()
    console = Console()
    params = make_sampling_params(given(options, _SAMPLING))
    with console.fetching() as fetched:
        prepared = prepare(model, given(options, LAUNCH_OPTIONS), os.environ, None, fetched)
    logging.basicConfig(
        level=prepared.launch.log_level.upper(),
        format="%(asctime)s launcher %(levelname)s %(message)s",
    )
    check_sampling_params(params, prepared.worker.model)
    if not prepared.has_tokenizer:
        raise ConfigError(f"{model} has no tokenizer: use unisono generate with --prompt-ids")
    tokenizer = Tokenizer.load(prepared.source)
    if not tokenizer.has_chat_template:
        raise ConfigError(f"{model} has no chat template: use unisono generate")
    conversation = Conversation(tokenizer, prepared.worker, params.max_tokens)
    conversation.set_system(system)
    launch = with_tokenizer(prepared.launch, tokenizer.size, tokenizer.eos_ids)
    with (TimedEngine if launch.trace else Engine)(launch) as engine:
        with console.loading() as progress:
            ready = engine.start(progress)
        text = text_for(engine, tokenizer)
        answering = Answering(engine, text, numerics_of(ready, prepared.worker))
        shows_speed = stats or console.is_watched
        chat = Chat(conversation, answering, params, console, ready if shows_speed else None)
        chat.run()
    return 0


@dataclass(slots=True)
class Conversation:
    """The system message and the turns so far, and which of them fit the context."""

    tokenizer: Tokenizer
    worker: WorkerConfig
    max_tokens: int
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    """What the user said and what the model answered, the oldest first."""

    def set_system(self, text: str | None) -> None:
        """Set or remove the system message. Raises ConfigError if the template refuses it."""
        if text is not None:
            _checked(text, "the system message")
        self._ids("?", [], text)
        self.system = text

    def request(self, text: str) -> tuple[Request, int]:
        """Return the prompt that ends with `text`, and how many turns were dropped for it.

        Turns are dropped while prompt and answer together are longer than the context; of the
        answer's `max_tokens` at most half the context counts. Raises RequestRejected, and drops
        nothing, if `text` is too long even alone.
        """
        context = self.worker.max_model_len
        room = context - min(self.max_tokens, context // 2)
        turns = list(self.turns)
        ids = self._ids(text, turns, self.system)
        while len(ids) > room and turns:
            del turns[0]
            ids = self._ids(text, turns, self.system)
        request = Request(index=0, prompt=text, prompt_ids=tuple(ids))
        check_prompts([request], self.worker, self.max_tokens)
        dropped = len(self.turns) - len(turns)
        self.turns = turns
        return request, dropped

    def _ids(self, text: str, turns: list[tuple[str, str]], system: str | None) -> list[int]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return self.tokenizer.chat_ids([*messages, {"role": "user", "content": text}])


@dataclass(slots=True)
class Chat:
    """Reads lines, answers them, obeys commands. `ready`: given where speed is shown."""

    conversation: Conversation
    answering: Answering
    params: SamplingParams
    console: Console
    ready: EngineReady | None

    def run(self) -> None:
        """Talk until /exit or the end of the input. Raises WorkerLost."""
        for line in _lines():
            text = line.strip()
            name, _, rest = text.partition(" ")
            if name == "/exit":
                return
            try:
                if _COMMAND.fullmatch(name):
                    self._obey(name, rest.strip())
                elif text:
                    self._answer(text)
            except (ConfigError, RequestRejected) as error:
                self.console.note(f"unisono: error: {error}")

    def _obey(self, name: str, rest: str) -> None:
        if name == "/system":
            self.conversation.set_system(rest or None)
        elif rest:
            raise ConfigError(f"{name} takes no text: it was given {rest!r}")
        elif name == "/reset":
            self.conversation.turns.clear()
        elif name == "/help":
            self.console.note(HELP)
        else:
            raise ConfigError(f"no command {name}: choose /reset, /system, /exit or /help")

    def _answer(self, text: str) -> None:
        request, dropped = self.conversation.request(_checked(text))
        if dropped:
            turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
            self.console.note(f"unisono: {turns} no longer fit the context: forgotten")
        said, answer = self._write(request)
        if answer is not None and answer.finish_reason == "rejected":
            raise RequestRejected(f"the message was rejected: {answer.error}")
        if said:
            self.conversation.turns.append((text, said))
        if answer is None:
            self.console.note("unisono: stopped")
        elif self.ready is not None:
            worker = self.conversation.worker
            self.console.note(
                closing_line([answer], answer.total_s, self.ready, worker, card_here())
            )

    def _write(self, request: Request) -> tuple[str, Answer | None]:
        """Write the answer as it comes; return its text, and None if Ctrl-C stopped it."""
        news: deque[Piece | Answer] = deque()
        said, answer = "", None
        with _ctrl_c() as pressed:
            request_id = self.answering.add(request, self.params, news.append)
            try:
                while self.answering.has_work and not pressed:
                    self.answering.step(POLL_S)
                    for event in news:
                        if isinstance(event, Answer):
                            answer = event
                        else:
                            self.console.write(event.text)
                            said += event.text
                    news.clear()
            except EngineError:
                self.answering.forget()
                raise
            finally:
                self.answering.drop(request_id)
                if said and not said.endswith("\n"):
                    self.console.write("\n")
        return said, answer


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Within, SIGINT only adds itself to the list that is yielded."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    # A shell starts background jobs with SIGINT ignored, and it must stay so.
    if before is signal.SIG_IGN:
        yield pressed
        return
    signal.signal(signal.SIGINT, lambda signum, frame: pressed.append(signum))
    try:
        yield pressed
    finally:
        # SIGTERM may have come: then its handler has set SIGINT aside, and it stays so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Yield what the user types, or the lines of standard input."""
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no UTF-8 are refused by name, line by line.
        sys.stdin.reconfigure(errors="surrogateescape")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        # With it `input` has line editing and a history.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                sys.stdout.write("\n")
            return
        yield line


def _checked(text: str, what: str = "the message") -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid Unicode") from None
    return text


def _refuse_cluster() -> None:
    from unisono.launcher.cluster import detect_cluster

    cluster = detect_cluster(os.environ)
    if cluster is not None and cluster.world_size > 1:
        raise ConfigError(
            f"unisono chat starts its own ranks, and {cluster.launcher} started this command "
            f"{cluster.world_size} times: run it alone with --tp {cluster.world_size}, or use "
            "unisono generate"
        )
