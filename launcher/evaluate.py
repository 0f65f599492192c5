"""`unisono eval`: what a model is worth on data. `unisono eval ppl MODEL --text FILE`."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.launcher.answering import Request, numerics_of
from unisono.launcher.console import Console
from unisono.launcher.generate import obey
from unisono.launcher.options import LAUNCH_OPTIONS, config_options, given
from unisono.launcher.prompts import check_prompts
from unisono.models.config import ConfigError

if TYPE_CHECKING:
    from unisono.launcher.perplexity import Perplexity
    from unisono.launcher.resolve import Prepared
    from unisono.launcher.text.tokenizer import Tokenizer
    from unisono.runtime.protocol import EngineReady
    from unisono.workers.config import WorkerConfig


@click.group("eval", invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def command(context: click.Context) -> None:
    """Measure how good a model is on data of yours."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("ppl")
@click.argument("model")
@click.option("--text", "text_file", metavar="FILE", required=True, help="The text, in UTF-8.")
@click.option(
    "--window",
    type=int,
    metavar="N",
    help="Tokens that are seen at a time.  [default: 2048, or --max-model-len less one]",
)
@click.option(
    "--stride",
    type=int,
    metavar="N",
    help="Tokens from the start of a window to that of the next.  [default: half of --window]",
)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object on stdout.")
@config_options(*LAUNCH_OPTIONS)
def ppl(
    model: str,
    text_file: str,
    window: int | None,
    stride: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Say how well MODEL predicts a text: its perplexity, by sliding windows.

    The text is tokenised once, as a prompt of `generate --raw` is, with the tokens that the
    tokenizer puts around every text (often a BOS) and with special tokens that are written in it.
    Of each window only tokens that no earlier one held count; the first token of the text never
    does. The number does not depend on how many windows are computed together.
    """
    from unisono.launcher import perplexity, timed
    from unisono.launcher.cluster import detect_cluster

    cluster = detect_cluster(os.environ)
    if cluster is not None and cluster.rank > 0:
        return obey()
    console = Console()
    perplexity.check_windows(window, stride)
    text = _read_text(text_file)

    from unisono.launcher.engine_client import Engine
    from unisono.launcher.resolve import prepare, with_tokenizer

    with console.fetching() as fetched:
        prepared = prepare(model, given(options, LAUNCH_OPTIONS), os.environ, cluster, fetched)
    log_format = "%(asctime)s launcher %(levelname)s %(message)s"
    logging.basicConfig(level=prepared.launch.log_level.upper(), format=log_format)
    width, step = perplexity.resolve_windows(window, stride, prepared.worker)
    tokenizer = _tokenizer(model, text_file, prepared)
    token_ids = _encoded(text, text_file, tokenizer, prepared.worker)
    windows = perplexity.windows_held(len(token_ids), width, step, prepared.worker)
    kind = timed.TimedEngine if prepared.launch.trace else Engine
    with kind(with_tokenizer(prepared.launch, tokenizer.size, tokenizer.eos_ids), cluster) as e:
        with console.loading() as progress:
            ready = e.start(progress)
        started = time.monotonic()
        with console.counting("windows", len(windows)) as bar:
            result = perplexity.measure(
                e,
                tokenizer,
                token_ids,
                windows,
                # Enough that the engine never waits for the next ones.
                in_flight=2 * prepared.worker.max_requests,
                num_bytes=len(text.encode()),
                numerics=numerics_of(ready, prepared.worker),
                on_windows=lambda done: bar.show("windows", done, len(windows)),
            )
        seconds = time.monotonic() - started
    facts = {
        "model": model,
        "text": text_file,
        **_numbers(result),
        "text_tokens": len(token_ids),
        "window": width,
        "stride": step,
        "windows": len(windows),
        **_where(ready, prepared.worker.tp),
        "seconds": round(seconds, 6),
    }
    console.write((json.dumps(facts) if as_json else _as_text(facts)) + "\n")
    return 0


def _tokenizer(model: str, text_file: str, prepared: Prepared) -> Tokenizer:
    from unisono.launcher.text.tokenizer import Tokenizer

    if not prepared.has_tokenizer:
        raise ConfigError(f"{model} has no tokenizer, so it cannot read --text {text_file}")
    return Tokenizer.load(prepared.source)


def _read_text(name: str) -> str:
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--text {name}: {error.strerror}; choose a text file") from None
    try:
        text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {name}: not UTF-8 at byte {error.start}") from None
    if not text:
        raise ConfigError(f"--text {name}: is empty")
    return text


def _encoded(text: str, name: str, tokenizer: Tokenizer, worker: WorkerConfig) -> Sequence[int]:
    token_ids = tokenizer.encode(text)
    if len(token_ids) < 2:
        raise ConfigError(
            f"--text {name}: has {len(token_ids)} token{'s' * (len(token_ids) != 1)}, and the "
            "first never counts: at least 2 are needed"
        )
    extremes = Request(index=0, prompt="", prompt_ids=(min(token_ids), max(token_ids)))
    check_prompts([extremes], worker, max_tokens=1)
    return token_ids


def _numbers(result: Perplexity) -> dict[str, Any]:
    return {
        "ppl": _finite(result.ppl),
        "nll": _finite(result.nll),
        "tokens": result.tokens,
        "bytes": result.num_bytes,
        "bits_per_byte": _finite(result.bits_per_byte),
        "digest": result.digest,
    }


def _where(ready: EngineReady, tp: int) -> dict[str, Any]:
    return {"tp": tp, "device": ready.device, "dtype": ready.dtype}


def _finite(value: float) -> float | None:
    """JSON has no infinity: null stands for it."""
    return value if math.isfinite(value) else None


def _as_text(facts: dict[str, Any]) -> str:
    infinite = "infinite: the model rules a token out"
    ppl, nll, bits = facts["ppl"], facts["nll"], facts["bits_per_byte"]
    lines = [
        ("perplexity", infinite if ppl is None else f"{ppl:.6g}"),
        ("nll", infinite if nll is None else f"{nll:.6f} nats over {facts['tokens']:,} tokens"),
        ("bits per byte", infinite if bits is None else f"{bits:.6f} of {facts['bytes']:,} bytes"),
        (
            "windows",
            f"{facts['windows']:,} of up to {facts['window']:,} tokens, every {facts['stride']:,}",
        ),
        (
            "computed",
            f"in {facts['seconds']:.2f} s, tp={facts['tp']}, {facts['device']}, {facts['dtype']}",
        ),
        ("digest", facts["digest"]),
    ]
    return "\n".join(f"{label:<15}{value}" for label, value in lines)
