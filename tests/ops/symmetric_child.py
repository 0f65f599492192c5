"""One rank of symmetric memory in a process of its own, in Triton's interpreter: started by
test_symmetric.py with the directory of the memories, its rank, how many there are, and a part to
play. Exits with 0, or with 3 once a peer was lost, which it names on stdout."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

from unisono.ops.comm import PeerLost, ordered_sum
from unisono.ops.kernels.norm import add_rms_norm
from unisono.ops.symmetric import Symmetric
from unisono.ops.symmetric_layout import Layout

ROUNDS = 8


def main(directory: str, rank: int, ranks: int, role: str) -> int:
    layout = Layout(ranks, one_shot_bytes=8 << 10, two_shot_bytes=64 << 10)
    memories = [
        torch.from_file(
            str(Path(directory) / f"memory-{each}"),
            shared=True,
            size=layout.nbytes,
            dtype=torch.uint8,
        )
        for each in range(ranks)
    ]
    addresses = [memory.data_ptr() for memory in memories]
    fault = torch.zeros(1, dtype=torch.int64)
    # Long enough for processes that start seconds apart.
    end = Symmetric(rank, layout, memories[rank], addresses, fault, wait_s=30.0)
    together = torch.Generator().manual_seed(10)
    alone = random.Random(rank)
    for number in range(ROUNDS):
        if role == "late":
            time.sleep(alone.choice([0, 0, 0.05, 0.4]))
        if number == ROUNDS // 2 and role == "dies":
            return 0
        if number and role == "waits":
            end.wait_s = 1e-3
        shapes = [(1, 8), (2, 520), (30, 200), (19, 512)]
        shape = shapes[int(torch.randint(4, (), generator=together))]
        parts = torch.randn(ranks, *shape, generator=together).half()
        residual, both = parts[0] - 1, None
        if shape[1] == 512:
            both = end.all_reduce_add_rms_norm(parts[rank], None, residual, parts[1, 0], 1e-6)
            assert both is not None
        total = end.all_reduce(parts[rank])
        try:
            end.check()
        except PeerLost as error:
            print(error, flush=True)
            return 3
        assert total is not None
        assert torch.equal(total, ordered_sum(parts)), f"round {number}, {shape}"
        if both is not None:
            for got, want in zip(
                both, add_rms_norm(total, residual, parts[1, 0], 1e-6), strict=True
            ):
                assert torch.equal(got, want), f"round {number}, with norm"
    return 0


if __name__ == "__main__":
    where, number, count, part = sys.argv[1:]
    sys.exit(main(where, int(number), int(count), part))
