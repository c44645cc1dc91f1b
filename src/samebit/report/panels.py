"""Which charts a report has, and what each says in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from samebit.report.charts import (
    Series,
    line_chart,
    linear_axis,
    log_axis,
    percent,
    short,
    stacked_bars,
)
from samebit.report.data import RunData, exactness

RUN_COLORS = (
    "#2f6fdf",
    "#d97706",
    "#0f9d6b",
    "#c2408f",
    "#7a4fd0",
    "#0891a8",
    "#b4503c",
    "#6b7a1e",
    "#9a9a9a",
    "#e0607e",
    "#1f4e5f",
    "#a68a00",
)
PHASE_COLORS = {
    "rollout": "#2f6fdf",
    "reward": "#d97706",
    "train": "#0f9d6b",
    "refresh": "#7a4fd0",
    "eval": "#c2408f",
    "other": "#8a93a3",
}
_DASHES = ("", "6 4", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Panel:
    """A card of the page: title, one line of explanation, legend entries, SVG or statement."""

    title: str
    about: str
    legend: Sequence[tuple[str, str, str]]
    body: str


def color_of(index: int) -> str:
    """Colour of the i-th run."""
    return RUN_COLORS[index % len(RUN_COLORS)]


def all_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Every panel that has data, in reading order."""
    found = [
        _reward(runs),
        _mismatch(runs),
        _lines(
            runs,
            "Completion length",
            "Tokens per completion: the mean, and the longest of the step.",
            (("rollout/length_mean", "mean"), ("rollout/length_max", "longest")),
            low=0.0,
        ),
        _lines(
            runs,
            "Entropy",
            "Mean entropy of the next-token distribution, in nats.",
            (("rl/entropy", "entropy"),),
            low=0.0,
        ),
        _lines(
            runs,
            "Clipping",
            "Share of tokens whose gradient the ratio clip removed, by sign of the advantage.",
            (("rl/clip_share_positive", "A > 0"), ("rl/clip_share_negative", "A < 0")),
            low=0.0,
            label=percent,
        ),
        _lines(
            runs,
            "Gradient norm",
            "Norm over all parameters before clipping.",
            (("train/grad_norm", "norm"),),
            low=0.0,
        ),
        *(_time(run, len(runs) > 1) for run in runs),
        *_quant(runs),
        _lines(
            runs,
            "Throughput",
            "Completion tokens per second: over the whole step, and while sampling.",
            (("perf/step_tokens_per_s", "step"), ("perf/rollout_tokens_per_s", "rollout")),
            low=0.0,
        ),
    ]
    return [panel for panel in found if panel is not None]


def _names(runs: Sequence[RunData], index: int, what: str, several: bool) -> str:
    """A line's name: the metric, the run, or both, whichever tells lines apart."""
    if len(runs) == 1:
        return what
    return f"{runs[index].name} · {what}" if several else runs[index].name


def _series(
    runs: Sequence[RunData], metrics: Sequence[tuple[str, str]], dots: Sequence[str] = ()
) -> list[Series]:
    out = []
    for i, run in enumerate(runs):
        for j, (key, what) in enumerate(metrics):
            points = run.series(key)
            if not points:
                continue
            # one run: metrics by colour; several: runs by colour, metrics by dash
            alone = len(runs) == 1
            color = color_of(j) if alone else color_of(i)
            dash = _DASHES[0] if alone and key not in dots else _DASHES[j % len(_DASHES)]
            name = _names(runs, i, what, len(metrics) > 1)
            out.append(Series(name, points, color, dash, key in dots))
    return out


def _panel(title: str, about: str, series: Sequence[Series], body: str) -> Panel:
    return Panel(title, about, [(s.name, s.color, s.dash) for s in series], body)


def _lines(
    runs: Sequence[RunData],
    title: str,
    about: str,
    metrics: Sequence[tuple[str, str]],
    low: float | None = None,
    label: Callable[[float], str] = short,
) -> Panel | None:
    series = _series(runs, metrics)
    if not series:
        return None
    axis = linear_axis([y for s in series for _, y in s.points], low=low, label=label)
    return _panel(title, about, series, line_chart(series, axis, smooth=True))


def _reward(runs: Sequence[RunData]) -> Panel | None:
    metrics = (("reward/mean", "training"), ("reward/eval_mean", "held-out"))
    series = _series(runs, metrics, dots=("reward/eval_mean",))
    if not series:
        return None
    axis = linear_axis([y for s in series for _, y in s.points], low=0.0, high=1.0)
    about = "Mean reward of the step's samples, and on held-out prompts (dots)."
    return _panel("Reward", about, series, line_chart(series, axis, smooth=True))


def _mismatch(runs: Sequence[RunData]) -> Panel | None:
    metrics = (
        ("mismatch/logp_abs_max", "largest"),
        ("mismatch/logp_abs_mean", "mean"),
        ("mismatch/held_logp_abs_max", "largest, of unfinished samples"),
    )
    series = _series(runs, metrics)
    if not series:
        return None
    values = [y for s in series for _, y in s.points]
    about = "|log-prob of the sampler − log-prob of the trainer| per token, before any update."
    verdicts = "".join(_verdict(run) for run in runs)
    if all(v == 0 for v in values):
        return Panel("Mismatch", about, [], f'<div class="verdicts">{verdicts}</div>')
    chart = line_chart(series, log_axis(values))
    return _panel("Mismatch", about, series, f'<div class="verdicts line">{verdicts}</div>{chart}')


def _verdict(run: RunData) -> str:
    found = exactness(run)
    if found is None:
        return ""
    said = found.describe()
    over = f"over {found.steps:,} steps"
    over += f" and {found.tokens:,.0f} tokens" if found.tokens else ""
    kind = "exact" if found.exact else "inexact"
    said = said.replace("exactly", "Exactly")
    return f'<p class="{kind}"><b>{said}</b><span>{escape(run.name)}, {over}</span></p>'


def _time(run: RunData, named: bool) -> Panel | None:
    records = [r for r in run.records if "time/step_s" in r]
    if not records:
        return None
    phases = [p for p in PHASE_COLORS if any(f"time/{p}_s" in r for r in records)]
    layers = [
        (p, PHASE_COLORS[p], [float(r.get(f"time/{p}_s", 0.0)) for r in records]) for p in phases
    ]
    inside = [p for p in phases if p != "eval"]
    other = [
        max(0.0, r["time/step_s"] - sum(r.get(f"time/{p}_s", 0.0) for p in inside)) for r in records
    ]
    if sum(other) > 0.01 * sum(r["time/step_s"] for r in records):
        layers.append(("other", PHASE_COLORS["other"], other))
    steps = [float(r["step"]) for r in records]
    totals = [sum(values) for values in zip(*(layer[2] for layer in layers), strict=True)]
    chart = stacked_bars(steps, layers, linear_axis(totals, low=0.0))
    title = f"Time per phase: {run.name}" if named else "Time per phase"
    legend = [(name, color, "bar") for name, color, _ in layers]
    return Panel(title, "Seconds of each step.", legend, chart)


_QUANT = (
    ("activation_saturated_share", "Saturated activations", "Codes at the format's largest value"),
    ("activation_flushed_share", "Flushed activations", "Non-zero inputs whose code is 0"),
    ("codes_moved_share", "Codes moved", "Weight codes that the step's update changed"),
)


def _quant(runs: Sequence[RunData]) -> list[Panel | None]:
    """One run: a line per role. Several: each run's mean over roles, or nobody could read it."""
    panels = []
    for kind, title, about in _QUANT:
        if len(runs) == 1:
            keys = runs[0].keys(f"quant/{kind}/")
            metrics = [(key, key.rsplit("/", 1)[1]) for key in keys]
            panels.append(_lines(runs, title, f"{about}, by role.", metrics, 0.0, percent))
            continue
        series = [
            Series(run.name, points, color_of(i))
            for i, run in enumerate(runs)
            if (points := _role_means(run, f"quant/{kind}/"))
        ]
        if series:
            axis = linear_axis([y for s in series for _, y in s.points], low=0.0, label=percent)
            chart = line_chart(series, axis, smooth=True)
            panels.append(_panel(title, f"{about}, mean over roles.", series, chart))
    return panels


def _role_means(run: RunData, prefix: str) -> list[tuple[float, float]]:
    points = []
    for record in run.records:
        values = [v for k, v in record.items() if k.startswith(prefix)]
        if values:
            points.append((float(record["step"]), sum(values) / len(values)))
    return points
