"""What the runtime is told before it starts. Frozen; nothing is written back."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.workers.channel import CurveKeys
from unisono.workers.config import WorkerConfig

STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Most tokens of a step where the user leaves it open, by device: on a GPU the launches of a step
are to be few beside its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Policy of the deciding process."""

    worker: WorkerConfig
    max_step_tokens: int = 0
    """Most tokens that one step computes, prompts and answers together; 0: 8192 on a GPU, 2048 on
    a CPU."""
    no_prefix_cache: bool = False
    """Compute every prompt anew, even where an earlier request began with the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOrders:
    """What the runtime process is told, on its stdin (workers/orders.py)."""

    config: RuntimeConfig
    client_endpoint: str
    """Where its ROUTER for the launcher listens; the launcher's name there is "launcher"."""
    worker_endpoint: str
    """Where its ROUTER for ranks listens; a rank's name there is "rank 0", "rank 1", ..."""
    session: str
    private_dir: str
    """Holds the sockets; the runtime removes it if the launcher dies."""
    flight_file: str = ""
    """Where the last steps are written if the engine fails; empty: nowhere."""
    version: str = ""
    """Of unisono, for that file."""
    log_level: str = "warning"
    worker_fd: int | None = None
    """The listening socket of a tcp:// `worker_endpoint`, inherited from the launcher."""
    curve: CurveKeys | None = None
    """Key pair of `worker_endpoint`, where ranks are on several hosts."""
    timeline_dir: str = ""
    """Where it notes what it does (workers/timeline.py); empty: nowhere."""
