"""`unisono generate MODEL [PROMPT...]`: from the command line to answers on stdout.

Everything a user can get wrong is found before the first process starts: options, prompts, the
model's config and weight headers, the length of each prompt.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from unisono.launcher.answering import Answer, Piece, answer_all, numerics_of
from unisono.launcher.console import Console
from unisono.launcher.draft_counts import DraftCounts
from unisono.launcher.graph_counts import GraphCounts
from unisono.launcher.logprobs import logprobs_json
from unisono.launcher.options import (
    LAUNCH_OPTIONS,
    LOGPROB_OPTIONS,
    SAMPLING_OPTIONS,
    check_sampling_params,
    config_options,
    given,
    make_sampling_params,
    option_spec,
)
from unisono.launcher.prompts import Prompt, check_prompts, gather_prompts, tokenize_prompts
from unisono.launcher.roofline import Card, Items, answers_bytes, card_here, floor_s
from unisono.launcher.text.ids_only import IdsOnly, check_text_params
from unisono.models.config import ConfigError
from unisono.models.partition import ModelPartition
from unisono.runtime.protocol import EngineReady, SamplingParams
from unisono.workers.config import WorkerConfig

if TYPE_CHECKING:
    from unisono.launcher.resolve import Prepared
    from unisono.launcher.text.tokenizer import Tokenizer

EXIT_REJECTED = 2
"""Some prompt could not be served; the others were."""
HEADING_WIDTH = 80


@click.command("generate")
@click.argument("model")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--prompts-file",
    metavar="FILE",
    help='More prompts, one a line; FILE.jsonl: {"prompt": ...}, {"messages": [...]} or '
    '{"prompt_ids": [...]} a line, each with "priority" if it has its own; -: lines of standard '
    "input. Empty lines are skipped.",
)
@click.option(
    "--prompt-ids",
    multiple=True,
    metavar="ID,ID,...",
    help="One more prompt, given as token ids; may be repeated. A shape takes no other prompts.",
)
@click.option("--system", metavar="TEXT", help="System message of every chat.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a prompt on stdout, in prompt order."
)
@config_options("priority", *SAMPLING_OPTIONS, *LAUNCH_OPTIONS)
def command(
    model: str,
    prompts: tuple[str, ...],
    prompts_file: str | None,
    prompt_ids: tuple[str, ...],
    system: str | None,
    raw: bool,
    as_json: bool,
    priority: int | None,
    **options: Any,
) -> int:
    """Answer each PROMPT with MODEL: a directory, a GGUF file, a shape, "demo" or "tiny-mtp".

    Chat models answer through their chat template; others continue the text. Without PROMPT and
    --prompts-file all of standard input is one prompt. The same prompt gets the same answer alone
    and among others.

    A shape, such as shape:qwen3-0.6b, is a published model's config with random weights. It has no
    tokenizer: prompts are --prompt-ids, and answers are token ids.
    """
    from unisono.launcher.cluster import detect_cluster

    cluster = detect_cluster(os.environ)
    if cluster is not None and cluster.rank > 0:
        return obey()
    console = Console()
    if cluster is not None:
        console.note(
            f"unisono: launched by {cluster.launcher}, rank {cluster.rank} of {cluster.world_size}"
        )
    params = make_sampling_params(given(options, SAMPLING_OPTIONS))
    if not as_json:
        _refuse_logprobs(params)
    asked = gather_prompts(prompts, prompts_file, sys.stdin, prompt_ids)

    from unisono.launcher.engine_client import Engine
    from unisono.launcher.resolve import prepare, with_tokenizer
    from unisono.launcher.timed import TimedEngine, text_for

    with console.fetching() as fetched:
        prepared = prepare(model, given(options, LAUNCH_OPTIONS), os.environ, cluster, fetched)
    logging.basicConfig(
        level=prepared.launch.log_level.upper(),
        format="%(asctime)s launcher %(levelname)s %(message)s",
    )
    check_sampling_params(params, prepared.worker.model)
    tokenizer = _tokenizer_of(prepared, model)
    check_text_params(params, tokenizer)
    requests = tokenize_prompts(asked, tokenizer, raw=raw, system=system, priority=priority or 0)
    check_prompts(requests, prepared.worker, params.max_tokens)
    launch = with_tokenizer(prepared.launch, tokenizer.size, tokenizer.eos_ids)
    with (TimedEngine if launch.trace else Engine)(launch, cluster) as engine:
        with console.loading() as progress:
            ready = engine.start(progress)
        if console.is_watched:
            console.note(ready_line(ready, prepared.worker.tp))
        started = time.monotonic()
        numerics = numerics_of(ready, prepared.worker)
        text, whole = text_for(engine, tokenizer), len(asked) > 1 or as_json
        with closing(answer_all(engine, text, requests, params, numerics, whole=whole)) as events:
            answers = show(events, asked, console, as_json=as_json)
        seconds = time.monotonic() - started
    card = card_here() if cluster is None else None
    console.note(closing_line(answers, seconds, ready, prepared.worker, card))
    return _report_rejected(answers, console)


def _tokenizer_of(prepared: Prepared, model: str) -> Tokenizer | IdsOnly:
    if not prepared.has_tokenizer:
        return IdsOnly(model, prepared.worker.model.vocab_size)
    from unisono.launcher.text.tokenizer import Tokenizer

    return Tokenizer.load(prepared.source)


def show(
    events: Iterable[Piece | Answer], prompts: Sequence[Prompt], console: Console, *, as_json: bool
) -> list[Answer]:
    """Write the answers and return them in prompt order.

    One prompt streams as it is produced; JSON lines and several prompts are written whole, each
    as soon as it and all before it are complete.
    """
    if len(prompts) == 1 and not as_json:
        return _show_stream(events, console)
    waiting: dict[int, Answer] = {}
    answers: list[Answer] = []
    with console.counting("prompts", len(prompts)) as bar:
        for event in events:
            if not isinstance(event, Answer):
                continue
            waiting[event.index] = event
            bar.show("prompts", len(answers) + len(waiting), len(prompts))
            while len(answers) in waiting:
                answer = waiting.pop(len(answers))
                prompt = prompts[answer.index]
                text = _as_json(answer, prompt) if as_json else _as_text(answer, len(prompts))
                with bar.hidden():
                    console.write(text)
                answers.append(answer)
    return answers


def ready_line(ready: EngineReady, ranks: int) -> str:
    """Say where the memory of the rank that takes most of it goes."""
    tokens = ready.num_blocks * ready.block_size
    parts = [f"weights {_gib(ready.weight_bytes)}"]
    if ready.activation_bytes:
        parts.append(f"activations {_gib(ready.activation_bytes)}")
    if ready.graph_bytes:
        parts.append(f"graphs {_gib(ready.graph_bytes)}")
    parts.append(f"KV {_gib(ready.num_blocks * ready.block_bytes)} ({_count(tokens, 'token')})")
    if ready.num_states:
        held = f"{ready.num_states:,}, for {_count(ready.max_requests, 'request')} at a time"
        parts.append(f"states {_gib(ready.num_states * ready.state_bytes)} ({held})")
    each = " a rank" if ranks > 1 else ""
    return f"ready: {_count(ranks, 'rank')} on {ready.device}, {', '.join(parts)}{each}"


def closing_line(
    answers: Sequence[Answer],
    seconds: float,
    ready: EngineReady,
    worker: WorkerConfig,
    card: Card | None = None,
) -> str:
    """Say how fast it was, and why. One prompt: decoding, its first token apart; many: throughput.

    `card`: what is known of the GPUs; the floor is told of where that is something.
    """
    served = [answer for answer in answers if answer.token_ids]
    where = f"({_count(worker.tp, 'rank')}, {ready.device}, {ready.dtype})"
    tokens = sum(len(answer.token_ids) for answer in served)
    if not served:
        return f"0 tokens in {seconds:.2f} s {where}"
    cached = sum(answer.num_cached_tokens for answer in served)
    spared = f", {_count(cached, 'prompt token')} cached" if cached else ""
    first, share = min(answer.first_token_s for answer in served), ""
    if len(answers) > 1:
        amount = f"{_count(tokens, 'token')} of {_count(len(served), 'prompt')}"
        speed = _speed(tokens, seconds)
    else:
        seconds = served[0].total_s
        amount = _count(tokens, "token")
        speed = _speed(tokens - 1, seconds - first)
        if speed:
            speed += _of_floor(served[0], worker, card)
            share = f" ({_percent(first / seconds)})"
    told = f"{share}{spared}{_drafting(served)}{_waiting(served)}"
    counts = GraphCounts.of(served)
    if worker.device == "cuda" and counts.num_pieces:
        told += f", {counts}"
    return f"{amount} in {seconds:.2f} s: {speed}first token {first:.2f} s{told} {where}"


def _refuse_logprobs(params: SamplingParams) -> None:
    for name in LOGPROB_OPTIONS:
        if (value := getattr(params, name)) is not None:
            flag = option_spec(name).flag
            raise ConfigError(f"{flag} {value}: log-probabilities are JSON only: add --json")


def obey() -> int:
    """Become the worker that this rank of a cluster job is; rank 0 is the launcher.

    The only place where the launcher reaches past the runtime: a cluster launcher starts every
    rank with the same command line. By name, so that no other command pays for torch.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        # Inside a collective no handler of ours would run: let the signal end the process itself.
        signal.signal(signum, signal.SIG_DFL)
    importlib.import_module("unisono.workers.entry").main_in_cluster()
    return 0


def _show_stream(events: Iterable[Piece | Answer], console: Console) -> list[Answer]:
    answers, last = [], ""
    try:
        for event in events:
            if isinstance(event, Answer):
                answers.append(event)
            elif event.text:
                console.write(event.text)
                last = event.text
    finally:
        if last and not last.endswith("\n"):
            console.write("\n")
    return answers


def _as_json(answer: Answer, prompt: Prompt) -> str:
    entry: dict[str, Any] = {
        "index": answer.index,
        "prompt": prompt.as_given(),
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": answer.num_cached_tokens,
        },
        "timing": {
            "first_token_s": round(answer.first_token_s, 6),
            "total_s": round(answer.total_s, 6),
        },
        "digest": answer.digest,
    }
    if (counts := GraphCounts.of([answer])).num_pieces:
        entry["graphs"] = counts.as_json()
    if answer.drafted:
        entry["drafts"] = {"checked": [*answer.drafted], "right": [*answer.accepted]}
    for name in LOGPROB_OPTIONS:
        if (entries := getattr(answer, name)) is not None:
            entry[name] = logprobs_json(entries)
    if answer.error:
        entry["error"] = answer.error
    # ASCII: readable whatever the encoding of stdout is.
    return json.dumps(entry) + "\n"


def _as_text(answer: Answer, count: int) -> str:
    start = " ".join(answer.prompt.split())
    if len(start) > HEADING_WIDTH:
        start = start[: HEADING_WIDTH - 3] + "..."
    text = answer.text or f"({answer.finish_reason})"
    return f"[{answer.index + 1}/{count}] {start}\n{text.rstrip(chr(10))}\n\n"


def _report_rejected(answers: Sequence[Answer], console: Console) -> int:
    rejected = [answer for answer in answers if answer.finish_reason == "rejected"]
    for answer in rejected:
        name = f"prompt {answer.index + 1} of {len(answers)}" if len(answers) > 1 else "the prompt"
        console.note(f"unisono: error: {name} was rejected: {answer.error}")
    return EXIT_REJECTED if rejected else 0


def _drafting(answers: Sequence[Answer]) -> str:
    """Return ", 2.6 tokens a step (drafts right: 92 %, 70 %)", or nothing without drafts.

    The shares are those of each place in a chain, of all that were checked there.
    """
    counts = DraftCounts.of(answers)
    if not counts.checked:
        return ""
    shares = ", ".join(map(_percent, counts.shares))
    return f", {counts.tokens_per_step:.2f} tokens a step (drafts right: {shares})"


def _speed(tokens: int, seconds: float) -> str:
    """Return "82.6 tok/s, 12.1 ms a token, ", or nothing where there is nothing to divide."""
    if tokens < 1 or seconds <= 0:
        return ""
    return f"{tokens / seconds:.1f} tok/s, {1000 * seconds / tokens:.1f} ms a token, "


def _of_floor(answer: Answer, worker: WorkerConfig, card: Card | None) -> str:
    """Return "84 % of the floor at 4.3 TB/s, " of one answer alone; "" if no card is known."""
    if card is None or worker.device != "cuda":
        return ""
    partition = ModelPartition.of(worker.model, worker.tp)
    lengths = [(answer.num_prompt_tokens, len(answer.token_ids))]
    items = Items.of(worker.dtype, worker.state_dtype)
    read = answers_bytes(partition, items, lengths, worker.num_drafts)
    floor = floor_s(read, card.bandwidth_tb_s * 1e12, share=False)
    part = _percent(floor / (answer.total_s - answer.first_token_s))
    return f"{part} of the floor at {card.bandwidth_tb_s:g} TB/s, "


def _waiting(served: Sequence[Answer]) -> str:
    """Say which part of its time the answer that was last in coming waited for the ranks."""
    last = max(served, key=lambda answer: answer.total_s)
    part = _percent(last.waited_s / last.total_s)
    return f", {part} waiting for the ranks" if last.waited_s else ""


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
