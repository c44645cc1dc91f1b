"""The target table: what the records say beside what was asked."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samebit.bench.api import Target, comparable


@dataclass(frozen=True)
class Line:
    """A target with the number that the records give it. value None: no row of it is measured yet.

    apart: the largest distance of a ratio's arms in shares of their rooflines, below 0 where the second is
    nearer to its own; NaN where a share is not recorded; None where the target does not ask.
    """

    target: Target
    value: float | None
    rows: int
    worst: str = ""
    worst_value: float = math.nan
    apart: float | None = None
    expected: int = 0

    @property
    def comparable(self) -> bool:
        """Whether the ratio says anything about must and aim."""
        return self.apart is None or comparable(self.apart)

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
    other = records.get(target.over, {})
    if target.over:
        if other.get(field) is None:
            return Line(target, None, 0, expected=expected)
        values = {name: float(other[field]) / value for name, value in values.items()}
    if not values:
        return Line(target, None, 0, expected=expected)
    pick = min if target.more else max
    worst = pick(values, key=values.__getitem__)
    value = values[worst]
    if target.reduce == "geomean":
        value = math.exp(sum(map(math.log, values.values())) / len(values))
    apart = _apart(target, rows.values(), other) if target.near else None
    return Line(target, value, len(values), worst, values[worst], apart, expected)


def _apart(
    target: Target, rows: Iterable[Mapping[str, Any]], other: Mapping[str, Any]
) -> float | None:
    """`Line.apart` of a target that asks."""
    base = float(other.get(target.near, math.nan)) if target.over else 0.0
    gaps = [float(row.get(target.near, math.nan)) - base for row in rows]
    unknown = any(math.isnan(gap) for gap in gaps)
    return math.nan if unknown else max(gaps, key=abs)


LEGEND = (
    "must: the least that was asked; aim: what was hoped for. Verdict: which of the two the number\n"
    "reaches, or missed; so far: rows of the target are still to be measured (2 of 4 rows); not\n"
    "comparable: the two arms of the ratio are more than five points of their rooflines apart.\n"
    "measured: the rows' geometric mean; of whole steps and phases the worst row; worst: that row."
)


def table(lines: list[Line]) -> str:
    """Text for people."""
    width = max(len(line.target.what) for line in lines)
    out = [f"{'what':{width}s}  {'measured':>10s} {'must':>8s} {'aim':>8s}  verdict (rows; worst)"]
    for line in lines:
        t = line.target
        bounds = (t.must, t.aim)
        value = "-" if line.value is None else number(line.value, t.unit, bounds)
        rest = f"{line.rows} of {max(line.expected, line.rows)} rows"
        if line.rows > 1:
            rest += f"; {line.worst} {number(line.worst_value, t.unit, (*bounds, t.least))}"
        if line.value is not None and not line.comparable:
            rest += f"; {_distance(line.apart)}"
        out.append(
            f"{t.what:{width}s}  {value:>10s} {number(t.must, t.unit):>8s} {number(t.aim, t.unit):>8s}"
            f"  {line.verdict} ({rest})"
        )
    return "\n".join([*out, "", LEGEND])


def _distance(apart: float | None) -> str:
    """Why a ratio is not comparable, and which way that moves it."""
    if apart is None or math.isnan(apart):
        return "roofline not recorded"
    nearer = (
        "second, so even arms would give more" if apart < 0 else "first, so even arms give less"
    )
    return f"{100 * abs(apart):.0f} points of roofline apart, nearer is the {nearer}"


def number(value: float, unit: str, bounds: Iterable[float] = ()) -> str:
    """A value with its unit, three digits; more where fewer would make it look like a bound it is not."""
    bounds = [bound for bound in bounds if bound != value]
    shown = _digits(value, unit, 0)
    for more in range(1, 4):
        if all(shown != _digits(bound, unit, more - 1) for bound in bounds):
            break
        shown = _digits(value, unit, more)
    return shown


def _digits(value: float, unit: str, more: int) -> str:
    if unit == "%":
        return f"{100 * value:.{more}f} %"
    text = f"{value:.{more}f}" if value >= 100 else f"{value:.{2 + more}f}"
    return text + ("x" if unit == "x" else f" {unit}" if unit else "")
