"""What a run tells people: notes, a line a step, progress with an estimate of the time left.

On a terminal rich draws bars; elsewhere (a file, CI) a plain line appears at most every ten
seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

Advance = Callable[[int], None]
"""Called with how many more units are done."""

PLAIN_INTERVAL_S = 10.0


class Reporter:
    """Shows notes, a line a step, and progress on `stream` (default stderr). quiet: nothing."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._bars: Any = None
        self._tasks = 0
        self._counter: _Counter | None = None
        self._seconds: list[float] = []
        """Of the last few steps."""

    @property
    def terminal(self) -> bool:
        """Whether bars can be drawn."""
        return not self._quiet and self._stream.isatty()

    def note(self, text: str) -> None:
        """A line that stays, above any bar."""
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def step(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        """A step's few numbers worth a glance, and how long the rest will take."""
        self._finish_counter()
        line = step_line(step, total, values)
        if "time/step_s" in values:
            self._seconds = [
                *self._seconds[-8:],
                values["time/step_s"] + values.get("time/eval_s", 0),
            ]
            left = sum(self._seconds) / len(self._seconds) * (total - step)
            line += f"  left {format_seconds(left)}" if left else ""
        self.note(line)

    def progress(self, description: str) -> Callable[[int, int, int], None]:
        """A callable for engines: (samples finished, samples asked for, tokens drawn so far)."""
        self._finish_counter()

        def update(finished: int, asked: int, drawn: int) -> None:
            if self._counter is None:
                if finished >= asked:
                    return
                task = self.task(description, asked)
                self._counter = _Counter(task, task.__enter__())
            self._counter.advance_to(finished)
            if finished >= asked:
                self._finish_counter()

        return update

    def _finish_counter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.task.__exit__(None, None, None)

    def close(self) -> None:
        """Take down any bar that is still up."""
        self._finish_counter()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

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


class _Counter:
    """A task driven by totals instead of increments."""

    def __init__(self, task: AbstractContextManager[Advance], advance: Advance) -> None:
        self.task, self._advance, self._done = task, advance, 0

    def advance_to(self, done: int) -> None:
        """Move to `done` units."""
        self._advance(done - self._done)
        self._done = done


class _PlainTask:
    """Counts, and says so now and then."""

    def __init__(self, reporter: Reporter, description: str, total: int | None) -> None:
        self._reporter, self._description, self._total = reporter, description, total
        self._done = 0
        self._start = self._said = time.monotonic()

    def __call__(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said >= PLAIN_INTERVAL_S:
            self._said = now
            self._reporter.note(self._text(now - self._start))

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


_GAPS = ("mismatch/logp_abs_max", "mismatch/held_logp_abs_max")
_COUNTS = ("mismatch/tokens_differing", "mismatch/held_tokens_differing")


def largest_gap(values: Mapping[str, Any]) -> float | None:
    """Largest |dlogp| (NaN wins) of tokens in updates and in groups that wait; None: none compared."""
    found = [values[key] for key in _GAPS if key in values]
    return max(found, key=lambda gap: (math.isnan(gap), gap)) if found else None


def differing(values: Mapping[str, Any]) -> float | None:
    """How many of those tokens differ in a bit; None where none does."""
    return sum(values.get(key, 0.0) for key in _COUNTS) or None


def is_exact(values: Mapping[str, Any]) -> bool | None:
    """Whether no compared token differed in a bit; None where none was compared.

    values: metrics of a step, or the worst of each over steps.
    """
    gap = largest_gap(values)
    share = values.get("mismatch/tokens_differing_share", 0.0)
    if gap is None and not differing(values):
        return None
    return gap == 0 and share == 0 and not differing(values)


_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out", "reward/eval_mean", "{:.3f}"),
    ("max|dlogp|", largest_gap, None),
    ("differing", differing, "{:,.0f}"),
    ("length", "rollout/length_mean", "{:.0f}"),
    ("waiting", "rollout/held_groups", "{:.0f}"),
    ("entropy", "rl/entropy", "{:.2f}"),
    ("clipped", "rl/clip_share_positive", "{:.1%}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("tok/s", "perf/step_tokens_per_s", "{:.0f}"),
    ("mfu", "perf/mfu", "{:.1%}"),
    ("s", "time/step_s", "{:.1f}"),
)
_PHASES = ("compile", "rollout", "reward", "forward", "backward", "optimizer")
"""The phases of a step that are shown where they take a tenth of it; the first is within the others."""


def last_line(values: Mapping[str, Any]) -> str:
    """The run's mismatch in a sentence: `0` only where it is exactly 0."""
    exact = is_exact(values)
    if exact is None:
        return "mismatch: not measured"
    verdict = "exactly 0: rollout and training are the same bits" if exact else "not the same bits"
    shown = (
        ("max |dlogp|", largest_gap(values)),
        ("mean |dlogp|", values.get("mismatch/logp_abs_mean")),
        ("share of tokens differing", values.get("mismatch/tokens_differing_share")),
        ("k3", values.get("mismatch/k3")),
        # where there are any: runs without parts of samples have no such tokens
        ("unfinished tokens differing", values.get("mismatch/held_tokens_differing") or None),
    )
    parts = [f"{name} {format_metric(value)}" for name, value in shown if value is not None]
    return f"mismatch: {'  '.join(parts)}  ({verdict})"


def step_line(step: int, total: int, values: Mapping[str, Any]) -> str:
    """`step 3/15  reward 0.412  max|dlogp| 0 ...`: the few numbers worth a glance."""
    parts = [f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"]
    for name, key, form in _SHOWN:
        value = key(values) if callable(key) else values.get(key)
        if value is not None:
            parts.append(f"{name} {format_metric(value) if form is None else form.format(value)}")
    return "  ".join(parts) + phases_line(values)


def phases_line(values: Mapping[str, Any]) -> str:
    """` (rollout 61% backward 20%; roofline rollout 42%)`: where the time went; "" where it is not known.

    roofline: the least time the card could take for a phase, over what it took.
    """
    whole = values.get("time/step_s", 0.0)
    shares = [
        (p, values[f"time/{p}_s"] / whole) for p in _PHASES if whole and f"time/{p}_s" in values
    ]
    shown = " ".join(f"{phase} {share:.0%}" for phase, share in shares if share >= 0.1)
    near = [(p, values.get(f"perf/roofline_{p}")) for p in ("rollout", "update", "optimizer")]
    roofline = " ".join(f"{phase} {share:.0%}" for phase, share in near if share is not None)
    if roofline:
        shown += f"; roofline {roofline}"
    return f" ({shown})" if shown else ""


def format_metric(value: float) -> str:
    """A difference for people: `0` only where it is exactly 0."""
    return "0" if value == 0 else f"{value:.3g}"
