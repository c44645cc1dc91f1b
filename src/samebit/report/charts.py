"""Line charts and stacked bars as SVG text; colours come from the page's CSS variables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 30
MOST_POINTS = 500
"""Points drawn per line; more are thinned to each bucket's extremes."""
SMOOTH_FROM = 40
"""Lines with at least this many points get a moving average over a faint raw line."""


@dataclass(frozen=True)
class Series:
    """One line: (step, value) points, a CSS colour, dash ("" solid), dots at the points."""

    name: str
    points: Sequence[Point]
    color: str
    dash: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """A value range, its ticks, and where a value lies between 0 (bottom) and 1 (top)."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    place: Callable[[float], float]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round ticks covering [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters: 0.05, 12.5, 3.4k, 1e-07."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size and size < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.3g}%"


def linear_axis(
    values: Sequence[float],
    low: float | None = None,
    high: float | None = None,
    label: Callable[[float], str] = short,
) -> Axis:
    """An axis over the values, reaching at least `low` and `high`."""
    found = [v for v in values if math.isfinite(v)]
    ends = [*found, *(v for v in (low, high) if v is not None)] or [0.0, 1.0]
    ticks = nice_ticks(min(ends), max(ends))
    bottom, top = ticks[0], ticks[-1]
    return Axis(bottom, top, ticks, label, lambda v: (v - bottom) / (top - bottom))


def log_axis(values: Sequence[float]) -> Axis:
    """Decades of the positive values, and below them a band where exactly 0 is drawn."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    first = math.floor(math.log10(min(positive))) if positive else -7
    last = max(math.ceil(math.log10(max(positive))) if positive else 0, first + 1)
    every = max(1, -(-(last - first) // 5))
    span = last - first + 1.0
    ticks = [0.0, *(10.0**e for e in range(first, last + 1, every))]

    def place(value: float) -> float:
        return 0.0 if value <= 0 else (math.log10(value) - first + 1.0) / span

    def label(value: float) -> str:
        return "exactly 0" if value == 0 else f"1e{round(math.log10(value))}"

    return Axis(0.0, 10.0**last, ticks, label, place)


def thin(points: Sequence[Point]) -> list[Point]:
    """At most about MOST_POINTS points that keep every bucket's lowest and highest."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-2 * len(points) // MOST_POINTS)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        bucket = points[i : i + size]
        finite = [p for p in bucket if math.isfinite(p[1])] or list(bucket[:1])
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def moving_average(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of the last `window` values at each point; points that are not finite are left out."""
    kept: list[float] = []
    out: list[Point] = []
    for x, y in points:
        if math.isfinite(y):
            kept = [*kept[-(window - 1) :], y]
            out.append((x, sum(kept) / len(kept)))
    return out


def line_chart(series: Sequence[Series], axis: Axis, smooth: bool = False) -> str:
    """An SVG of lines over steps, with the data for the pointer read-out."""
    steps = [x for s in series for x, _ in s.points]
    x_of = _x_scale(steps)
    body = [_grid(axis), _steps(steps, x_of)]
    for line in series:
        body.append(_line(line, axis, x_of, smooth and len(line.points) >= SMOOTH_FROM))
    data = [
        {
            "n": s.name,
            "c": s.color,
            "p": _finite(thin(s.points)),
        }
        for s in series
    ]
    span = [min(steps, default=0), max(steps, default=1)]
    return _svg("".join(body), {"s": data, "x": span})


def stacked_bars(
    steps: Sequence[float], layers: Sequence[tuple[str, str, Sequence[float]]], axis: Axis
) -> str:
    """Bars per step, one segment per layer (name, colour, values); long runs are averaged."""
    size = -(-len(steps) // 120)
    if size > 1:
        layers = [(n, c, _bucket_means(v, size)) for n, c, v in layers]
        steps = list(steps)[::size]
    inner = WIDTH - LEFT - RIGHT
    slot = inner / max(len(steps), 1)
    gap = min(4.0, slot * 0.2)
    body = [_grid(axis)]
    for i in range(len(steps)):
        base = 0.0
        for _, color, values in layers:
            top = base + values[i]
            y0, y1 = _y(axis, top), _y(axis, base)
            body.append(
                f'<rect x="{LEFT + i * slot + gap / 2:.1f}" y="{y0:.1f}" width="{slot - gap:.1f}" '
                f'height="{max(y1 - y0, 0):.1f}" fill="{color}"/>'
            )
            base = top
    every = max(1, -(-len(steps) // 8))
    for i in range(0, len(steps), every):
        body.append(_x_label(LEFT + (i + 0.5) * slot, f"{steps[i]:g}"))
    data = [{"n": n, "c": c, "p": _finite(list(enumerate(values)))} for n, c, values in layers]
    content = {"s": data, "x": [-0.5, len(steps) - 0.5], "t": list(steps)}
    return _svg("".join(body), content)


def _brief(value: float) -> float:
    """Enough digits for the read-out; the page stays small."""
    return float(f"{value:.5g}")


def _finite(points: Sequence[Point]) -> list[list[float]]:
    return [[x, _brief(y)] for x, y in points if math.isfinite(y)]


def _bucket_means(values: Sequence[float], size: int) -> list[float]:
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def _x_scale(steps: Sequence[float]) -> Callable[[float], float]:
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    span = (high - low) or 1.0
    return lambda x: LEFT + (x - low) / span * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    share = min(max(axis.place(value), -0.02), 1.02)
    return TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)


def _grid(axis: Axis) -> str:
    parts = []
    for tick in axis.ticks:
        y = _y(axis, tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{escape(axis.label(tick))}</text>"
        )
    return "".join(parts)


def _steps(steps: Sequence[float], x_of: Callable[[float], float]) -> str:
    if not steps:
        return ""
    low, high = min(steps), max(steps)
    ticks = [t for t in nice_ticks(low, high, 7) if low <= t <= high and t == int(t)]
    return "".join(_x_label(x_of(t), f"{t:g}") for t in ticks)


def _x_label(x: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{text}</text>'


def _line(series: Series, axis: Axis, x_of: Callable[[float], float], smooth: bool) -> str:
    if smooth:
        window = max(5, len(series.points) // 20)
        average = moving_average(series.points, window)
        return _path(series, series.points, axis, x_of, 1.0, 0.25) + _path(
            series, average, axis, x_of, 2.2, 1.0
        )
    out = _path(series, series.points, axis, x_of, 2.0, 1.0)
    if series.dots or len(series.points) == 1:
        out += "".join(
            f'<circle cx="{x_of(x):.1f}" cy="{_y(axis, y):.1f}" r="3.2" fill="{series.color}"/>'
            for x, y in thin(series.points)
            if math.isfinite(y)
        )
    return out


def _path(
    series: Series,
    points: Sequence[Point],
    axis: Axis,
    x_of: Callable[[float], float],
    width: float,
    opacity: float,
) -> str:
    commands, pen = [], "M"
    for x, y in thin(points):
        if not math.isfinite(y):
            pen = "M"
            continue
        commands.append(f"{pen}{x_of(x):.1f} {_y(axis, y):.1f}")
        pen = "L"
    dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
    return (
        f'<path d="{"".join(commands)}" fill="none" stroke="{series.color}" '
        f'stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"{dash}/>'
    )


def _svg(body: str, data: object) -> str:
    packed = escape(json.dumps(data, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-chart="{packed}">'
        f'{body}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
    )
