"""The measuring process of `unisono bench ops`: one device, every case, a message for each."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING

from unisono.workers.channel import Peer
from unisono.workers.entry import end_at_once, prepare_environment
from unisono.workers.orders import die_with_parent, read_orders
from unisono.workers.timings import BenchDone, BenchFailed, BenchOrders, CaseTime, Machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.models.bench_cases import Case
    from unisono.models.bench_inputs import Inputs
    from unisono.ops.dispatch import Ops
    from unisono.ops.timing import Call

PROCESS = "bench"
_TORCH_SHARE = 0.35
"""Part of the time that torch's own calls may take."""


def main() -> None:
    """A child of the launcher: orders come over stdin, results leave over the channel."""
    orders, parent_pid = read_orders(BenchOrders)
    die_with_parent(parent_pid)
    with Peer(orders.endpoint, PROCESS, (), orders.session) as peer:
        bench = _Bench(orders, peer)
        try:
            bench.run()
        except Exception as error:
            peer.send(BenchFailed(phase=bench.phase, message=f"{type(error).__name__}: {error}"))
    end_at_once(0)


class _Bench:
    def __init__(self, orders: BenchOrders, peer: Peer) -> None:
        self._orders, self._peer = orders, peer
        self._began = time.monotonic()
        self.phase = "import torch"

    def run(self) -> None:
        """Time torch as it comes, then ours: packing a linear layer changes torch's settings."""
        prepare_environment(os.environ)
        import torch

        from unisono.models.bench_cases import cases_of
        from unisono.models.bench_inputs import CPU_SIZES, GPU_SIZES, Inputs
        from unisono.models.shapes import SHAPES
        from unisono.ops.timing import timing_stream

        torch.set_num_threads(self._orders.threads)
        device = torch.device(self._orders.device)
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        sizes = GPU_SIZES if on_gpu else CPU_SIZES
        cases = {
            name: [c for c in cases_of(SHAPES[name], sizes, dtype) if c.op in self._orders.ops]
            for name in self._orders.shapes
        }
        with torch.inference_mode(), timing_stream(device):
            self.phase = "make inputs"
            inputs = Inputs([SHAPES[name] for name in cases], sizes, device, dtype)
            self.phase = "measure the machine"
            count = sum(len(of_shape) for of_shape in cases.values())
            self._peer.send(_machine(inputs, count))
            torchs = self._time_torch(cases, inputs)
            self._time_ours(cases, inputs, torchs)

    def _time_torch(
        self, cases: dict[str, list[Case]], inputs: Inputs
    ) -> dict[tuple[str, int], float]:
        """Seconds by shape and number of the case; 0 where torch has nothing or fails."""
        self.phase = "time torch"
        seconds = {}
        for shape, of_shape in cases.items():
            for number, case in enumerate(of_shape):
                seconds[shape, number] = 0.0
                if case.torch is not None and not self._is_over(_TORCH_SHARE):
                    try:
                        seconds[shape, number] = _seconds(case, case.torch(inputs), inputs)
                    except RuntimeError:
                        inputs.give_memory_back()
        return seconds

    def _time_ours(
        self,
        cases: dict[str, list[Case]],
        inputs: Inputs,
        torchs: dict[tuple[str, int], float],
    ) -> None:
        from unisono.models.shapes import SHAPES
        from unisono.ops import dispatch

        left_out = 0
        for shape, of_shape in cases.items():
            self.phase = "resolve the ops"
            ops = dispatch.resolve(inputs.device, SHAPES[shape].head_dim)
            for number, case in enumerate(of_shape):
                self.phase = f"time {case.op} {case.label}"
                if self._is_over(1.0):
                    left_out += 1
                    continue
                result = _timed(case, shape, ops, inputs, torchs[shape, number])
                self._peer.send(result)
        self._peer.send(BenchDone(seconds=time.monotonic() - self._began, num_left_out=left_out))

    def _is_over(self, share: float) -> bool:
        return time.monotonic() - self._began > share * self._orders.seconds


def _timed(case: Case, shape: str, ops: Ops, inputs: Inputs, torch_seconds: float) -> CaseTime:
    seconds, is_cold, error = 0.0, True, ""
    try:
        calls = case.ours(inputs, ops)
        is_cold = inputs.are_cold(calls, case.num_bytes)
        seconds = _seconds(case, calls, inputs)
    except Exception as fault:  # The others can still be measured.
        error = " ".join(f"{type(fault).__name__}: {fault}".split())
    return CaseTime(
        op=case.op,
        shape=shape,
        label=case.label,
        num_bytes=case.num_bytes,
        num_flops=case.num_flops,
        seconds=seconds,
        torch_seconds=torch_seconds,
        is_cold=is_cold,
        error=error,
    )


def _seconds(case: Case, calls: Sequence[Call], inputs: Inputs) -> float:
    from unisono.ops.timing import host_seconds_per_call, seconds_per_call

    if case.on_host:
        return host_seconds_per_call(calls)
    try:
        return seconds_per_call(calls, inputs.device)
    finally:
        inputs.give_memory_back()


def _machine(inputs: Inputs, num_cases: int) -> Machine:
    import torch

    from unisono.ops.timing import flops_per_s, read_bytes_per_s

    on_gpu = inputs.device.type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    if has_triton:
        import triton
    return Machine(
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        torch=str(torch.__version__),
        triton=triton.__version__ if has_triton else "",
        dtype=str(inputs.dtype).removeprefix("torch."),
        bytes_per_s=read_bytes_per_s(inputs.words()),
        flops_per_s=flops_per_s((8192,) if on_gpu else (512, 1024), inputs.dtype, inputs.device),
        num_cases=num_cases,
    )
