"""What the launcher is told: process policy, and a `RuntimeConfig` inside."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.runtime.config import RuntimeConfig

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How processes are started and watched."""

    runtime: RuntimeConfig
    log_level: str = "warning"
    """debug, info, warning or error: what the processes write to stderr."""
    start_timeout_s: float = 600.0
    """Seconds until every rank must have loaded its weights."""
    stop_grace_s: float = 5.0
    """Seconds a process has to end by itself before it is killed."""
    flight_dir: str = ""
    """Where the last steps are written if the engine fails, for `unisono replay`; otherwise in the
    user's own directory for such files."""
    trace: str = ""
    """Write what every process did and when to this file, for ui.perfetto.dev or
    chrome://tracing."""
