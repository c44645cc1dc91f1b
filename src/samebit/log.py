"""Where a run's numbers go: metrics.jsonl, TensorBoard, the console; and progress for the patient.

`JsonLines` is an append-only file that survives a crash in the middle of a line. `MetricsLog` writes
a step's metrics everywhere. `Progress` shows what is being done, with an estimate of the time left.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from samebit.progress import Progress

__all__ = ["JsonLines", "MetricsLog", "Progress", "format_metric", "read_json_lines", "step_line"]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no such numbers: they are written as these strings, which float() also understands."""


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    return value


def _readable(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _NONFINITE.get(value, value) if isinstance(value, str) and "/" in key else value
        for key, value in record.items()
    }


class JsonLines:
    """An append-only file of one JSON object a line, each on the disk before `append` returns.

    keep_through: a resumed step; records of later steps (key `step`) are dropped, and so is a last
    line that a crash cut short. None keeps all records, 0 or less those of no step after it.
    ValueError for a damaged line that is not the last.
    """

    def __init__(self, path: str | Path, keep_through: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._repair(keep_through)
        self._file = open(self.path, "ab")

    def _repair(self, keep_through: int | None) -> None:
        before = self.path.read_bytes()
        lines = []
        for line, record in _records(self.path, before):
            if keep_through is None or record.get("step", 0) <= keep_through:
                lines.append(line + b"\n")
        after = b"".join(lines)
        if after != before:
            _replace(self.path, after)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; NaN and infinities become strings, so every line is valid JSON."""
        text = json.dumps(_writable(record), ensure_ascii=False, allow_nan=False)
        # One write of the whole line: a reader never sees half of it while the run is alive.
        self._file.write(text.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


def _records(path: Path, data: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, object) of each whole line; the last may be torn, any other must not be."""
    lines = data.split(b"\n")
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            torn = number == last and not data.endswith(b"\n")
            if torn:
                return
            raise ValueError(f"{path}, line {number + 1}: not a JSON object ({error})") from None
        yield line, record


def _replace(path: Path, data: bytes) -> None:
    """The whole new content or the whole old one, whatever happens in between."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, of a running or crashed run too; metrics' NaN strings as floats."""
    path = Path(path)
    return [_readable(record) for _, record in _records(path, path.read_bytes())]


class MetricsLog:
    """Metrics of a run: metrics.jsonl, TensorBoard events in tb/, one line a step for people.

    resumed_step: the step of the checkpoint a run continues from (its later records are dropped);
    None starts anew, and ValueError when the folder already holds metrics. show: called with each
    step's line (Progress.line), or None for silence.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        resumed_step: int | None = None,
        total_steps: int = 0,
        show: Callable[[str], None] | None = None,
    ) -> None:
        folder = Path(folder)
        path = folder / "metrics.jsonl"
        if resumed_step is None and path.exists() and path.stat().st_size:
            raise ValueError(
                f"{path} already holds a run's metrics: continue it with --resume, or choose "
                "another folder with --out"
            )
        self._lines = JsonLines(path, resumed_step)
        self._total, self._show = total_steps, show
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = None if resumed_step is None else resumed_step + 1
        self._board = SummaryWriter(str(folder / "tb"), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """One step's metrics, under docs/metrics.md's keys; on the disk when this returns."""
        self._lines.append({"step": step, **values})
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(key, value, step)
        self._board.flush()
        if self._show is not None:
            self._show(step_line(step, self._total, values))

    def close(self) -> None:
        """Flush and close every sink."""
        self._lines.close()
        self._board.close()


_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out", "reward/eval_mean", "{:.3f}"),
    ("max|dlogp|", "mismatch/logp_abs_max", None),
    ("length", "rollout/length_mean", "{:.0f}"),
    ("entropy", "rl/entropy", "{:.2f}"),
    ("clipped", "rl/clip_share_positive", "{:.1%}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("tok/s", "perf/tokens_per_s", "{:.0f}"),
    ("s", "time/step_s", "{:.1f}"),
)


def step_line(step: int, total: int, values: Mapping[str, Any]) -> str:
    """`step 3/15  reward 0.412  max|dlogp| 0 ...`: the few numbers worth a glance."""
    parts = [f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"]
    for name, key, form in _SHOWN:
        if key in values:
            shown = format_metric(values[key]) if form is None else form.format(values[key])
            parts.append(f"{name} {shown}")
    return "  ".join(parts)


def format_metric(value: float) -> str:
    """A difference for people: `0` only where it is exactly 0."""
    return "0" if value == 0 else f"{value:.3g}"


def setup_logging(debug: bool = False, stream: TextIO | None = None) -> None:
    """Warnings (everything with `debug`) of this package to stderr, one line each."""
    import logging

    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("samebit")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    root.propagate = False


@contextmanager
def timed(values: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of the block to `values["time/<phase>_s"]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        key = f"time/{phase}_s"
        values[key] = values.get(key, 0.0) + time.perf_counter() - start
