"""`unisono replay FILE`: run a step of a crashed engine again, on fresh ranks, and compare.

The file says which model it was and how it was run. Only the rows of the step are rebuilt, each
from its request's tokens (launcher/flight_file.py).
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from unisono.launcher.config import LaunchConfig
from unisono.launcher.console import Console
from unisono.launcher.flight_file import Flight, read_flight, replay_plans
from unisono.launcher.options import config_options, given
from unisono.models.config import ConfigError
from unisono.models.partition import ModelPartition
from unisono.runtime.config import STEP_TOKENS, RuntimeConfig
from unisono.runtime.protocol import WorkerLost
from unisono.workers.config import BLOCK_SIZE, WorkerConfig
from unisono.workers.protocol import Phase, StepPlan, StepResult

OPTIONS = ("tp", "log_level", "start_timeout_s", "stop_grace_s")
EXIT_DIFFERENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the step: what it was, what the ranks answered then and now."""

    slot: int
    phase: str
    start: int
    count: int
    recorded: tuple[int, ...]
    """One token; several where the ranks disagreed; none of a chunk, of a row behind the end of its
    answer, if no rank answered, or where chance had a part in it."""
    replayed: int | None
    """None of a chunk, or if the step failed again."""

    @property
    def equal(self) -> bool | None:
        """None: there is nothing to compare."""
        if not self.recorded or self.replayed is None:
            return None
        return self.recorded == (self.replayed,)


@click.command("replay")
@click.argument("file")
@click.option("--step", type=int, metavar="N", help="Default: the step that failed, or the last.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@config_options(*OPTIONS)
def command(file: str, step: int | None, as_json: bool, **options: Any) -> int:
    """Run a step of FILE, which a crashed engine left, again and compare its tokens.

    Ends with 1 where a token differs or the step fails again.
    """
    _refuse_cluster()
    path = Path(file).expanduser().absolute()
    flight = read_flight(path)
    recorded = flight.find(step)
    number = recorded.plan.step
    plans = replay_plans(flight, number)
    launch = launch_config(flight, given(options, OPTIONS))
    logging.basicConfig(
        level=launch.log_level.upper(), format="%(asctime)s launcher %(levelname)s %(message)s"
    )
    console = Console()
    tokens, fault = _run(launch, plans, console)
    rows = compare(recorded.plan, recorded.results, tokens, flight.left_to_chance(number))
    facts = {"step": number, "error": flight.header.failed.message, "fault": fault}
    if as_json:
        shown = [{**asdict(row), "equal": row.equal} for row in rows]
        console.write(json.dumps({**facts, "rows": shown}) + "\n")
    else:
        console.write("".join(f"{line}\n" for line in _table(rows)))
    different = sum(row.equal is False for row in rows)
    console.note(_verdict(flight, number, rows, different, fault))
    return EXIT_DIFFERENT if different or fault else 0


def launch_config(flight: Flight, options: dict[str, Any]) -> LaunchConfig:
    """How the step is run: as it was, but for the options. Raises ConfigError."""
    from unisono.launcher.graph_options import resolve_graphs
    from unisono.launcher.resolve import check_checkpoint, check_device, host_facts

    recorded, num_states = flight.header.worker, flight.header.num_states
    worker: WorkerConfig = replace(
        recorded,
        tp=options.pop("tp", recorded.tp),
        kv_tokens=flight.header.num_blocks * BLOCK_SIZE,
        memory_utilization=0.0,
        state_slots=num_states,
        speculate="off",
        max_requests=min(recorded.max_requests, num_states or recorded.max_requests),
        graph_buckets=(),
        capture="lazy",
    )
    check_device(worker.device, host_facts(os.environ), worker.tp)
    path = Path(worker.model_path)
    if not path.exists():
        raise ConfigError(f"the model of the flight is gone: {path}")
    check_checkpoint(path, ModelPartition.of(worker.model, worker.tp))
    most = STEP_TOKENS[worker.device]
    runtime = RuntimeConfig(worker=resolve_graphs(worker), max_step_tokens=most)
    return LaunchConfig(runtime=runtime, **options)


def compare(
    plan: StepPlan,
    results: Sequence[StepResult],
    tokens: array[int] | None,
    left_to_chance: Collection[int] = (),
) -> list[Row]:
    """Pair the rows of `plan` with what the ranks answered and with the `tokens` of now.

    What was answered in the slots `left_to_chance` says nothing.
    """
    rows, sample = [], 0
    for slot, phase, start, count in zip(
        plan.rows.slot, plan.rows.phase, plan.rows.start, plan.rows.count, strict=True
    ):
        samples = phase != Phase.CHUNK
        rows.append(
            Row(
                slot=slot,
                phase=Phase(phase).name.lower(),
                start=start,
                count=count,
                recorded=_distinct(results, sample)
                if samples and slot not in left_to_chance
                else (),
                replayed=tokens[sample] if samples and tokens is not None else None,
            )
        )
        sample += samples
    return rows


def _run(
    launch: LaunchConfig, plans: Sequence[StepPlan], console: Console
) -> tuple[array[int] | None, str]:
    """The tokens of the last of `plans`, or how one failed."""
    from unisono.launcher.engine_client import Engine

    with Engine(launch, records=False) as engine:
        with console.loading() as progress:
            engine.start(progress)
        try:
            return [engine.rerun(plan) for plan in plans][-1], ""
        except WorkerLost as error:
            return None, str(error)


def _distinct(results: Sequence[StepResult], sample: int) -> tuple[int, ...]:
    """What the ranks say of the first token of sampling row `sample`."""
    by_rank = sorted(results, key=lambda result: result.rank)
    return tuple(
        dict.fromkeys(
            result.tokens[sum(result.counts[:sample]) if result.counts else sample]
            for result in by_rank
            if not result.counts or result.counts[sample]
        )
    )


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [("slot", "phase", "start", "count", "recorded", "replayed", "equal")]
    for row in rows:
        recorded = "/".join(map(str, row.recorded)) or "-"
        replayed = "-" if row.replayed is None else str(row.replayed)
        equal = {True: "yes", False: "NO", None: "-"}[row.equal]
        place = (str(row.slot), row.phase, str(row.start), str(row.count))
        lines.append((*place, recorded, replayed, equal))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in lines]


def _verdict(flight: Flight, step: int, rows: Sequence[Row], different: int, fault: str) -> str:
    if fault:
        again = " again" if flight.header.failed.step == step else ""
        return f"unisono: step {step} failed{again}: {' '.join(fault.split())}"
    compared = sum(row.equal is not None for row in rows)
    if not compared:
        return f"unisono: step {step} ran without a fault; no recorded token to compare"
    return f"unisono: step {step}: {different} of {compared} tokens differ"


def _refuse_cluster() -> None:
    from unisono.launcher.cluster import detect_cluster

    cluster = detect_cluster(os.environ)
    if cluster is not None and cluster.world_size > 1:
        raise ConfigError(
            f"unisono replay starts its own ranks, and {cluster.launcher} started this command "
            f"{cluster.world_size} times: run it alone"
        )
