"""`unisono bench step`: refusals, enough steps for every batch, what a line says, a real run."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.end_to_end import command
from tests.launcher.fakes import CONFIG, write_checkpoint
from tests.runtime.fakes import request
from tests.workers.test_timings import DEVICE, WATCHED
from unisono.launcher import bench_engine, bench_step, cli, resolve
from unisono.launcher.bench_engine import are_same, describe, partition_of
from unisono.launcher.bench_report import WIDTH
from unisono.launcher.bench_step import (
    SKIPPED,
    SPARE,
    TRACED,
    make_plan,
    measure,
    num_tokens,
    trace,
)
from unisono.launcher.bench_step_report import BatchTimes, closing_line, details_of, row_of, titles
from unisono.launcher.resolve import HostFacts
from unisono.launcher.roofline import Items, step_bytes
from unisono.runtime.protocol import Delta, Tokens, WorkerLost
from unisono.runtime.scheduler import Scheduler
from unisono.workers.protocol import Phase, int32s
from unisono.workers.timings import Machine, StepsSeen, WatchSteps

MS = 1_000_000


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
        (["--batch", "0"], "--batch 0: expected whole numbers from 1 up, as 1,8,32"),
        (["--batch", "1,x"], "--batch 1,x: expected whole numbers"),
        (["--context", "0"], "--context 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--batch", "1", "--max-step-tokens", "64"], "--max-step-tokens 64: 1 requests that dec"),
        (
            ["--context", "99"],
            "--context 99: with 233 tokens of answer that is 332 tokens, and the",
        ),
        (["--steps", "100"], "that is 398 tokens, and the model's limit is 128: choose fewer --st"),
        (["--tp", "99"], "tp=99: 9 query heads in 3 groups"),
        (["--device", "cuda"], "--device cuda: no GPU is visible here"),
        (["--output", "/nowhere/x"], "--output /nowhere/x: its directory does not exist"),
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
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(bench, arguments, message):
    code, out, err = bench("step", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_a_cluster_is_refused(bench, monkeypatch):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    code, _, err = bench("step")
    assert code == 2
    assert "unisono bench starts its own ranks, and environment started this command 2 times" in err


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 300),
    st.booleans(),
    st.integers(0, 3),
)
def test_requests_last_until_all_have_decoded_together(batch, context, steps, room, slowly, drafts):
    """Handed over at once or one a step, with as small steps as the command allows, and drafts that
    are all right."""
    budget = batch * (1 + drafts) + 64 + room
    longest = num_tokens(batch, context, steps, budget, drafts) - SPARE * (1 + drafts)
    scheduler = Scheduler(
        num_blocks=batch * ((context + longest) // 64 + 1),
        max_requests=batch,
        max_model_len=context + longest + 1,
        max_step_tokens=budget,
        eos_token_ids=[],
        prefix_cache=False,
        num_drafts=drafts,
    )
    waiting = [request(n, context, longest, ignore_eos=True) for n in range(batch)]
    for each in waiting:
        each.max_tokens = longest
    due, full = [], 0
    while waiting or scheduler.has_work:
        for each in waiting[: 1 if slowly else None]:
            scheduler.add(each)
        waiting = waiting[1:] if slowly else []
        if (plan := scheduler.next_plan()) is not None:
            checked = plan.rows.drafts or [0] * len(plan.rows)
            rows = zip(plan.rows.phase, checked, strict=True)
            due.append([1 + each for phase, each in rows if phase != Phase.CHUNK])
            full += len(plan.rows) == batch and plan.rows.decode_only and min(checked) == drafts
        if due and (plan is None or len(due) == 2):
            counts = due.pop(0)
            scheduler.apply([7] * sum(counts), counts)
    assert full >= SKIPPED + max(steps + 1, TRACED)


def times(**changes):
    """Two rounds of a step of 4 and of 5 ms; the host has it for a fifth of a millisecond."""
    rounds = [
        [
            replace(
                WATCHED,
                period_ns=array("q", [period] * 16),
                launch_ns=array("q", [MS // 5] * 16),
                memory_bytes=3 * 2**30,
                eager=(),
            )
        ]
        for period in (5 * MS, 4 * MS)
    ]
    fields = {
        "batch": 1,
        "num_keys": 160.5,
        "step_bytes": 15.1e9,
        "floor_s": 3.4e-3,
        "rounds": rounds,
        "devices": [DEVICE],
    }
    return BatchTimes(**{**fields, **changes})


def test_a_line_says_how_long_and_against_what():
    line = row_of(times(), "0123456789abcdef" * 2)
    device, host = details_of(times())
    shown = "1 160 4.000 25.0% 250.0 15,100.0 3.400 85% 0123456789abcdef"
    assert line.split() == shown.split()
    assert "busy 3.40 ms, 310 kernels (72 collective), 1 copy; then a gap of 0.020 ms" in device
    assert host.strip() == "host 0.200 ms a step; 2.0 graph replays a step; peak memory 3.00 GiB"
    assert max(map(len, (line, titles(), device, host))) <= WIDTH
    assert len(titles()) - len("digest") == len(line) - 16


def test_drafts_give_a_step_more_tokens_and_a_line():
    [[seen], other] = times().rounds
    found = times(batch=2, drafts=3, rounds=[[replace(seen, num_tokens=84)], other])
    found = replace(found, rounds=found.rounds[:1])
    *_, drafts = details_of(found)
    assert drafts.strip() == "3 drafts behind each row: 2.62 tokens a row and step"
    assert row_of(found, "").split()[4] == "1,050.0"
    assert (found.as_json()["tokens_per_step"], found.as_json()["drafts"]) == (5.25, 3)
    alone = replace(found, batch=1)
    assert closing_line(alone).startswith("5.00 ms a step of 1, ")


def test_the_closing_line_takes_a_step_apart():
    """What 3.4 ms of work and 0.02 ms to the next step leave of 4 ms lies between kernels."""
    assert closing_line(times()) == (
        "4.00 ms a token, 85 % of the floor; 3.20 ms kernels, 0.580 ms kernel boundaries, "
        "0.200 ms collectives, 0.020 ms between steps"
    )
    alone = replace(DEVICE, num_collectives=0, collective_ns=0)
    assert "collectives" not in closing_line(times(devices=[alone]))
    assert closing_line(times(batch=8)).startswith("4.00 ms a step of 8, 85 %")
    assert closing_line(times(devices=[None])) == "4.00 ms a token, 85 % of the floor"


def test_a_trace_that_is_slower_than_the_step_does_not_give_more_than_all():
    slow = replace(DEVICE, busy_ns=3_990_000, gap_ns=500_000)
    parts = times(devices=[slow]).parts_s()
    assert sum(parts.values()) == pytest.approx(4e-3)
    assert parts["kernel boundaries"] == pytest.approx(0, abs=1e-12)
    assert parts["between steps"] == pytest.approx(1e-5)


def test_on_a_cpu_the_host_computes():
    seen = replace(
        WATCHED,
        period_ns=array("q", [10 * MS] * 8),
        launch_ns=array("q", [9 * MS] * 8),
        num_collectives=48,
        collective_ns=16 * MS,
        eager=(("forward", "cpu has no graphs", 8), ("tail", "cpu has no graphs", 8)),
        num_replays=0,
    )
    found = times(rounds=[[seen, seen]], devices=[], floor_s=12e-3)
    assert closing_line(found) == (
        "10.00 ms a token, 120 % of the floor (what is read fits a cache); 7.00 ms computing, "
        "2.00 ms collectives, 1.00 ms between steps"
    )
    device, host = details_of(found)
    assert "6 collectives, waits included; kernels and copies are not measured" in device
    assert "eager: forward 8, tail 8 (cpu has no graphs); peak" in host
    assert [rank["collectives_per_step"] for rank in found.as_json()["ranks"]] == [6.0, 6.0]


def test_requests_are_the_same_in_any_company():
    assert are_same([[[1, 2]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    assert not are_same([[[1, 2]], [[1, 3], [3, 4]]])


class FakeRanks:
    """An engine of two ranks on GPUs: a token for each request at every poll, and what was seen."""

    ranks = (1, 0)

    def __init__(self) -> None:
        self.watched, self.seen, self.aborted = [], [], []
        self.left = {}

    def watch(self, wanted):
        self.watched.append(wanted)

    def submit(self, prompt_ids, params):
        number = 1000 * len(self.watched) + len(self.left)
        self.left[number] = params.max_tokens
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
    timed = WatchSteps(num_rows=3, skip=SKIPPED, num_steps=6)
    traced = WatchSteps(num_rows=3, skip=SKIPPED, num_steps=TRACED, traced=True)
    assert engine.watched == [timed, timed, timed, traced]
    assert (len(engine.aborted), engine.left) == (12, {})
    assert rounds == [[[0] * 6, [1] * 6, [2] * 6]] * 2
    assert found.num_keys == 9 / (3 * 6)
    partition = partition_of(plan.prepared)
    read = step_bytes(partition, Items(2, 4), 3, 0.5)
    assert found.step_bytes == sum(read)
    assert found.floor_s == max(read) / 4e12


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
    assert table[-1].split(" a token, ")[0] == f"{alone['ms_per_step']:.2f} ms"


@pytest.mark.timeout(100)
def test_steps_with_drafts_are_timed_with_them():
    """As they come, and all taken for right: then each row answers one more than it has drafts."""
    sizes = ("--batch", "2", "--context", "40", "--steps", "6", "--rounds", "2", "--device", "cpu")
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
        "prompts of 40 tokens, 6 steps, 2 drafts, synthetic acceptance 1, weights auto"
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
