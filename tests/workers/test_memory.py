"""KV memory: shares, what fits, and messages whose numbers are right."""

from __future__ import annotations

import re

import pytest
import torch

from tests.launcher.fakes import tiny_model
from unisono.models.partition import ModelPartition
from unisono.models.shapes import SHAPES
from unisono.workers import memory
from unisono.workers.config import BLOCK_SIZE, WorkerConfig
from unisono.workers.memory import (
    Budget,
    OutOfMemory,
    available_bytes,
    block_bytes,
    card_budget,
    host_budget,
    offer,
    offer_blocks,
    out_of_memory_explained,
)

GIB = 2**30
BLOCK = 4 << 20


def test_blocks_and_states_of_a_hybrid() -> None:
    """Qwen3.5-27B: 16 layers with KV, 48 with a state."""
    config = SHAPES["qwen3.5-27b"]
    for ranks in (1, 2, 16):
        partition = ModelPartition.of(config, ranks)
        kv_heads, values = max(4 // ranks, 1), 48 // ranks
        keys = max(16 // ranks, 1)
        for rank in (0, ranks - 1):
            block = block_bytes(partition, rank, torch.bfloat16)
            assert block == 2 * 16 * kv_heads * 256 * BLOCK_SIZE * 2
            convolution = 3 * (2 * keys + values) * 128
            for dtype in (torch.float32, torch.bfloat16):
                state = values * 128 * 128 * dtype.itemsize
                got = partition.state_bytes(rank, 2, dtype.itemsize)
                assert got == 48 * (2 * convolution + state)


def test_others_have_no_state_and_kv_in_every_layer() -> None:
    partition = ModelPartition.of(SHAPES["qwen3-30b-a3b"], 2)
    assert partition.state_bytes(1, 2, 4) == 0
    assert block_bytes(partition, 1, torch.bfloat16) == 2 * 48 * 2 * 128 * BLOCK_SIZE * 2


def worker(max_model_len: int = 1 << 20, **options: int) -> WorkerConfig:
    return WorkerConfig(model_path="m", model=tiny_model(), max_model_len=max_model_len, **options)


def card(**changes: float) -> Budget:
    facts = {"total": 80 * GIB, "free": 60 * GIB, "weights": 16 * GIB}
    facts |= {"activations": GIB + GIB // 2, "graphs": GIB // 2}
    return card_budget(**{**facts, "utilization": 0.0, **changes})  # type: ignore[arg-type]


def test_ranks_share_a_quarter_of_the_free_host_or_what_is_asked() -> None:
    assert offer_blocks(worker(), BLOCK, host_budget(8 * GIB, 2, 0.0)) == GIB // BLOCK
    assert offer_blocks(worker(), BLOCK, host_budget(8 * GIB, 2, 0.5)) == 2 * GIB // BLOCK
    assert offer_blocks(worker(), BLOCK, host_budget(8 * GIB, 1, 1.0)) == 8 * GIB // BLOCK


def test_a_card_gives_nine_tenths_less_weights_and_activations() -> None:
    assert offer_blocks(worker(), BLOCK, card()) == (72 - 18) * GIB // BLOCK
    assert offer_blocks(worker(), BLOCK, card(utilization=0.5)) == (40 - 18) * GIB // BLOCK


def test_a_message_says_what_takes_the_card() -> None:
    """B10: weights, step and graphs apart, and the share that is enough."""
    said = (
        r"--memory-utilization 0.2 of the card's 80.00 GiB, less 16.00 GiB of weights, 1.50 GiB "
        r"for a step and 768.00? MiB for graphs, leaves 0.00 MiB: raise it to at least 0.23"
    ).replace("768.00? MiB", "0.75 GiB")
    with pytest.raises(OutOfMemory, match=said):
        offer_blocks(worker(), BLOCK, card(utilization=0.2, graphs=GIB * 3 // 4))


def test_what_others_hold_of_a_card_cannot_be_had() -> None:
    assert offer_blocks(worker(), BLOCK, card(utilization=1.0)) == (60 - 2) * GIB // BLOCK
    assert offer_blocks(worker(), BLOCK, card(free=3 * GIB)) == GIB // BLOCK
    assert card(free=GIB).most == 0


def test_no_more_than_the_requests_can_fill() -> None:
    assert offer_blocks(worker(max_model_len=100), BLOCK, card()) == 32 * 2


@pytest.mark.parametrize("budget", [host_budget(8 * GIB, 2, 0.0), card(free=6 * GIB)])
def test_kv_tokens_may_take_all_that_there_is_and_no_more(budget: Budget) -> None:
    fits = 4 * GIB // BLOCK * 64
    assert offer_blocks(worker(kv_tokens=fits), BLOCK, budget) == fits // 64
    with pytest.raises(OutOfMemory, match=rf"lower it to {fits}, or free 4.00 MiB") as caught:
        offer_blocks(worker(kv_tokens=fits + 1), BLOCK, budget)
    assert "takes 4.00 GiB of memory on this rank and 4.00 GiB can be had" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda u: host_budget(36 << 20, 2, u), "0.25 of the host's 36.00 MiB free for 2 ranks"),
        (lambda u: host_budget(8 << 20, 1, u), "0.25 of the host's 8.00 MiB free for 1 rank"),
        (lambda u: card(weights=70 * GIB, free=9 * GIB, utilization=u), "0.9 of the card's 80.00"),
    ],
)
def test_the_utilization_that_a_message_names_is_enough(make, said) -> None:
    block = 5 << 20
    with pytest.raises(OutOfMemory) as caught:
        offer_blocks(worker(), block, make(0.0))
    assert f"--memory-utilization {said}" in str(caught.value)
    enough = float(re.fullmatch(r".* raise it to at least ([0-9.]+)", str(caught.value))[1])  # type: ignore[index]
    assert offer_blocks(worker(), block, make(enough)) >= 1
    with pytest.raises(OutOfMemory):
        offer_blocks(worker(), block, make(enough - 0.01))


@pytest.mark.parametrize("budget", [host_budget(3 << 20, 1, 1.0), card(free=2 * GIB + (3 << 20))])
def test_where_nothing_fits_the_message_says_what_is_missing(budget: Budget) -> None:
    with pytest.raises(OutOfMemory, match=r"free 1.00 MiB, or spread over more ranks \(--tp\)"):
        offer_blocks(worker(), BLOCK, budget)


STATE = 64 << 20


@pytest.mark.parametrize(
    ("snapshots", "max_requests", "states"), [(True, 32, 64), (False, 32, 32), (True, 3, 11)]
)
def test_requests_have_a_state_each_and_as_many_snapshots(
    snapshots: bool, max_requests: int, states: int
) -> None:
    config = worker(max_requests=max_requests)
    blocks = ((72 - 18) * GIB - (states + 1) * STATE) // BLOCK
    assert offer(config, snapshots, BLOCK, STATE, card()) == (blocks, states)
    assert offer(config, snapshots, BLOCK, 0, card()) == ((72 - 18) * GIB // BLOCK, 0)


def test_states_take_half_of_the_memory_at_the_most() -> None:
    budget = host_budget(4 * GIB, 1, 0.5)
    assert offer(worker(), True, BLOCK, STATE, budget) == (GIB // BLOCK, GIB // STATE - 1)
    # No more blocks than the requests that have a state can fill.
    short = worker(max_model_len=128)
    assert offer(short, True, BLOCK, STATE, budget) == (15 * 2, 15)
    assert offer(short, True, BLOCK, STATE, host_budget(40 * GIB, 1, 1.0)) == (32 * 2, 64)


@pytest.mark.parametrize("bytes_of_block", [BLOCK, 10 * STATE])
def test_one_state_and_one_block_are_the_least(bytes_of_block: int) -> None:
    least = 2 * STATE + bytes_of_block
    assert offer(worker(), True, bytes_of_block, STATE, host_budget(least, 1, 1.0)) == (1, 1)
    with pytest.raises(OutOfMemory, match=r"less 0.12 GiB of recurrent states, leaves") as caught:
        offer(worker(), True, bytes_of_block, STATE, host_budget(2 * least, 1, 0.4))
    enough = float(str(caught.value).rpartition(" ")[2])
    assert 0.5 <= enough < 0.51
    offer(worker(), True, bytes_of_block, STATE, host_budget(2 * least, 1, enough))
    with pytest.raises(OutOfMemory, match=r"free 1.00 MiB, or spread"):
        offer(worker(), True, bytes_of_block, STATE, host_budget(least - (1 << 20), 1, 1.0))


def test_kv_tokens_come_first() -> None:
    """What was asked for is given; states take what is left, not more than half."""
    budget = host_budget(4 * GIB, 1, 1.0)
    many = worker(kv_tokens=(4 * GIB - 10 * STATE) // BLOCK * 64)
    assert offer(many, True, BLOCK, STATE, budget) == ((4 * GIB - 10 * STATE) // BLOCK, 9)
    few = worker(kv_tokens=64)
    assert offer(few, True, BLOCK, STATE, budget) == (1, 2 * GIB // STATE - 1)
    with pytest.raises(OutOfMemory, match=r"--kv-tokens .* less 0.12 GiB of recurrent states"):
        offer(worker(kv_tokens=4 * GIB // BLOCK * 64), True, BLOCK, STATE, budget)


def test_state_slots_are_given_or_refused_with_what_fits() -> None:
    """Asked for 32 with memory for 9: nobody is told that there are 32."""
    budget = host_budget(BLOCK + 10 * STATE, 1, 0.1)
    with pytest.raises(OutOfMemory) as caught:
        offer(worker(state_slots=32), True, BLOCK, STATE, budget)
    said = str(caught.value)
    assert said.startswith("--state-slots 32 and the scratch state take 2.06 GiB of memory on this")
    assert said.endswith("lower it to 9 and raise --memory-utilization, or free 1.44 GiB")
    whole = host_budget(BLOCK + 10 * STATE, 1, 1.0)
    with pytest.raises(OutOfMemory, match=r"lower it to 9, or free 1\.44 GiB$"):
        offer(worker(state_slots=32), True, BLOCK, STATE, whole)
    roomy = host_budget(2 * (BLOCK + 10 * STATE), 1, 1.0)
    assert offer(worker(state_slots=9), True, BLOCK, STATE, roomy)[1] == 9
    exact = host_budget(BLOCK + 10 * STATE, 1, 1.0)
    assert offer(worker(state_slots=9), True, BLOCK, STATE, exact) == (1, 9)
    with pytest.raises(OutOfMemory, match=r"64.00 MiB can be had .*\): free 64.00 MiB$"):
        offer(worker(state_slots=1), True, BLOCK, STATE, host_budget(BLOCK + STATE, 1, 1.0))


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.25 GiB is free. Process 7 has 138.54 GiB memory in use. Of the allocated memory "
    "137.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        (TORCH_SAYS, "2.50 GiB more are needed and 1.25 GiB of its 139.80 GiB are free: spread"),
        ("out of memory", "more is needed: spread"),
    ],
)
def test_a_full_gpu_is_told_in_one_line(said: str, facts: str) -> None:
    with pytest.raises(OutOfMemory) as caught, out_of_memory_explained():
        raise torch.OutOfMemoryError(said)
    line = str(caught.value)
    assert line.startswith(f"the memory of the GPU is full: {facts} over more ranks (--tp)")
    assert "\n" not in line
    with pytest.raises(RuntimeError, match="another"), out_of_memory_explained():
        raise RuntimeError("another")


def test_cached_files_of_a_control_group_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable: 8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n",
    }
    monkeypatch.setattr(
        memory, "_lines", lambda path: files.get(path, "").splitlines(keepends=True)
    )
    assert available_bytes() == 3 * GIB
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_bytes() == 8 * GIB
