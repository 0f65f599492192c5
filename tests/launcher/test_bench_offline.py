"""`unisono bench offline`: the workload as numbers, refusals, what a line says, a real run."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end import command
from tests.launcher.test_bench_step import MACHINE
from tests.launcher.test_bench_step import bench as bench
from unisono.launcher import resolve
from unisono.launcher.bench.engine import Got
from unisono.launcher.bench.offline import (
    _floor,
    closing_line,
    grid_job,
    line_of,
    make_plan,
    summary,
    titles,
    workload,
)
from unisono.launcher.bench.report import WIDTH
from unisono.launcher.resolve import HostFacts


def test_the_workload_is_the_published_one():
    """nano-vllm's bench.py reports 133,966 output tokens of it."""
    job = workload(256, 100, 1024, 151936, 0.6, 0)
    assert job.lengths[:4] == [(964, 845), (724, 312), (484, 607), (508, 843)]
    assert [sum(column) for column in zip(*job.lengths, strict=True)] == [142_827, 133_966]
    prompt, params = job.asked[0]
    assert list(prompt[:3]) == [6311, 6890, 663]
    assert (params.temperature, params.seed, params.ignore_eos) == (0.6, 0, True)
    assert [params.seed for _, params in job.asked[:3]] == [0, 1, 2]
    assert job.name == "256 requests, 100-1024"


def test_another_seed_is_another_workload_and_small_vocabularies_are_kept_to():
    job = workload(8, 5, 9, 300, 0.0, 1)
    assert job.lengths != workload(8, 5, 9, 300, 0.0, 2).lengths
    assert all(5 <= count <= 9 for pair in job.lengths for count in pair)
    assert max(max(prompt) for prompt, _ in job.asked) < 300
    assert [params.seed for _, params in job.asked[:2]] == [1, 2]


def test_a_grid_has_one_length():
    job = grid_job((3, 70, 5), 300, 0.0, 0)
    assert (job.name, job.lengths) == ("3x70x5", [(70, 5)] * 3)
    assert len({tuple(prompt) for prompt, _ in job.asked}) == 3


def got(first, total, tokens=11):
    times = {"first_token_s": first, "total_s": total, "waited_s": total / 2}
    return Got(token_ids=[7] * tokens, num_preemptions=1, **times)


def test_a_line_tells_of_the_run_in_the_middle():
    job = grid_job((2, 70, 11), 300, 0.0, 0)
    middle = [got(0.2, 1.2), got(0.4, 2.4)]
    runs = [([got(9, 99)] * 2, 3.0), (middle, 2.5), ([got(9, 99)] * 2, 2.0)]
    found = {**summary(job, runs, 0.5), "digest": "0123456789abcdef" * 2}
    assert (found["seconds"], found["runs_s"]) == (2.5, [3.0, 2.5, 2.0])
    assert (found["prompt_tokens"], found["output_tokens"]) == (140, 22)
    assert found["output_tokens_per_s"] == 22 / 2.5
    assert found["first_token_s"] == pytest.approx(0.3)
    assert found["first_token_p99_s"] == 0.4
    assert found["ms_per_token"] == pytest.approx(150)
    assert (found["waiting_for_ranks"], found["preemptions"]) == (0.5, 2)
    shown = "2x70x11 2.50 22 8.8 20% 0.300 150.00 0123456789abcdef"
    assert line_of(found).split() == shown.split()
    assert closing_line(found) == (
        "2x70x11: 2.50 s, 20 % of the floor; a request's first token after 0.30 s, then 150.0 ms a "
        "token (medians); 50 % of it waiting for the ranks, 2 pre-emptions"
    )
    drafted = closing_line({**found, "right": [0.6, 0.5], "tokens_per_step": 1.906})
    assert drafted == closing_line(found) + ", 1.91 tokens a row and step"
    assert len(line_of(found)) <= WIDTH
    assert len(titles()) - len("digest") == len(line_of(found)) - 16


def test_narrow_states_lower_the_floor(monkeypatch):
    """Two answers of 5 tokens read and write the states of tiny-mtp four times each."""
    monkeypatch.setattr(
        resolve, "host_facts", lambda environ: HostFacts(num_gpus=1, torch_has_cuda=True)
    )
    absent = dict.fromkeys(("requests", "least", "most", "temperature", "warm_up"))
    floors = {}
    for dtype in ("float32", "bfloat16"):
        values = {**absent, "grid": "2x8x5", "repeats": 1, "seed": 0, "state_dtype": dtype}
        plan = make_plan(model="tiny-mtp", device="cuda", dtype="bfloat16", **values)
        floors[dtype] = _floor(plan, plan.jobs[0], MACHINE)
    config = plan.prepared.worker.model
    delta = config.delta
    numbers = delta.num_value_heads * delta.value_head_dim * delta.key_head_dim
    narrower = 2 * 4 * 2 * sum(config.delta_layers) * numbers * 2
    saved_s = floors["float32"] - floors["bfloat16"]
    assert saved_s * MACHINE.bytes_per_s == pytest.approx(narrower)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests 0: must be at least 1"),
        (["--requests", "65537"], "--requests 65537: must be at most 65536"),
        (["--min", "0"], "--min 0: must be at least 1"),
        (["--max", "9" * 4300], "9' has more than 19 digits"),
        (["--max", "50"], "--max 50: must be at least --min, 100"),
        (["--max", "0"], "--max 0: must be at least --min, 100"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--warm-up", "-1"], "--warm-up -1: must be at least 0"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--temperature", "101"], "--temperature 101.0: must be at least 0 and at most 100"),
        (["--grid", "1x128"], "--grid 1x128: expected NxINxOUT, as 1x128x256,32x128x256"),
        (["--grid", "0x1x1"], "--grid 0x1x1: expected NxINxOUT"),
        (["--grid", "65537x1x1"], "NxINxOUT, as 1x128x256,32x128x256, N of 1 to 65536"),
        (["--grid", "1x8x8", "--min", "3"], "--min 3: --grid 1x8x8 says how many and how long"),
        (
            ["--grid", "1x100x29"],
            "--grid 1x100x29: a prompt and its answer may have 129 tokens, and",
        ),
        (
            [],
            "--max 1024: a prompt and its answer may have 2048 tokens, and the model's limit is "
            "128: choose at most 64",
        ),
        (["--max-requests", "0"], "--max-requests 0: must be at least 1"),
        (
            ["--grid", "1x8x8,2x60x6", "--kv-tokens", "64"],
            "--kv-tokens 64: a prompt and its answer take 65 tokens (--grid 1x8x8,2x60x6); choose "
            "128 or more",
        ),
        (["--speculate", "9"], "--speculate 9: choose off, auto, 1, 2, 3, 4, 5, 6, 7 or 8"),
        (["--speculate", "2", "--grid", "1x8x8"], "--speculate 2: drafts come from a layer of the"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(bench, arguments, message):
    code, out, err = bench("offline", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.timeout(100)
def test_a_grid_and_its_repeats_have_one_answer():
    """With drafts, which are told of."""
    options = ("--speculate", "2", "--device", "cpu", "--temperature", "0.9")
    grid = ("--grid", "1x8x5,3x70x4", "--repeats", "2", "--warm-up", "1")
    out, _ = command.run("bench", "offline", "tiny-mtp", *options, *grid)
    *table, last = out.splitlines()
    assert max(map(len, table)) <= WIDTH
    found = json.loads(last)
    assert [line["name"] for line in found["lines"]] == ["1x8x5", "3x70x4"]
    assert [line["output_tokens"] for line in found["lines"]] == [5, 12]
    for line in found["lines"]:
        assert line["same_answers"] is True
        assert len(line["runs_s"]) == 2
        assert 0 < line["waiting_for_ranks"] <= 1
        assert 0 < line["first_token_s"] < line["seconds"]
        assert len(line["right"]) == 2
        assert 1 <= line["tokens_per_step"] <= 3
    assert found["workload"] == "temperature 0.9, seed 0, speculate 2, weights auto"
    assert found["numerics_of"].startswith("cpu float32 tp=1 attn=tiled numerics=exact")


@pytest.mark.soak
@pytest.mark.timeout(100)
def test_drafts_change_no_digest():
    asked = ("bench", "offline", "tiny-mtp", "--grid", "2x9x40", "--device", "cpu")
    plain, drafting = (
        json.loads(command.run(*asked, *options)[0].splitlines()[-1])
        for options in ((), ("--speculate", "4"))
    )
    assert (plain["lines"][0]["right"], plain["lines"][0]["tokens_per_step"]) == ([], 1)
    assert drafting["lines"][0]["digest"] == plain["lines"][0]["digest"]
