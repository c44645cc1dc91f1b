"""The target table: what the records say beside what was asked."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samebit.bench.api import NEAR, Target


@dataclass(frozen=True)
class Line:
    """A target with the number that the records give it. value None: no row of it is measured yet."""

    target: Target
    value: float | None
    rows: int
    worst: str = ""
    worst_value: float = math.nan
    comparable: bool = True
    expected: int = 0

    @property
    def verdict(self) -> str:
        """`aim`, `must`, `missed`, `not measured` or `not comparable`; `so far` with rows to come."""
        if self.value is None:
            return "not measured"
        so_far = "so far " if self.rows < self.expected else ""
        return so_far + (self._judged(self.value) if self.comparable else "not comparable")

    def _judged(self, value: float) -> str:
        t = self.target
        sign = 1 if t.more else -1
        if t.least and sign * self.worst_value < sign * t.least:
            return "missed"
        if sign * value >= sign * t.aim:
            return "aim"
        return "must" if sign * value >= sign * t.must else "missed"


def evaluate(
    target: Target, records: Mapping[str, Mapping[str, Any]], known: Iterable[str] = ()
) -> Line:
    """The line of one target over a suite's records by row. known: the rows the suite has."""
    field, patterns = target.field, target.rows.split("|")
    rows = {
        name: record
        for name, record in records.items()
        if record.get(field) is not None and any(fnmatch.fnmatchcase(name, p) for p in patterns)
    }
    expected = sum(any(fnmatch.fnmatchcase(name, p) for p in patterns) for name in known)
    values = {name: float(record[field]) for name, record in rows.items()}
    comparable = True
    if target.over:
        other = records.get(target.over, {})
        if other.get(field) is None:
            return Line(target, None, 0, expected=expected)
        values = {name: float(other[field]) / value for name, value in values.items()}
        if target.near:
            gaps = [
                abs(r.get(target.near, 0.0) - other.get(target.near, 0.0)) for r in rows.values()
            ]
            comparable = max(gaps, default=0.0) <= NEAR
    if not values:
        return Line(target, None, 0, expected=expected)
    pick = min if target.more else max
    worst = pick(values, key=values.__getitem__)
    value = values[worst]
    if target.reduce == "geomean":
        value = math.exp(sum(map(math.log, values.values())) / len(values))
    return Line(target, value, len(values), worst, values[worst], comparable, expected)


def table(lines: list[Line]) -> str:
    """Text for people."""
    width = max(len(line.target.what) for line in lines)
    out = [f"{'what':{width}s}  {'measured':>10s} {'must':>8s} {'aim':>8s}  verdict (rows; worst)"]
    for line in lines:
        t = line.target
        value = "-" if line.value is None else number(line.value, t.unit)
        rest = f"{line.rows} of {max(line.expected, line.rows)} rows"
        if line.rows > 1:
            rest += f"; {line.worst} {number(line.worst_value, t.unit)}"
        out.append(
            f"{t.what:{width}s}  {value:>10s} {number(t.must, t.unit):>8s} {number(t.aim, t.unit):>8s}"
            f"  {line.verdict} ({rest})"
        )
    return "\n".join(out)


def number(value: float, unit: str) -> str:
    """A value with its unit, three digits."""
    if unit == "%":
        return f"{100 * value:.0f} %"
    text = f"{value:.0f}" if value >= 100 else f"{value:.2f}"
    return text + ("x" if unit == "x" else f" {unit}" if unit else "")
