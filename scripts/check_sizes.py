"""Keeps the code legible: long files, long functions and a core that grows are faults.

Prints what is near a limit and exits with 1 where one is crossed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("launcher", "runtime", "workers", "models", "ops", "unisono", "scripts")
CORE = (
    "launcher/process_table.py",
    "launcher/supervisor.py",
    "launcher/engine_client.py",
    "launcher/private_directory.py",
    "launcher/cluster.py",
    "launcher/diagnosis.py",
    "runtime",
    "workers",
    "models/layers",
    "models/partition.py",
    "ops/comm.py",
)
"""Process start, scheduler, worker loop, graph pool, parallel layers: read in an afternoon."""
BESIDE_THE_CORE = (
    # Instruments: they watch or measure, and an engine runs without them.
    "runtime/flight.py",
    "runtime/timed.py",
    "workers/bench.py",
    "workers/doctor.py",
    "workers/probes.py",
    "workers/timed.py",
    "workers/timeline.py",
    "workers/timings.py",
    "workers/tracer.py",
    # Words for what went wrong: they decide nothing.
    "launcher/diagnosis.py",
    # What layers are of: arithmetic on top of parallel layers.
    "models/layers/attention.py",
    "models/layers/delta_net.py",
    "models/layers/experts.py",
    "models/layers/mlp.py",
    "models/layers/norm.py",
    "models/layers/rotary.py",
    # Speculation: it changes how fast an answer comes, never the answer.
    "runtime/speculation.py",
    "workers/draft_steps.py",
    "workers/mixed_steps.py",
    "workers/speculator.py",
    # What short prompts are spared: they would be answered without it.
    "workers/prompt_steps.py",
    # Loading: what `Model` is made of stands in models/.
    "workers/weights.py",
    # How messages travel: behind send and receive. What they say is counted.
    "workers/channel.py",
    "workers/codec.py",
    # How much memory there is: facts that the core is told.
    "workers/memory.py",
    "workers/profile_run.py",
    "workers/weight_memory.py",
    # Sampling: arithmetic behind one call of the worker loop.
    "runtime/logprobs.py",
    "runtime/sampling_wire.py",
    "workers/logprobs.py",
    "workers/sampler.py",
    "workers/sampling_state.py",
)
"""Files of the core's rooms that are none of these."""
FILE_LIMIT, FUNCTION_GOAL, FUNCTION_LIMIT, CORE_LIMIT = 450, 60, 70, 6_000


def main() -> int:
    """Print every finding; 1 if one of them is a fault."""
    faults = list(_faults())
    for fault in faults:
        print(f"too long: {fault}")
    apart = {ROOT / name for name in BESIDE_THE_CORE}
    paths = {path for part in CORE for path in _python_files(ROOT / part)}
    core = sum(_num_lines(path) for path in paths - apart)
    print(f"core: {core} of {CORE_LIMIT} lines")
    return 1 if faults or core > CORE_LIMIT else 0


def _faults() -> Iterator[str]:
    for path in (path for part in SOURCES for path in _python_files(ROOT / part)):
        name, lines = path.relative_to(ROOT), _num_lines(path)
        if lines > FILE_LIMIT:
            yield f"{name}: {lines} lines, at most {FILE_LIMIT}"
        for function in _functions(path):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            where = f"{name}:{function.lineno} {function.name}: {length} lines"
            if length > FUNCTION_LIMIT:
                yield f"{where}, at most {FUNCTION_LIMIT}"
            elif length > FUNCTION_GOAL:
                print(f"long: {where}, better {FUNCTION_GOAL}")


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a file; kernels are exempt, for they cannot be taken apart at no cost."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
            yield node


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton." in ast.unparse(decorator) for decorator in function.decorator_list)


def _python_files(path: Path) -> list[Path]:
    """The file itself or all below a folder. A path that is gone is our own mistake."""
    assert path.exists(), f"{path} is gone: correct the lists of check_sizes.py"
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
