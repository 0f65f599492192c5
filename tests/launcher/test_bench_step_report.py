"""What `unisono bench step` says: a line, a step taken apart, by kernel too; and as JSON."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from tests.workers.test_timings import DEVICE, WATCHED
from unisono.launcher.bench.report import WIDTH
from unisono.launcher.bench.step_report import BatchTimes, closing_line, details_of, row_of, titles
from unisono.workers.timings import KernelTime

MS = 1_000_000


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
        "name": "batch 1",
        "batch": 1,
        "num_keys": 160.5,
        "step_bytes": 15.1e9,
        "memory_s": 3.4e-3,
        "rounds": rounds,
        "devices": [DEVICE],
    }
    return BatchTimes(**{**fields, **changes})


def test_a_line_says_how_long_and_against_what():
    line = row_of(times(), "0123456789abcdef" * 2)
    device, host, *_ = details_of(times())
    shown = "1 160 4.000 25.0% 250.0 15,100.0 3.400 85% 0123456789abcdef"
    assert line.split() == shown.split()
    assert device == (
        "batch 1, rank 0: traced: busy 3.40 ms, 310 kernels (72 for all-reduce: 0.200 ms), 1 copy; "
        "idle 0.600 ms between them, then a gap of 0.020 ms"
    )
    assert host.strip() == "host 0.200 ms a step; 2.0 graph replays a step; peak memory 3.00 GiB"
    assert max(map(len, (line, titles(), host))) <= WIDTH
    assert len(titles()) - len("digest") == len(line) - 16


def test_a_step_is_told_by_kernel():
    """Ten of them, and what is left of 3.4 ms."""
    _, _, title, *lines = details_of(times())
    assert title.split() == ["traced", "kernel", "a", "step", "us", "a", "step", "of", "busy"]
    assert [line.split() for line in lines] == [
        ["_ordered_kernel", "145", "2,900.0", "85.3%"],
        ["one_shot_all_reduce_kernel", "72", "200.0", "5.9%"],
        ["Memcpy", "DtoH", "1", "2.0", "0.1%"],
    ]
    many = tuple(
        KernelTime(name="k" * 56, num_launches=number, busy_ns=1000 * number)
        for number in range(1200, 0, -100)
    )
    _, _, title, *lines = details_of(times(devices=[replace(DEVICE, kernels=many)]))
    assert len(lines) == 11
    assert lines[0].split() == ["k" * 56, "1,200", "1,200.0", "35.3%"]
    assert {len(line) for line in (title, *lines)} == {len(title)}
    assert len(title) <= WIDTH
    # More than all of it is told already, by kernels whose medians are of other steps.
    assert lines[-1].split() == ["others", "300", "0.0", "0.0%"]
    some = replace(DEVICE, kernels=many[4:], busy_ns=5_000_000)
    assert len(list(details_of(times(devices=[some])))) == 3 + 8
    few = replace(DEVICE, kernels=(*many[1:], *DEVICE.kernels), busy_ns=10_000_000)
    *_, others = details_of(times(devices=[few]))
    assert others.split() == ["others", "318", "3,500.0", "35.0%"]
    [rank] = times(devices=[few]).as_json()["ranks"]
    assert [kernel["busy_ns"] for kernel in rank["device"]["kernels"]][-2:] == [200_000, 2_000]
    assert len(rank["device"]["kernels"]) == 14


def test_drafts_give_a_step_more_tokens_and_a_line():
    [[seen], other] = times().rounds
    found = times(batch=2, drafts=3, rounds=[[replace(seen, num_tokens=84)], other])
    found = replace(found, rounds=found.rounds[:1])
    _, _, drafts, *_ = details_of(found)
    assert drafts.strip() == "3 drafts behind each row: 2.62 tokens a row and step"
    assert row_of(found, "").split()[4] == "1,050.0"
    assert (found.as_json()["tokens_per_step"], found.as_json()["drafts"]) == (5.25, 3)
    alone = replace(found, batch=1)
    assert closing_line(alone).startswith("5.00 ms a step of 1, ")


def test_a_step_of_prompts_has_the_tokens_that_it_computes():
    prompts = {"name": "2048 prompt tokens", "batch": 16, "num_keys": 128, "prompt_tokens": 2048}
    found = times(**prompts, step_flops=1e12, products_s=3.6e-3)
    shown = "16 128 4.000 25.0% 512,000.0 7.4 3.600 90%"
    assert row_of(found, "").split() == shown.split()
    assert closing_line(found).startswith(
        "4.00 ms a step of 2048 prompt tokens, 90 % of the floor of its products; 3.20 ms kernels, "
    )
    assert next(details_of(found)).startswith("2048 prompt tokens, rank 0: traced: busy 3.40 ms")
    entry = found.as_json()
    assert (entry["name"], entry["prompt_tokens"]) == ("2048 prompt tokens", 2048)
    assert entry["tokens_per_s"] == pytest.approx(512_000)
    assert (entry["memory_floor_ms"], entry["products_floor_ms"]) == (3.4, 3.6)
    assert (entry["floor_ms"], entry["flops_per_step"]) == (3.6, 1e12)
    alone = times(**prompts, products_s=1e-3)
    assert closing_line(alone).startswith(
        "4.00 ms a step of 2048 prompt tokens, 85 % of the floor;"
    )


def test_the_closing_line_takes_a_step_apart():
    """What 3.4 ms of work and 0.02 ms to the next step leave of 4 ms lies between kernels."""
    assert closing_line(times()) == (
        "4.00 ms a token, 85 % of the floor; 3.20 ms kernels, 0.580 ms kernel boundaries, "
        "0.200 ms all-reduce, 0.020 ms between steps"
    )
    alone = replace(DEVICE, num_collectives=0, collective_ns=0)
    assert "all-reduce" not in closing_line(times(devices=[alone]))
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
    found = times(rounds=[[seen, seen]], devices=[], memory_s=12e-3)
    assert closing_line(found) == (
        "10.00 ms a token, 120 % of the floor (what is read fits a cache); 7.00 ms computing, "
        "2.00 ms all-reduce, 1.00 ms between steps"
    )
    device, host = details_of(found)
    assert "6 collectives, waits included; kernels and copies are not measured" in device
    assert "eager: forward 8, tail 8 (cpu has no graphs); peak" in host
    assert [rank["collectives_per_step"] for rank in found.as_json()["ranks"]] == [6.0, 6.0]
