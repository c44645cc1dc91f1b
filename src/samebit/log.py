"""Where a run's numbers go: metrics.jsonl, TensorBoard, the console; and progress for the patient.

`JsonLines` is an append-only file that survives a crash in the middle of a line. `MetricsLog`
writes a step's metrics and samples everywhere. `Reporter` tells people.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from samebit.reporter import Reporter, format_metric, step_line
from samebit.types import Group

__all__ = ["JsonLines", "MetricsLog", "Reporter", "format_metric", "read_json_lines", "step_line"]

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
    line that a crash cut short. None keeps all records.
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
            replace_file(self.path, after)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; NaN and infinities become strings, so every line is valid JSON."""
        text = json.dumps(_writable(record), ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair has no UTF-8; as a JSON escape it survives.
        line = text.encode(errors="backslashreplace") + b"\n"
        # One write of the whole line: a reader never sees half of it while the run is alive.
        self._file.write(line)
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


def replace_file(path: Path, data: bytes) -> None:
    """Write a file: the whole new content or the whole old one, whatever happens in between."""
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
    """Metrics of a run: metrics.jsonl, samples.jsonl, and TensorBoard events in tb/.

    resumed_step: the step of the checkpoint the run continues from; later records are dropped, at 0
    all of them. pending: that step's own metrics are still to be written.
    """

    def __init__(self, folder: str | Path, resumed_step: int = 0, pending: bool = False) -> None:
        folder = Path(folder)
        # a run at step 0 writes its step-0 evaluation (again)
        keep_through = resumed_step if resumed_step > 0 else -1
        self._metrics = JsonLines(folder / "metrics.jsonl", keep_through - pending)
        self._samples = JsonLines(folder / "samples.jsonl", keep_through)
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = resumed_step + 1 if resumed_step > 0 else 0
        self._board = SummaryWriter(str(folder / "tb"), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """One step's metrics, under docs/metrics.md's keys; on the disk when this returns."""
        self._metrics.append({"step": step, **values})
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(key, value, step)
        self._board.flush()

    def samples(self, step: int, groups: Sequence[Group], limit: int) -> None:
        """Up to `limit` of a step's completions: the first of each prompt, then the second, ..."""
        most = max((len(g.samples) for g in groups), default=0)
        turns = [(g, i) for i in range(most) for g in groups if i < len(g.samples)]
        for group, i in turns[:limit]:
            sample = group.samples[i]
            record: dict[str, Any] = {
                "step": step,
                "prompt": group.prompt.text,
                "completion": sample.text,
                "reward": group.rewards[i] if group.rewards else None,
                "finish_reason": sample.finish_reason,
                "tokens": len(sample.ids),
                "prompt_id": group.prompt.id,
                "sample_id": sample.sample_id,
            }
            if "answer" in group.prompt.columns:
                record["answer"] = str(group.prompt.columns["answer"])
            self._samples.append(record)

    def close(self) -> None:
        """Flush and close every sink."""
        self._metrics.close()
        self._samples.close()
        self._board.close()


def setup_logging(debug: bool = False, stream: TextIO | None = None) -> None:
    """Warnings (everything with `debug`) of this package to stderr, one line each."""
    import logging

    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("samebit")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    root.propagate = False
