"""What `unisono verify` says on stderr while it runs: a bar on a terminal, elsewhere lines.

A job's log then holds every verdict as soon as it is known, whatever ends the job.
"""

from __future__ import annotations

from unisono.launcher.console import Bar, Console
from unisono.launcher.verify.compare import ORACLE, Verdict
from unisono.launcher.verify.plan import Setting
from unisono.launcher.verify.report import outcome_text, ranks_text
from unisono.launcher.verify.task import Task


class Progress:
    """Implements `News` of course.py."""

    def __init__(self, console: Console, bar: Bar, task: Task) -> None:
        self._console = console
        self._bar = bar
        self._num_done = 0
        self._num_all = task.num_verdicts

    def starting(self, setting: Setting) -> None:
        self._show(f"starting {_engine_text(setting)}")

    def started(self, setting: Setting, seconds: float) -> None:
        self._say(f"{_engine_text(setting)}: started in {seconds:.1f} s")

    def running(self, setting: Setting, against: str = "") -> None:
        beside = f" against {against}" if against == ORACLE else ""
        self._show(f"{ranks_text(setting)}, {setting.label}{beside}")

    def judged(self, verdict: Verdict) -> None:
        self._num_done += 1
        self._say(f"{self._num_done} of {self._num_all}: {outcome_text(verdict)}")

    def searching(self, setting: Setting) -> None:
        text = f"looking for the op at fault: {ranks_text(setting)}, {setting.label}"
        with self._bar.hidden():
            self._console.note(f"unisono: {text}")

    def _show(self, label: str) -> None:
        self._bar.show(label, self._num_done, self._num_all)

    def _say(self, text: str) -> None:
        if not self._console.is_watched:
            self._console.note(f"unisono: {text}")


def _engine_text(setting: Setting) -> str:
    return ranks_text(setting) + (", graphs" if setting.graphs else "")
