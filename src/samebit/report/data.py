"""What a report reads of a run folder: metrics, samples, plan and configuration."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebit.log import read_json_lines
from samebit.reporter import is_exact, largest_gap


@dataclass(frozen=True)
class RunData:
    """One run as the report shows it. Missing files are empty values, damaged ones an error."""

    name: str
    folder: Path
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every record that has the metric as a number."""
        return [
            (float(r["step"]), float(r[key]))
            for r in self.records
            if isinstance(r.get(key), (int, float)) and not isinstance(r.get(key), bool)
        ]

    def keys(self, prefix: str) -> list[str]:
        """Metric names under a prefix, sorted."""
        return sorted({k for r in self.records for k in r if k.startswith(prefix)})


def read_run(folder: str | Path) -> RunData:
    """A run folder; ValueError when it holds no metrics."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder}: no metrics.jsonl; not the folder of a run")
    records = read_json_lines(path)
    if not records:
        raise ValueError(f"{path}: no finished step yet; nothing to report")
    samples = folder / "samples.jsonl"
    return RunData(
        name=folder.resolve().name,
        folder=folder,
        records=records,
        samples=read_json_lines(samples) if samples.is_file() else [],
        plan=_json(folder / "plan.json"),
        config=_toml(folder / "config.toml"),
    )


def read_runs(folders: Iterable[str | Path]) -> list[RunData]:
    """Several runs, with names that tell them apart."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else RunData(**{**run.__dict__, "name": str(run.folder)})
        for run in runs
    ]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML ({error})") from None


def worst_mismatch(run: RunData) -> dict[str, float]:
    """mismatch/ metrics over all steps: the largest of each (NaN wins)."""
    out: dict[str, float] = {}
    for key in run.keys("mismatch/"):
        values = [value for _, value in run.series(key)]
        unordered = [v for v in values if v != v]
        if values:
            out[key] = unordered[0] if unordered else max(values)
    return out


@dataclass(frozen=True)
class Exactness:
    """What was compared in a run. gap: largest |dlogp|. Tokens that waited through steps count each time."""

    exact: bool
    gap: float
    differing: float
    tokens: float
    steps: int

    def describe(self) -> str:
        """`exactly 0` only where no bit differed."""
        if self.exact:
            return "exactly 0"
        return f"up to {self.gap:.3g}" if self.gap != 0 else f"{self.differing:,.0f} tokens differ"


def exactness(run: RunData) -> Exactness | None:
    """Tokens in updates and tokens that wait, over all steps; None where none was compared."""
    worst = worst_mismatch(run)
    exact, gap = is_exact(worst), largest_gap(worst)
    if exact is None:
        return None

    def count(name: str) -> float:
        keys = (f"mismatch/{name}", f"mismatch/held_{name}")
        return sum(value for key in keys for _, value in run.series(key))

    steps = {r["step"] for r in run.records if is_exact(r) is not None}
    return Exactness(exact, gap or 0.0, count("tokens_differing"), count("tokens"), len(steps))
