"""What the runtime makes of the states that ranks offer: fewer requests at a time, and said so."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.paths import python_path
from tests.recurrent import CONFIG
from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.protocol import (
    ENGINE_EVENTS,
    EngineReady,
    SamplingParams,
    Starting,
    Stop,
    Submit,
)
from unisono.workers.channel import Peer
from unisono.workers.config import WorkerConfig
from unisono.workers.orders import orders_line
from unisono.workers.protocol import (
    WORKER_COMMANDS,
    Allocate,
    Hello,
    Loaded,
    Progress,
    Ready,
    Shutdown,
    StepPlan,
    StepResult,
    int32s,
)

SESSION = "0" * 32
WORKER = WorkerConfig(model_path="m", model=CONFIG, tp=2, device="cpu", max_model_len=400)


@pytest.mark.parametrize(
    ("offered", "state_slots", "at_a_time", "warning"),
    [
        ((9, 12), 0, 9, "no more of 3.0 MiB fit: raise --memory-utilization"),
        ((9, 9), 9, 9, "raise --state-slots"),
        ((32, 40), 0, 32, ""),
    ],
)
def test_as_many_requests_run_as_have_a_state(
    tmp_path: Path, offered: tuple[int, int], state_slots: int, at_a_time: int, warning: str
) -> None:
    """B46: as many states are held as are told of."""
    worker = replace(WORKER, state_slots=state_slots)
    place = Path(os.environ.get("TMPDIR", "/tmp")) / tmp_path.name[:24]  # short: it holds sockets
    place.mkdir(exist_ok=True)
    ends = [f"ipc://{place}/{name}" for name in ("c", "w")]
    orders = RuntimeOrders(
        config=RuntimeConfig(worker=worker),
        client_endpoint=ends[0],
        worker_endpoint=ends[1],
        session=SESSION,
        private_dir=str(place),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", "from unisono.runtime.entry import main; main()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.stdin is not None
    process.stdin.write(orders_line(orders, os.getpid()).decode())
    process.stdin.flush()
    with (
        Peer(ends[0], "launcher", ENGINE_EVENTS, SESSION) as client,
        Peer(ends[1], "rank 0", WORKER_COMMANDS, SESSION) as first,
        Peer(ends[1], "rank 1", WORKER_COMMANDS, SESSION) as second,
    ):
        ranks = [first, second]
        for rank, (peer, num_states) in enumerate(zip(ranks, offered, strict=True)):
            peer.send(Hello(rank=rank, pid=1, host="h", config_digest="d"))
            peer.send(loaded(rank, num_states))
        for rank, peer in enumerate(ranks):
            assert peer.receive(20) == Allocate(num_blocks=64, num_states=min(offered))
            peer.send(Progress(rank=rank, phase=f"capture graphs, {rank + 1} of 2"))
            peer.send(Ready(rank=rank))
        # So that a rank that dies of it is said to have died of it.
        heard = {client.receive(20), client.receive(20)}
        assert heard == {
            Starting(rank=rank, phase=f"capture graphs, {rank + 1} of 2") for rank in range(2)
        }
        ready = client.receive(20)
        assert isinstance(ready, EngineReady)
        assert (ready.num_states, ready.state_bytes) == (min(offered), 3 << 20)
        assert ready.max_requests == at_a_time
        assert sorted(states_of(client, ranks, at_a_time)) == list(range(1, at_a_time + 1))
        client.send(Stop())
        while isinstance(plan := next_of(ranks), StepPlan):
            answer(ranks, plan)
        assert isinstance(plan, Shutdown)
        code = process.wait(20)
    _, said = process.communicate()
    assert code == 0, said
    lines = said.splitlines()
    assert len(lines) == bool(warning), said
    if warning:
        expected = (
            f"{at_a_time} of --max-requests 32 run at a time, for each needs a recurrent state"
        )
        assert f"runtime WARNING {expected}: {warning}" in lines[0]


def states_of(client: Peer, ranks: list[Peer], at_a_time: int) -> list[int]:
    """Ask for more than run at a time; the states that are handed out before one is given back."""
    params = SamplingParams(max_tokens=60)
    for number in range(at_a_time + 2):
        client.send(Submit(request_id=number, prompt_ids=int32s([1, number]), params=params))
    states: list[int] = []
    late = 0
    while late < 3:
        late += len(states) >= at_a_time
        plan = next_of(ranks)
        assert isinstance(plan, StepPlan)
        assert len(plan.open_state) == len(plan.open_slot)
        states += plan.open_state
        answer(ranks, plan)
    return states


def next_of(ranks: list[Peer]) -> object:
    """What every rank is told next."""
    first, second = (peer.receive(20) for peer in ranks)
    assert first == second
    return first


def answer(ranks: list[Peer], plan: StepPlan) -> None:
    for rank, peer in enumerate(ranks):
        tokens = int32s([5] * len(plan.rows))
        peer.send(StepResult(rank=rank, step=plan.step, tokens=tokens, digest=0, seconds=0.0))


def loaded(rank: int, num_states: int) -> Loaded:
    return Loaded(
        rank=rank,
        num_blocks=64,
        device="cpu",
        dtype="float32",
        weight_bytes=0,
        activation_bytes=0,
        block_bytes=1 << 10,
        num_states=num_states,
        state_bytes=3 << 20,
    )
