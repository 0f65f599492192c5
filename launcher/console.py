"""What a person sees: answers on stdout, everything else on stderr.

Progress bars are drawn only where stderr is a terminal; `rich` is imported only then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from unisono.runtime.protocol import Starting

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


class Bar:
    """One progress bar; does nothing where there is no terminal to draw it on."""

    def __init__(self, progress: Progress | None, label: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(label, total=None)

    def show(self, label: str, done: int, total: int) -> None:
        """Draw `done` of `total`; a total of 0 stands for "unknown"."""
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, description=label, completed=done, total=total or None
            )

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar off the screen while something else is written there."""
        if self._progress is None:
            yield
            return
        self._progress.stop()
        yield
        self._progress.start()


class LoadingProgress:
    """Sums the start-up news of all ranks into one bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._of_rank: dict[int, tuple[int, int]] = {}

    def __call__(self, event: Starting) -> None:
        if event.total:
            self._of_rank[event.rank] = (event.done, event.total)
        done = sum(done for done, _ in self._of_rank.values())
        total = sum(total for _, total in self._of_rank.values())
        self._bar.show(event.phase, done, total)


class Console:
    """The two streams of a command."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err

    @property
    def is_watched(self) -> bool:
        """Whether notes go to a terminal."""
        return self._err.isatty()

    def write(self, text: str) -> None:
        """Write a part of an answer at once; the reader sees it before the next part exists."""
        self._out.write(text)
        self._out.flush()

    def note(self, text: str) -> None:
        """Write one line beside the answers."""
        self._err.write(text + "\n")
        self._err.flush()

    @contextmanager
    def loading(self) -> Iterator[LoadingProgress]:
        """A bar over the bytes that all ranks load; call it with each `Starting`."""
        with self._bar("starting", counts_bytes=True) as bar:
            yield LoadingProgress(bar)

    @contextmanager
    def fetching(self) -> Iterator[Callable[[int, int], None]]:
        """A bar over a download; call it with the bytes done and in total."""
        with ExitStack() as stack:
            bars: list[Bar] = []

            def show(done: int, total: int) -> None:
                # Only a fetch draws a bar: most of the time the model is there.
                if not bars:
                    bars.append(stack.enter_context(self._bar("fetching", counts_bytes=True)))
                bars[0].show("fetching the model", done, total)

            yield show

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Bar]:
        """A bar over `total` things that are done one by one; none for a single one."""
        with self._bar(label, counts_bytes=False, wanted=total > 1) as bar:
            bar.show(label, 0, total)
            yield bar

    @contextmanager
    def _bar(self, label: str, *, counts_bytes: bool, wanted: bool = True) -> Iterator[Bar]:
        if not (wanted and self._err.isatty()):
            yield Bar(None, label)
            return
        with _rich_progress(self._err, counts_bytes) as progress:
            yield Bar(progress, label)


def _rich_progress(stream: TextIO, counts_bytes: bool) -> Progress:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    amount: ProgressColumn = DownloadColumn() if counts_bytes else MofNCompleteColumn()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        console=RichConsole(file=stream),
        transient=True,
        # Answers go to stdout untouched, whatever a bar draws on stderr.
        redirect_stdout=False,
        redirect_stderr=False,
    )
