"""The target table: what the records say beside what was asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samebit.bench.api import Target, matches


@dataclass(frozen=True)
class Line:
    """A target with the number that the records give it. value None: no row of it is measured yet."""

    target: Target
    value: float | None
    rows: int
    worst: str = ""
    worst_value: float = math.nan

    @property
    def verdict(self) -> str:
        """`aim`, `must`, `missed` or `not measured`."""
        t = self.target
        if self.value is None:
            return "not measured"
        sign = 1 if t.more else -1
        if t.least and sign * self.worst_value < sign * t.least:
            return "missed"
        if sign * self.value >= sign * t.aim:
            return "aim"
        return "must" if sign * self.value >= sign * t.must else "missed"


def evaluate(target: Target, records: Mapping[str, Mapping[str, Any]]) -> Line:
    """The line of one target over a suite's records by row."""
    patterns = target.rows.split("|")
    values = {
        name: float(record[target.field])
        for name, record in records.items()
        if any(matches(name, p) for p in patterns) and record.get(target.field) is not None
    }
    if not values:
        return Line(target, None, 0)
    pick = min if target.more else max
    worst = pick(values, key=values.__getitem__)
    value = values[worst]
    if target.reduce == "geomean":
        value = math.exp(sum(map(math.log, values.values())) / len(values))
    return Line(target, value, len(values), worst, values[worst])


def table(lines: list[Line]) -> str:
    """Text for people."""
    width = max(len(line.target.what) for line in lines)
    out = [f"{'what':{width}s}  {'measured':>10s} {'must':>8s} {'aim':>8s}  verdict (rows; worst)"]
    for line in lines:
        t = line.target
        value = "-" if line.value is None else number(line.value, t.unit)
        rest = f"{line.rows} rows"
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
