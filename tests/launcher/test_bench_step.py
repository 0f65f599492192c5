"""`unisono bench step`: refusals, rounds of each kind of step on fake ranks, and real runs."""

from __future__ import annotations

import json
from array import array
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.end_to_end import command
from tests.launcher.fakes import CONFIG, write_checkpoint
from tests.workers.test_timings import DEVICE, WATCHED
from unisono.launcher import cli, resolve
from unisono.launcher.bench import engine as bench_engine
from unisono.launcher.bench import step as bench_step
from unisono.launcher.bench.engine import are_same, describe, partition_of
from unisono.launcher.bench.report import WIDTH, Report
from unisono.launcher.bench.step import measure, show_plan, trace
from unisono.launcher.bench.step_plan import (
    SKIPPED,
    TRACED,
    make_plan,
    num_prompt_steps,
)
from unisono.launcher.resolve import HostFacts
from unisono.launcher.roofline import Items, prompt_bytes, prompt_flops, step_bytes
from unisono.models.config import ConfigError
from unisono.runtime.protocol import Delta, Finished, Tokens, WorkerLost
from unisono.workers.protocol import int32s
from unisono.workers.timings import Machine, StepsSeen, WatchSteps


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Run `unisono bench ...` on a checkpoint of 128 positions; return code, stdout and stderr."""
    model = str(write_checkpoint(tmp_path / "model"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(name, *arguments):
        code = cli.run(["bench", name, model, *arguments])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0: expected whole numbers of 1 to 65536, as 1,8,32"),
        (["--batch", "1,65537"], "--batch 1,65537: expected whole numbers of 1 to 65536"),
        (["--batch", "9" * 4301], "9: expected whole numbers of 1 to 65536"),
        (["--batch", "²"], "--batch ²: expected whole numbers of 1 to 65536"),
        (["--batch", "1,x"], "--batch 1,x: expected whole numbers"),
        (["--context", "0"], "--context 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--context", "9" * 4300], "9' has more than 19 digits"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--batch", "1", "--max-step-tokens", "64"], "--max-step-tokens 64: 1 requests that dec"),
        (
            ["--steps", "100"],
            "--batch 32, --context 128, --steps 100: while 32 requests decode together, one may "
            "have 398 tokens, and the model's limit is 128: too few to time steps of requests that",
        ),
        (["--tp", "99"], "tp=99: 9 query heads in 3 groups"),
        (["--device", "cuda"], "--device cuda: no GPU is visible here"),
        (["--output", "/nowhere/x"], "--output /nowhere/x: cannot be written (No such file"),
        (["--kv-tokens", "64"], "No such option '--kv-tokens'"),
        (["--speculate", "auto"], "--speculate auto: steps that are timed have the same number of"),
        (["--speculate", "9"], "--speculate 9: choose off, auto, 1, 2"),
        (["--speculate", "1"], "--speculate 1: drafts come from a layer of the model's own (MTP)"),
        (["--force-acceptance", "0.5"], "--force-acceptance 0.5: is of drafts; choose --speculate"),
        (["--force-acceptance", "1.5"], "--force-acceptance 1.5: must be above 0 and at most 1"),
        (
            ["--speculate", "3", "--batch", "2", "--max-step-tokens", "71"],
            "--max-step-tokens 71: 2 requests that decode with 3 drafts each and a block of a promp"
            "t take 72;",
        ),
        (["--temperature", "101"], "--temperature 101.0: must be at least 0 and at most 100"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0: must be at least 64, a block of a prompt"),
        (
            ["--prompt-tokens", "100", "--context", "64"],
            "--prompt-tokens 100: a step computes whole prompts, here of --context 64 tokens; "
            "choose 64 or 128, or another --context",
        ),
        (
            ["--prompt-tokens", "70", "--context", "40"],
            "of --context 40 tokens; choose 80, or another --context",
        ),
        (["--prompt-tokens", "64", "--context", "99"], "tokens; choose 99, or another --context"),
        (
            ["--prompt-tokens", "128", "--batch", "2"],
            "--batch 2: with --prompt-tokens 128 a step has as many prompts of --context tokens "
            "as that takes; leave one of the two out",
        ),
        (
            ["--prompt-tokens", "128", "--max-step-tokens", "256"],
            "--max-step-tokens 256: with --prompt-tokens 128 steps have as many tokens as that",
        ),
        (
            ["--prompt-tokens", "128", "--speculate", "2"],
            "--speculate 2: with --prompt-tokens 128 there are no drafts to check; leave one of",
        ),
        (
            ["--prompt-tokens", "128"],
            "--context 128: with 1 token of answer that is 129 tokens, and the model's limit is "
            "128: choose at most 127",
        ),
        (
            ["--prompt-tokens", "65538", "--context", "2"],
            "--prompt-tokens 65538: of --context 2 that is 32769 prompts a step, and at most 32768",
        ),
        (
            ["--prompt-tokens", "64", "--context", "32", "--steps", "500000"],
            "--steps 500000: a round has at most 1000000 prompts, here 2 a step; choose at most "
            "499991",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(bench, arguments, message):
    code, out, err = bench("step", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        # Where --steps 1 is too much, --batch is what helps.
        (["--batch", "2000", "--steps", "1"], "choose at most --batch 1645"),
        (["--context", "4000"], "choose at most --context 1787"),
        (["--context", "9" * 18], "choose at most --context 1787"),
        (["--steps", "5000"], "choose at most --steps 1750"),
        (["--batch", "200", "--speculate", "8"], "choose at most --batch 13 or --speculate 3"),
        (["--batch", "2000", "--steps", "3000"], "choose less of more than one of --batch, --con"),
    ],
)
def test_it_says_which_option_makes_requests_too_long(capsys, arguments, advice):
    """And names a value that is served, the largest."""
    err = command.refused(capsys, "bench", "step", "tiny-mtp", "--device", "cpu", *arguments)
    assert f"and the model's limit is 2048: {advice}" in err
    option, value = advice.split()[-2:]
    values = {"batch": None, "context": 128, "steps": 64, "rounds": 1, "device": "cpu"}
    for name, text in zip(arguments[::2], arguments[1::2], strict=True):
        values[name[2:]] = int(text) if name in ("--context", "--steps") else text
    if not value.isdigit():
        return
    for number, is_served in ((int(value), True), (int(value) + 1, False)):
        tried = number if option in ("--context", "--steps") else str(number)
        with nullcontext() if is_served else pytest.raises(ConfigError, match="limit is 2048"):
            make_plan(model="tiny-mtp", **{**values, option[2:]: tried})


def test_a_cluster_is_refused(bench, monkeypatch):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    code, _, err = bench("step")
    assert code == 2
    assert "unisono bench starts its own ranks, and environment started this command 2 times" in err


def test_requests_are_the_same_in_any_company():
    assert are_same([[[1, 2]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    assert not are_same([[[1, 2]], [[1, 3], [3, 4]]])


class FakeRanks:
    """An engine of two ranks on GPUs: a token for each request at every poll, and what was seen."""

    ranks = (1, 0)

    def __init__(self) -> None:
        self.watched, self.seen, self.aborted = [], [], []
        self.left, self.asked = {}, []

    def watch(self, wanted):
        self.watched.append(wanted)

    def submit(self, prompt_ids, params, *, more):
        number = 1000 * len(self.watched) + len(self.left)
        self.left[number] = params.max_tokens
        self.asked.append((list(prompt_ids), params, more))
        return number

    def abort(self, number):
        self.aborted.append(number)
        del self.left[number]

    def poll(self, timeout_s):
        wanted = self.watched[-1]
        if not self.seen and min(self.left.values()) < 200:
            device = DEVICE if wanted.traced else None
            self.seen += [
                StepsSeen(rank=rank, watched=replace(WATCHED, num_keys=9, device=device))
                for rank in self.ranks
            ]
        self.left = {number: left - 1 for number, left in self.left.items()}
        # Request 1 was aborted before.
        late = Delta(request_id=1, token_ids=array("i", [9]))
        numbers = array("q", [1, *self.left])
        return [late, Tokens(request_ids=numbers, token_ids=int32s(n % 1000 for n in numbers))]


MACHINE = Machine(
    device="a card",
    torch="",
    triton="",
    dtype="bfloat16",
    bytes_per_s=4e12,
    flops_per_s=1.0,
    num_cases=0,
)


def test_a_gpu_is_warmed_up_timed_and_then_traced(tmp_path, monkeypatch):
    model = str(write_checkpoint(tmp_path / "model", max_position_embeddings=1024))
    monkeypatch.setattr(
        resolve, "host_facts", lambda environ: HostFacts(num_gpus=2, torch_has_cuda=True)
    )
    values = {"batch": "3", "context": 8, "steps": 5, "rounds": 2, "tp": 2, "device": "cuda"}
    plan = make_plan(model=model, **values)
    engine = FakeRanks()
    found, rounds = measure(engine, plan, 3, MACHINE)
    assert found.devices == ()
    assert trace(engine, plan, found) == [DEVICE, DEVICE]
    rows = {"num_rows": 3, "num_tokens": 3, "phase": 2, "skip": SKIPPED}
    timed = WatchSteps(**rows, num_steps=6)
    traced = WatchSteps(**rows, num_steps=TRACED, traced=True)
    assert engine.watched == [timed, timed, timed, traced]
    assert (len(engine.aborted), engine.left) == (12, {})
    assert rounds == [[[0] * 6, [1] * 6, [2] * 6]] * 2
    assert found.num_keys == 9 / (3 * 6)
    partition = partition_of(plan.prepared)
    read = step_bytes(partition, Items(2, 4), 3, 0.5)
    assert found.step_bytes == sum(read)
    assert found.floor_s == max(read) / 4e12


class PromptRanks(FakeRanks):
    """The same; each poll is a step of whole prompts, whose first ids are the tokens behind them.

    `odd`: the request whose token is another.
    """

    odd = -1

    def watch(self, wanted):
        super().watch(wanted)
        self.left, self.asked, self.num_steps = {}, [], 0

    def poll(self, timeout_s):
        wanted = self.watched[-1]
        self.num_steps += 1
        if self.num_steps == wanted.skip + wanted.num_steps:
            device = DEVICE if wanted.traced else None
            keys = wanted.num_tokens * wanted.num_steps
            self.seen += [
                StepsSeen(rank=rank, watched=replace(WATCHED, num_keys=keys, device=device))
                for rank in self.ranks
            ]
        events = []
        for number in list(self.left)[: wanted.num_rows]:
            del self.left[number]
            at = number % 1000
            token = self.asked[at][0][0] + (at == self.odd)
            events += [
                Delta(request_id=number, token_ids=int32s([token])),
                Finished(
                    request_id=number,
                    reason="length",
                    num_prompt_tokens=32,
                    num_tokens=1,
                    first_token_s=1.0,
                    total_s=1.0,
                ),
            ]
        return events


@pytest.mark.parametrize("odd", [-1, 5])
def test_steps_of_prompts_are_watched_on_a_gpu(tmp_path, monkeypatch, capsys, odd):
    """Three prompts a step, the same in each; a token that differs in one of them is found."""
    model = str(write_checkpoint(tmp_path / "model"))
    monkeypatch.setattr(
        resolve, "host_facts", lambda environ: HostFacts(num_gpus=2, torch_has_cuda=True)
    )
    values = {"batch": None, "context": 32, "steps": 5, "rounds": 2, "tp": 2, "device": "cuda"}
    plan = make_plan(model=model, **values, prompt_tokens=96, temperature=0.5)
    runtime = plan.prepared.launch.runtime
    assert (plan.batches, plan.names) == ((3,), ("96 prompt tokens",))
    assert (runtime.max_step_tokens, runtime.worker.max_requests) == (96, 6)
    assert plan.workload == "prompts of 32 tokens, 96 of them a step, 5 steps, temperature 0.5"
    engine = PromptRanks()
    engine.odd = odd
    found, runs = measure(engine, plan, 3, MACHINE)
    assert trace(engine, plan, found) == [DEVICE, DEVICE]
    rows = {"num_rows": 3, "num_tokens": 96, "phase": 1, "skip": SKIPPED}
    timed = WatchSteps(**rows, num_steps=6)
    traced = WatchSteps(**rows, num_steps=TRACED, traced=True)
    assert engine.watched == [timed, timed, timed, traced]
    prompts, params, more = zip(*engine.asked, strict=True)
    assert len(engine.asked) == 3 * num_prompt_steps(5)
    assert more == (True,) * (len(more) - 1) + (False,)
    assert all(prompts[at] == prompts[at % 3] for at in range(len(prompts)))
    assert [each.seed for each in params[:6]] == [0, 1, 2] * 2
    assert {(each.max_tokens, each.temperature, len(ids)) for ids, each, _ in engine.asked} == {
        (1, 0.5, 32)
    }
    # Two rounds of ten steps: the skipped ones and those that are watched.
    assert len(runs) == 2 * (SKIPPED + 6)
    assert runs[0] == [[ids[0]] for ids in prompts[:3]]
    assert are_same(runs) is (odd < 0)
    partition = partition_of(plan.prepared)
    moved, computed = prompt_bytes(partition, Items(2, 4), 3, 32), prompt_flops(partition, 3, 32)
    assert (found.num_keys, found.step_bytes, found.step_flops) == (32, sum(moved), sum(computed))
    assert (found.memory_s, found.products_s) == (max(moved) / 4e12, max(computed))
    show_plan(Report(as_json=False, output=None), plan, replace(MACHINE, flops_per_s=7e14))
    header = " ".join(capsys.readouterr().out.split())
    assert "2 rounds of 5 steps, each of 3 prompts of 32 random ids, drawn at temperature 0.5" in (
        header
    )
    assert "products reach 700.00 TFLOP/s, measured" in header


def test_narrow_states_are_said_and_lower_the_floor(monkeypatch):
    """tiny-mtp: three rows read and write the states of its delta nets in every step."""
    monkeypatch.setattr(
        resolve, "host_facts", lambda environ: HostFacts(num_gpus=1, torch_has_cuda=True)
    )
    read, said = {}, {}
    for dtype in ("float32", "bfloat16"):
        values = {"batch": "3", "context": 8, "steps": 5, "rounds": 1, "state_dtype": dtype}
        plan = make_plan(model="tiny-mtp", device="cuda", dtype="bfloat16", **values)
        engine = FakeRanks()
        engine.ranks = (0,)
        found, _ = measure(engine, plan, 3, MACHINE)
        read[dtype] = found.step_bytes
        said[dtype] = describe(plan.prepared, "tiny-mtp", "some")["state_dtype"]
    assert said == {"float32": "float32", "bfloat16": "bfloat16"}
    config = plan.prepared.worker.model
    delta = config.delta
    numbers = delta.num_value_heads * delta.value_head_dim * delta.key_head_dim
    narrower = 3 * 2 * sum(config.delta_layers) * numbers * 2
    assert read["float32"] - read["bfloat16"] == narrower


def test_an_engine_that_fails_has_the_last_word(tmp_path, monkeypatch, capsys):
    class Lost:
        def __init__(self, config):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def start(self, on_progress):
            raise WorkerLost("rank 1 died in phase 'load weights'")

    model = str(write_checkpoint(tmp_path / "model", max_position_embeddings=1024))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(bench_engine, "Engine", Lost)
    monkeypatch.setattr(bench_step, "measure_machine", lambda device, environ: MACHINE)
    code = cli.run(["bench", "step", model, "--json"])
    assert (code, *capsys.readouterr()) == (
        1,
        "",
        "unisono: rank 1 died in phase 'load weights'\n",
    )


@pytest.mark.timeout(100)
def test_two_ranks_measure_themselves(tmp_path):
    longer = {**CONFIG, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(longer))
    where = tmp_path / "step.json"
    sizes = ("--batch", "1,3", "--context", "70", "--steps", "4", "--rounds", "2", "--tp", "2")
    options = ("--load-format", "random", "--device", "cpu", "--output", str(where))
    out, _ = command.run("bench", "step", str(tmp_path), *sizes, *options)
    *table, last = out.splitlines()
    assert max(map(len, table)) <= WIDTH
    found = json.loads(last)
    assert json.loads(where.read_text()) == found
    assert found["workload"] == "prompts of 70 tokens, 4 steps, weights random"
    alone, three = found["lines"]
    # The prompt, the first token, the skipped steps and half of those that are timed.
    assert alone["keys_per_row"] == 70 + 1 + SKIPPED + 2
    assert [len(line["rounds_ms"]) for line in (alone, three)] == [2, 2]
    for line in (alone, three):
        assert line["same_answers"] is True
        assert line["eager"] == [
            ["forward", "cpu has no graphs", 10],
            ["tail", "cpu has no graphs", 10],
        ]
        # Two layers reduce twice each; the embedding and the arg-max are the others.
        assert [rank["collectives_per_step"] for rank in line["ranks"]] == [6.0, 6.0]
        assert all(rank["memory_bytes"] > 2**24 for rank in line["ranks"])
        assert line["tokens_per_s"] == pytest.approx(1e3 * line["batch"] / line["ms_per_step"])
    assert alone["digest"] != three["digest"]
    closing = [line for line in table if " ms a " in line and " of the floor" in line]
    assert closing[0].split(" a token, ")[0] == f"{alone['ms_per_step']:.2f} ms"
    assert closing[1].split(" a step of 3, ")[0] == f"{three['ms_per_step']:.2f} ms"


@pytest.mark.timeout(100)
def test_steps_with_drafts_are_timed_with_them():
    """As they come, and all taken for right: then each row answers one more than it has drafts.

    Tokens are drawn, with the same noise for drafts and without.
    """
    sizes = ("--batch", "2", "--context", "40", "--steps", "6", "--rounds", "2", "--device", "cpu")
    sizes += ("--temperature", "0.7")
    found = {}
    for name, options in {
        "off": (),
        "real": ("--speculate", "2"),
        "forced": ("--speculate", "2", "--force-acceptance", "1"),
    }.items():
        out, _ = command.run("bench", "step", "tiny-mtp", *sizes, *options)
        *table, last = out.splitlines()
        assert max(map(len, table)) <= WIDTH
        assert any(line.startswith("SYNTHETIC: 1 of the drafts") for line in table) == (
            name == "forced"
        )
        found[name] = json.loads(last)
    lines = {name: each["lines"][0] for name, each in found.items()}
    assert found["forced"]["workload"] == (
        "prompts of 40 tokens, 6 steps, 2 drafts, synthetic acceptance 1, temperature 0.7, weights "
        "auto"
    )
    assert lines["real"]["digest"] == lines["off"]["digest"]
    assert lines["forced"]["digest"] == "synthetic"
    assert [line["same_answers"] for line in lines.values()] == [True, True, None]
    assert [line["drafts"] for line in lines.values()] == [0, 2, 2]
    assert lines["off"]["tokens_per_step"] == 2
    assert 2 <= lines["real"]["tokens_per_step"] < 6
    assert lines["forced"]["tokens_per_step"] == 6
    assert lines["off"]["floor_ms"] < lines["real"]["floor_ms"]
    for line in lines.values():
        rate = line["tokens_per_step"] / line["ms_per_step"]
        assert line["tokens_per_s"] == pytest.approx(1e3 * rate)


@pytest.mark.soak
@pytest.mark.timeout(100)
def test_a_rank_watches_its_steps_of_prompts(tmp_path, monkeypatch):
    """Two prompts a step, with tokens that noise alone decides."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = str(write_checkpoint(tmp_path / "model"))
    values = {"batch": None, "context": 40, "steps": 3, "rounds": 2, "temperature": 1.0}
    plan = make_plan(model=model, **values, prompt_tokens=80)
    with bench_engine.started(plan.prepared) as (engine, _):
        found, runs = measure(engine, plan, 2, MACHINE)
    assert found.num_keys == 40
    assert [len(seen[0].period_ns) for seen in found.rounds] == [3, 3]
    assert found.as_json()["eager"] == [
        ["forward", "cpu has no graphs", 8],
        ["tail", "cpu has no graphs", 8],
    ]
    assert are_same(runs)
    assert len({token for [token] in runs[0]}) == 2
