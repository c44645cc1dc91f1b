"""Progress of anything longer than a few seconds: bars with an estimate, or plain lines.

On a terminal rich draws bars; elsewhere (a file, CI) a plain line appears at most every ten
seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

Advance = Callable[[int], None]
"""Called with how many more units are done."""

PLAIN_INTERVAL_S = 10.0


class Progress:
    """Shows tasks and lines on `stream` (default stderr). quiet: shows nothing."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._bars: Any = None
        self._tasks = 0

    @property
    def terminal(self) -> bool:
        """Whether bars can be drawn."""
        return not self._quiet and self._stream.isatty()

    def line(self, text: str) -> None:
        """A line that stays, above any bar."""
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    @contextmanager
    def task(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """A unit of work of `total` steps (None: unknown); yields what to call as they get done."""
        if self._quiet:
            yield lambda count=1: None
        elif self.terminal:
            with self._bar(description, total) as advance:
                yield advance
        else:
            yield _PlainTask(self, description, total)

    @contextmanager
    def _bar(self, description: str, total: int | None) -> Iterator[Advance]:
        bars = self._started()
        task = bars.add_task(description, total=total)
        self._tasks += 1
        try:
            yield lambda count=1: bars.advance(task, count)
        finally:
            bars.remove_task(task)
            self._tasks -= 1
            if self._tasks == 0:
                bars.stop()
                self._bars = None

    def _started(self) -> Any:
        if self._bars is None:
            from rich import progress as rich_progress
            from rich.console import Console

            self._bars = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(bar_width=28),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TextColumn("left"),
                rich_progress.TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bars.start()
        return self._bars


class _PlainTask:
    """Counts, and says so now and then."""

    def __init__(self, progress: Progress, description: str, total: int | None) -> None:
        self._progress, self._description, self._total = progress, description, total
        self._done = 0
        self._start = self._said = time.monotonic()

    def __call__(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said >= PLAIN_INTERVAL_S:
            self._said = now
            self._progress.line(self._text(now - self._start))

    def _text(self, elapsed: float) -> str:
        if not self._total:
            return f"{self._description}: {self._done} in {format_seconds(elapsed)}"
        left = elapsed / max(self._done, 1) * (self._total - self._done)
        return (
            f"{self._description}: {self._done}/{self._total}, "
            f"{format_seconds(elapsed)} elapsed, about {format_seconds(left)} left"
        )


def format_seconds(seconds: float) -> str:
    """`42s`, `3m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
