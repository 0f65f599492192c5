"""The command `unisono verify`: what it refuses, says on its way, and keeps when it is ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.fakes import CONFIG, FakeTokenizer, logprob_items, write_checkpoint
from tests.paths import python_path
from unisono.launcher import cli
from unisono.launcher.config import LaunchConfig
from unisono.launcher.console import Bar
from unisono.launcher.resolve import HostFacts
from unisono.launcher.verify.oracle import Oracle, OracleBroken
from unisono.launcher.verify.run import NUM_TOP
from unisono.runtime.protocol import (
    Delta,
    EngineReady,
    EngineState,
    Finished,
    Order,
    Reload,
    Reschedule,
    SamplingParams,
    Sleep,
    Tokens,
    Wake,
    WorkerLost,
)
from unisono.workers.protocol import logprob_width

RANDOM = ("--load-format", "random", "--prompts", "3", "--max-tokens", "4")
ALONE = ("--batch", "1", "--chunk", "none", "--prefix-cache", "off", "--pre-empt", "off")


class FakeEngine:
    """Answers with tokens that depend on the prompt alone, and reaches what it is told to.

    `started` are the engines that were; `on_setting` is called with the number of each setting of
    all of them, and may raise.
    """

    started: list[FakeEngine] = []  # noqa: RUF012
    settings: list[Reschedule] = []  # noqa: RUF012
    on_start: Callable[[], None] = lambda: None
    on_setting: Callable[[int], None] = lambda number: None
    twist: Callable[[FakeEngine, int], int] = lambda engine, token: token
    on_order: Callable[[Order], str] = lambda wanted: ""

    def __init__(self, config: LaunchConfig) -> None:
        self.worker = config.runtime.worker
        self.limits = Reschedule(num_blocks=1, max_step_tokens=1, prefix_cache=False)
        self._events: deque[Delta | Tokens | Finished] = deque()
        self.states: deque[EngineState] = deque()
        self.ordered: list[Order] = []
        self._num_asked = 0

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self) -> EngineReady:
        type(self).on_start()
        type(self).started.append(self)
        device, dtype = self.worker.device, self.worker.dtype
        return EngineReady(
            num_blocks=8, block_size=64, device=device, dtype=dtype, rank_pids=array("i")
        )

    def reschedule(self, limits: Reschedule) -> None:
        type(self).settings.append(limits)
        self.limits = limits
        if self.worker.trace_dir:
            Path(self.worker.trace_dir, "rank-0.jsonl").touch()
        type(self).on_setting(len(type(self).settings))

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        checksums: bool = False,
        more: bool = False,
    ) -> int:
        self._num_asked += 1
        first = sum(prompt_ids) + len(prompt_ids)
        tokens = [(first + number) % 200 for number in range(params.max_tokens)]
        tokens[-1] = type(self).twist(self, tokens[-1])
        split = len(tokens) if checksums else 1
        numbers = array("q", [self._num_asked] * (len(tokens) - split))
        self._events += (
            Delta(
                request_id=self._num_asked,
                token_ids=array("i", tokens[:split]),
                checksums=array("q", [7 * token for token in tokens]) if checksums else None,
                prompt_logprobs=logprob_items(prompt_ids[1:], params.prompt_logprobs, 1),
            ),
            Tokens(request_ids=numbers, token_ids=array("i", tokens[split:])),
            Finished(
                request_id=self._num_asked,
                reason="length",
                num_prompt_tokens=len(prompt_ids),
                num_tokens=len(tokens),
                first_token_s=0.0,
                total_s=0.0,
                num_cached_tokens=64 * self.limits.prefix_cache,
                num_preemptions=int(self.limits.num_blocks < 6),
                num_replays=0 if self.worker.no_graphs else self._num_asked,
            ),
        )
        return self._num_asked

    def order(self, wanted: Order) -> None:
        self.ordered.append(wanted)
        error = type(self).on_order(wanted)
        level = wanted.level if isinstance(wanted, Sleep) else 0
        self.states.append(EngineState(level=level, error=error))

    def poll(self, timeout_s: float) -> Sequence[Delta | Tokens | Finished]:
        return [] if self.states else [self._events.popleft()]


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return str(directory)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    class Engine(FakeEngine):
        started: list[FakeEngine] = []  # noqa: RUF012
        settings: list[Reschedule] = []  # noqa: RUF012

    monkeypatch.setattr("unisono.launcher.engine_client.Engine", Engine)
    return Engine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["verify", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--graphs", "on"), "--graphs on: cpu has no graphs; choose off, or --device cuda"),
        (("--attn", "torch-flash"), "--attn torch-flash: needs a GPU; on cpu choose auto or ref"),
        (("--speculate", "3"), "--speculate 3: drafts come from a layer of the model's own (MTP)"),
        (("--attn", "triton"), "--attn triton: needs a GPU; on cpu choose auto or reference"),
        (("--attn", "best"), "--attn best: choose auto, triton, torch-flash or reference"),
        (("--against", "vllm"), "--against vllm: choose transformers"),
        (("--against", "transformers"), "--against transformers: the weights of "),
        (("--html", "/no/such/page.html"), "--html /no/such/page.html: cannot be written (No such"),
        (ALONE, "every axis has its plain value alone, and nothing would be compared"),
        (("--html", "/"), "--html /: is no file; choose a file"),
        (("--max-tokens", "127"), "--max-tokens 127: the model's limit is 128 tokens, prompt incl"),
        (("--tp", "1,99"), "tp=99"),
        (("--chunk", "none,256"), "--chunk 256: no prompt is longer, since with --max-tokens 4"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    run: Run, model: str, engines: type[FakeEngine], arguments: Sequence[str], message: str
) -> None:
    code, out, err = run(model, *RANDOM, *arguments)
    assert (code, out, engines.started) == (2, "", [])
    assert err.startswith(f"unisono: error: {message}")
    assert err.count("\n") == 1


def test_a_shape_has_no_oracle(run: Run, engines: type[FakeEngine]) -> None:
    code, _, err = run("shape:smollm2-135m", "--against", "transformers")
    assert (code, engines.started) == (2, [])
    assert "the weights of shape:smollm2-135m are random here" in err


def test_two_engines_run_two_rank_counts_and_each_verdict_is_a_line(
    run: Run, model: str, engines: type[FakeEngine], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    axes = ("--tp", "1,2", "--batch", "1,4", "--chunk", "none,64", "--seeded")
    code, out, err = run(model, *RANDOM, *axes, "--json", "--html", str(page))
    said = json.loads(out)
    assert (code, said["ok"], said["complete"]) == (0, True, True)
    assert [engine.worker.tp for engine in engines.started] == [1, 2]
    assert len(engines.settings) == len(said["settings"]) == 18
    lines = err.splitlines()
    assert re.fullmatch(r"unisono: 1 rank, float32: started in \d+\.\d s", lines[0])
    outcome = r"unisono: 3 of 18: 1 rank, float32, batch 8, chunk 64: equal; 32 tokens, \d+\.\d s"
    assert re.fullmatch(outcome, lines[3])
    assert lines[11].startswith("unisono: 10 of 18: 2 ranks, float32, plain against 1 rank: within")
    assert lines[-1].startswith("16 of 16 promises hold: ")
    assert page.read_text().startswith("<!doctype html>")
    prints = [entry["numerics"] for entry in said["fingerprints"]]
    assert [text.split(" unisono")[0] for text in prints] == [
        f"cpu float32 tp={tp} attn=tiled numerics=exact" for tp in (1, 2)
    ]


def test_with_nothing_but_a_model_every_setting_is_reached(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    code, out, err = run(model, "--load-format", "random", "--json")
    said = json.loads(out)
    assert (code, said["ok"]) == (0, True), err
    assert "batch 8, chunk 64, pre-empt, sleep, reload" in [
        entry["label"] for entry in said["settings"]
    ]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = HostFacts(num_gpus=2, torch_has_cuda=True)
    monkeypatch.setattr("unisono.launcher.resolve.host_facts", lambda environ: facts)


@pytest.mark.usefixtures("two_gpus")
def test_on_a_gpu_graphs_are_an_axis_with_an_engine_of_its_own(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    code, out, _ = run(model, *RANDOM, "--chunk", "none,64", "--json")
    said = json.loads(out)
    assert (code, said["ok"]) == (0, True)
    assert "2 x " in said["machine"]
    assert [engine.worker.no_graphs for engine in engines.started] == [True, False]
    labels = [entry["label"] for entry in said["settings"] if entry["graphs"]]
    assert labels == [
        "graphs",
        "batch 8, chunk 64, pre-empt, graphs",
        "batch 8, chunk 64, prefix cache, graphs",
    ]
    # Once with and once without checksums; with a cache, once more to find something.
    assert [entry["tokens"] for entry in said["settings"] if entry["graphs"]] == [24, 64, 96]
    for option in (("--graphs", "off"), ("--attn", "reference")):
        engines.started.clear()
        run(model, *RANDOM, *ALONE, "--batch", "1,2", *option)
        assert [engine.worker.no_graphs for engine in engines.started] == [True]
    assert run(model, *RANDOM, "--graphs", "on", "--attn", "reference")[0] == 2


@pytest.mark.usefixtures("two_gpus")
def test_what_differs_from_graphs_only_is_a_graphs_fault(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    engines.twist = lambda engine, token: token + (not engine.worker.no_graphs)
    code, out, err = run(model, *RANDOM, *ALONE, "--json")
    plain, graphs = json.loads(out)["settings"]
    assert (code, plain["ok"], graphs["ok"]) == (1, True, False)
    assert graphs["finding"] == "op by op, without graphs, nothing differs: a graph is at fault"
    assert "unisono: looking for the op at fault: 1 rank, bfloat16, graphs" in err
    watched = engines.started[-1].worker
    assert (watched.no_graphs, bool(watched.trace_dir)) == (True, True)


@pytest.mark.parametrize(
    ("twist", "finding"),
    [
        (
            lambda engine, token: (
                token + (engine.limits.prefix_cache and not engine.worker.trace_dir)
            ),
            "no op returned something else this time: the difference comes and goes",
        ),
        (
            lambda engine, token: token + engine.limits.prefix_cache,
            "the answer differs again, though no op does: look at what lies between ops",
        ),
    ],
    ids=["once", "always"],
)
def test_a_difference_comes_and_goes_only_if_it_is_gone(
    run: Run, model: str, engines: type[FakeEngine], twist: Any, finding: str
) -> None:
    engines.twist = twist
    batch_alone = [*ALONE[:4], *ALONE[6:]]
    code, out, _ = run(model, *RANDOM, *batch_alone, "--json")
    *_, other = json.loads(out)["settings"]
    assert (code, other["ok"], other["finding"]) == (1, False, finding)


INTERRUPTED = ("--load-format", "random", "--prompts", "3", "--max-tokens", "16")


def test_answers_long_enough_are_interrupted_by_sleep_and_reload(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    code, out, _ = run(model, *INTERRUPTED, *ALONE, "--json")
    said = json.loads(out)
    assert (code, said["ok"]) == (0, True)
    assert [(entry["label"], entry["sleep"], entry["reload"]) for entry in said["settings"]] == [
        ("plain", False, False),
        ("batch 8, sleep", True, False),
        ("batch 8, reload", False, True),
        ("batch 8, sleep, reload", True, True),
    ]
    [engine] = engines.started
    nap = [Sleep(level=1), Wake()]
    deep = [Sleep(level=2), Wake()]
    again = Reload(path=model, load_format="random")
    assert engine.ordered == [*deep, *nap, again, *deep, again, *nap]
    short = run(model, *RANDOM, *ALONE, "--batch", "1,2", "--json")[1]
    assert len(json.loads(short)["settings"]) == 2, "too short"


@pytest.mark.parametrize("axis", ["sleep", "reload"])
def test_an_order_that_fails_is_a_promise_that_does_not_hold(
    run: Run, model: str, engines: type[FakeEngine], axis: str
) -> None:
    engines.on_order = lambda wanted: "" if isinstance(wanted, Sleep) else "rank 1: torn"
    other = {"sleep": "reload", "reload": "sleep"}[axis]
    code, out, _ = run(model, *INTERRUPTED, *ALONE, f"--{other}", "off", "--json")
    plain, bad = json.loads(out)["settings"]
    assert (code, plain["ok"], bad["ok"]) == (1, True, False)
    assert bad["note"] == "failed: rank 1: torn"


@pytest.mark.parametrize("axis", ["--sleep", "--reload"])
def test_answers_too_short_to_be_interrupted_are_refused(
    run: Run, model: str, engines: type[FakeEngine], axis: str
) -> None:
    code, out, err = run(model, *RANDOM, axis, "on,off")
    assert (code, out, engines.started) == (2, "", [])
    assert err == (
        f"unisono: error: {axis} on: answers of --max-tokens 4 have ended before the engine hears "
        "of it; choose off, or at least 16 tokens\n"
    )


def agreeing(oracle: Oracle, sequences: Any, forced: Any, environ: Any) -> Iterator[array[int]]:
    """Another program that says the same: of each place the likeliest first, then all."""
    width = logprob_width(NUM_TOP)
    for items in forced:
        rows = [items[at : at + width] for at in range(0, len(items), width)]
        yield array("i", [number for row in rows for number in (*row[:4], *row[2:])])


def broken(oracle: Oracle, sequences: Any, forced: Any, environ: Any) -> Iterator[array[int]]:
    yield from ()
    raise OracleBroken("OSError: no such architecture")


@pytest.mark.parametrize("ask", [agreeing, broken])
def test_the_oracle_has_a_row_for_each_dtype(
    run: Run,
    tmp_path: Path,
    engines: type[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[..., Iterator[array[int]]],
) -> None:
    monkeypatch.setattr("unisono.launcher.text.tokenizer.Tokenizer", FakeTokenizer)
    monkeypatch.setattr("unisono.launcher.verify.oracle.ask_oracle", ask)
    path = str(write_checkpoint(tmp_path / "model"))
    few = ("--prompts", "2", "--max-tokens", "3", "--dtype", "float32,bfloat16", "--no-bisect")
    code, out, err = run(path, *few, *ALONE, "--tp", "1,2", "--against", "transformers", "--json")
    said = json.loads(out)
    assert [(entry["dtype"], entry["tp"]) for entry in said["settings"][4:]] == [
        ("float32", 1),
        ("bfloat16", 1),
    ]
    assert len(said["settings"]) == 6
    if ask is agreeing:
        # Of 1 + 3 and 70 + 3 tokens all but the first are predicted.
        assert [entry["tokens"] for entry in said["settings"][4:]] == [75, 75]
        assert (code, said["ok"]) == (0, True)
        assert "unisono: 6 of 6: 1 rank, bfloat16, plain against transformers: within" in err
    else:
        notes = [entry["note"] for entry in said["settings"]]
        assert notes == ["", "", "", "", *["failed: OSError: no such architecture"] * 2]
        assert code == 1


def test_what_was_judged_is_shown_when_it_is_interrupted(
    run: Run, model: str, engines: type[FakeEngine], tmp_path: Path
) -> None:
    def stop(number: int) -> None:
        if number == 4:
            raise cli.Interrupted(15)

    engines.on_setting = stop
    page = tmp_path / "page.html"
    code, out, err = run(model, *RANDOM, "--html", str(page))
    assert code == 143
    table = out.splitlines()
    assert [line.split()[2:-6] for line in table if line.endswith(("equal", "base"))] == [
        ["plain"],
        ["batch", "8"],
        ["batch", "8,", "chunk", "64"],
    ]
    last = err.splitlines()[-1]
    assert last.startswith("interrupted: 2 of 2 promises hold, of 6 to be tested: ")
    assert "of 6 to be tested" in page.read_text()


ENDED = """
import time

from tests.launcher.test_verify import FakeEngine
from unisono.launcher import cli, engine_client

class Engine(FakeEngine):
    on_setting = lambda number: time.sleep(100 * (number == 3))

engine_client.Engine = Engine
cli.main()
"""


def test_a_job_that_is_ended_keeps_what_was_judged(model: str) -> None:
    environ = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", ENDED, "verify", model, *RANDOM]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "2 of 7: " not in process.stderr.readline():
            pass
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert (out.count("base"), out.count("equal")) == (1, 1)
    assert err.startswith("interrupted: 1 of 1 promises hold, of 6 to be tested: ")


def test_before_the_first_verdict_there_is_nothing_to_show(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    engines.on_start = stop
    assert run(model, *RANDOM) == (130, "", "")


def test_a_difference_ends_with_1_and_is_on_the_page(
    run: Run, model: str, engines: type[FakeEngine], tmp_path: Path
) -> None:
    engines.twist = lambda engine, token: token + engine.limits.prefix_cache
    page = tmp_path / "page.html"
    axes = ("--batch", "1", "--chunk", "none", "--pre-empt", "off")
    options = ("--no-bisect", "--html", str(page))
    code, out, err = run(model, *RANDOM, *axes, *options)
    assert code == 1
    assert re.search(r"prompt 0, token 3: \d+ for \d+", " ".join(out.split()))
    assert "0 of 1 promises hold" in err
    assert "16 of 16 requests differ" in page.read_text()


def test_a_page_that_cannot_be_written_after_all_ends_with_1(
    run: Run, model: str, engines: type[FakeEngine], tmp_path: Path
) -> None:
    place = tmp_path / "pages"
    place.mkdir()
    engines.on_setting = lambda number: shutil.rmtree(place, ignore_errors=True)
    options = (*ALONE, "--batch", "1,2", "--html", str(place / "page.html"))
    code, out, err = run(model, *RANDOM, *options)
    assert (code, out.count("equal")) == (1, 1)
    assert re.search(r"^unisono: --html .*page.html: not written: No such file", err, re.MULTILINE)


def test_a_terminal_gets_a_bar_and_no_lines(
    run: Run, model: str, engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Bar, "show", lambda self, label, done, total: labels.append((label, done)))
    code, _, err = run(model, *RANDOM, *ALONE, "--batch", "1,2")
    assert code == 0
    assert labels == [
        ("settings", 0),
        ("starting 1 rank, float32", 0),
        ("1 rank, float32, plain", 0),
        ("1 rank, float32, batch 2", 1),
    ]
    assert "of 2:" not in err


def test_a_lost_engine_is_the_fate_of_one_setting_only(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    def lose(number: int) -> None:
        if number == 2:
            raise WorkerLost("rank 0 died in phase 'step'")

    engines.on_setting = lose
    code, out, _ = run(model, *RANDOM, "--chunk", "none,64", "--json")
    assert (code, len(engines.started)) == (1, 2)
    notes = [entry["note"] for entry in json.loads(out)["settings"]]
    assert notes == ["", "failed: rank 0 died in phase 'step'", *[""] * 5]


def test_what_is_compared_with_a_lost_engine_fails(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    def lose(number: int) -> None:
        if number == 1:
            raise WorkerLost("rank 0 died")

    engines.on_setting = lose
    code, out, _ = run(model, *RANDOM, *ALONE, "--tp", "1,2", "--json")
    assert code == 1
    assert [entry["note"] for entry in json.loads(out)["settings"]] == [
        "failed: rank 0 died",
        "nothing to compare with: rank 0 died",
    ]


def test_memory_that_is_short_ends_it_at_once_with_2(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    starts = []

    def lose() -> None:
        starts.append(1)
        said = "rank 0 failed in phase 'check memory': OutOfMemory: use --tp 2"
        raise WorkerLost(said, phase="check memory", error="OutOfMemory")

    engines.on_start = lose
    code, out, err = run(model, *RANDOM, "--tp", "1,2")
    assert (code, out, starts) == (2, "", [1])
    assert err.splitlines()[-1].endswith("use --tp 2")


def test_an_engine_that_does_not_start_fails_all_its_settings(
    run: Run, model: str, engines: type[FakeEngine]
) -> None:
    def lose() -> None:
        raise WorkerLost("rank 0 failed in phase 'load weights'")

    engines.on_start = lose
    code, out, err = run(model, *RANDOM, "--json")
    said: dict[str, Any] = json.loads(out)
    assert (code, said["complete"], said["fingerprints"]) == (1, True, [])
    assert {entry["note"] for entry in said["settings"]} == {
        "failed: rank 0 failed in phase 'load weights'"
    }
    assert "0 of 6 promises hold" in err
