"""One rank of a trial of symmetric memory on two or more GPUs: started by test_symmetric.py, or by
hand: torchrun --nproc-per-node 2 -m tests.gpu.symmetric_stress PART

Every sum is compared, bit by bit, with the definition, from parts that each rank can compute by
itself. Waits end after some seconds, so that nothing here can hang. Exits with 0; with 3 once a
peer was lost, which is named on stdout; with 4 where there is no symmetric memory.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.closeness import assert_same_bits
from unisono.ops.comm import PeerLost
from unisono.ops.kernels.norm import add_rms_norm
from unisono.ops.kernels.reduce import ordered_sum
from unisono.ops.symmetric import Symmetric, open_symmetric
from unisono.workers import device as devices

WIDTH, EPS = 4096, 1e-6
REPLAYS = 1000


class Trial:
    """The numbers of all ranks, and what this one makes of its own."""

    def __init__(self, end: Symmetric, device: torch.device) -> None:
        self.end, self.ranks, self.device = end, end.layout.ranks, device
        self._together = torch.Generator(device).manual_seed(1)
        some = {"dtype": torch.bfloat16, "device": device}
        self.small = torch.zeros(self.ranks, 2, WIDTH, **some)
        self.large = torch.zeros(self.ranks, end.layout.one_shot_bytes // 8192 + 8, WIDTH, **some)
        # Beyond the one-shot with norm, and not all of the last lane of a two-shot.
        rows = 2 * end.layout.one_shot_bytes // 8192 + 9
        self.wide = torch.zeros(self.ranks, rows, WIDTH, **some)
        self.residual = torch.zeros(rows, WIDTH, **some)
        self.weight = torch.randn(WIDTH, generator=self._together, device=device).bfloat16()
        self.keys = torch.zeros(self.ranks, 32, dtype=torch.int64, device=device)

    def change(self) -> None:
        """Other numbers, the same on every rank."""
        for tensor in (self.small, self.large, self.wide, self.residual):
            tensor.normal_(generator=self._together)
        self.keys.random_(-(2**62), 2**62, generator=self._together)

    def run(self) -> list[Tensor]:
        """Both with norm, one-shot, two-shot, that with norm, maximum, one-shot; this rank's parts
        alone are read."""
        end, rank = self.end, self.end.rank
        fused = [*self._fused(self.small[rank]), *self._fused(self.wide[rank])]
        results = [end.all_reduce(self.small[rank]), *fused, end.all_reduce(self.large[rank])]
        results += self._fused(self.wide[rank])
        results += [end.max(self.keys[rank]), end.all_reduce(self.small[rank])]
        return [result for result in results if result is not None]

    def _fused(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rest = (self.weight, self.residual[: len(x)], self.weight, EPS)
        both = self.end.all_reduce_add_rms_norm(x, *rest)
        assert both is not None
        return both

    def compare(self, name: str, results: list[Tensor]) -> None:
        small = ordered_sum(self.small)
        one, two = (
            add_rms_norm(total + self.weight, self.residual[: len(total)], self.weight, EPS)
            for total in (small, ordered_sum(self.wide))
        )
        wants = [small, *one, *two, ordered_sum(self.large), *two, self.keys.amax(0), small]
        for number, (got, want) in enumerate(zip(results, wants, strict=True)):
            if got.dtype == torch.int64:
                assert torch.equal(got, want), f"{name}: keys"
            else:
                assert_same_bits(f"{name}, result {number}", got, want)
        self.end.check()


def replays(trial: Trial, pause: Callable[[int], None]) -> None:
    """A graph again and again, with other numbers each time and eager calls in between."""
    for _ in range(3):
        trial.change()
        trial.compare("eager", trial.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = trial.run()
    for step in range(REPLAYS):
        trial.change()
        pause(step)
        graph.replay()
        trial.compare(f"replay {step}", results)
        if step % 7 == 0:
            trial.change()
            trial.compare(f"eager after {step}", trial.run())
    # Without a look in between, so that ranks run as far apart as they may.
    for _ in range(REPLAYS):
        graph.replay()
    trial.compare("after many", results)


def play(part: str, trial: Trial) -> None:
    rank = trial.end.rank
    alone = random.Random(rank)
    match part:
        case "replays":
            replays(trial, lambda step: None)
        case "late":
            # The last rank comes late to some steps, and the first to a few others.
            replays(trial, lambda step: time.sleep(alone.choice([0] * 30 + [0.02, 0.1])))
        case "dies":
            trial.change()
            trial.compare("all there", trial.run())
            if rank == trial.ranks - 1:
                sys.stdout.flush()
                os._exit(0)
            trial.end.wait_s = 2.0
            for _ in range(50):
                trial.run()
                torch.cuda.synchronize()
                trial.end.check()
        case _:
            raise ValueError(part)


def main(part: str) -> int:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = devices.rank_device("cuda", os.environ)
    store = devices.open_store(os.environ)
    devices.join_group(rank, ranks, device, store, "nccl")
    assert dist.group.WORLD is not None
    end, reason = open_symmetric(rank, ranks, device, store, dist.group.WORLD)
    if end is None:
        print(f"no symmetric memory: {reason}", flush=True)
        return 4
    end.wait_s = 20.0
    try:
        play(part, Trial(end, device))
    except PeerLost as error:
        print(error, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    # A group whose peer is gone cannot be left politely.
    os._exit(code)
