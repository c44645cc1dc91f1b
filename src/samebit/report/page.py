"""The page: summary, charts, precision plan, completions, configuration."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import samebit
from samebit.report.charts import short
from samebit.report.data import RunData, exactness
from samebit.report.flow import draw_flow, precision_text
from samebit.report.panels import Panel, all_panels, color_of
from samebit.report.style import CSS, SCRIPT

TEXT_LIMIT = 1500
"""Characters of a prompt or completion that are shown."""
SAMPLES_SHOWN = 12


def render(runs: Sequence[RunData]) -> str:
    """The whole HTML document of at least one run."""
    assert runs, "a report needs a run"
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    parts = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_subtitle(runs))}</p></header>",
        _tiles(runs[0]) if len(runs) == 1 else _summary(runs),
        '<h2>Training</h2><div class="grid">',
        *(_card(panel) for panel in all_panels(runs)),
        "</div>",
        *(_plan(run, len(runs) > 1) for run in _distinct_plans(runs)),
        *(_samples(run, len(runs) > 1) for run in runs),
        *(_details(run, len(runs) > 1) for run in runs),
        f"<footer>samebit {samebit.__version__}. Definitions of all metrics: docs/metrics.md."
        "</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)} · samebit</title><style>{CSS}</style></head><body><main>"
        f'{"".join(parts)}</main><div id="tip"></div><script>{SCRIPT}</script></body></html>'
    )


def _config(run: RunData, *path: str) -> Any:
    value: Any = run.config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _subtitle(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    run = runs[0]
    task = _config(run, "task", "dataset") or _config(run, "task", "name")
    facts = [
        _config(run, "model"),
        f"recipe {_config(run, 'recipe')}" if _config(run, "recipe") else None,
        _config(run, "rl", "algorithm"),
        task,
        f"{int(run.records[-1].get('step', 0))} steps",
    ]
    return " · ".join(str(fact) for fact in facts if fact)


def _first_last(run: RunData, key: str) -> tuple[float, float] | None:
    points = run.series(key)
    return (points[0][1], points[-1][1]) if points else None


def _seconds(run: RunData) -> float:
    keys = ("time/step_s", "time/eval_s")
    return sum(value for key in keys for _, value in run.series(key))


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _tile(value: str, label: str, kind: str = "") -> str:
    return f'<div class="card tile {kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _tiles(run: RunData) -> str:
    tiles = []
    held_out = _first_last(run, "reward/eval_mean")
    if held_out:
        label = f"held-out reward ({held_out[1] - held_out[0]:+.3f})"
        tiles.append(_tile(f"{held_out[0]:.3f} → {held_out[1]:.3f}", label))
    reward = _first_last(run, "reward/mean")
    if reward:
        tiles.append(
            _tile(f"{reward[0]:.3f} → {reward[1]:.3f}", "training reward, first and last step")
        )
    found = exactness(run)
    if found is not None:
        kind = "exact" if found.exact else "inexact"
        label = "largest |Δ log-prob|, sampler against trainer"
        tiles.append(_tile(found.describe(), label, kind))
    seconds = _seconds(run)
    if seconds:
        tiles.append(_tile(_duration(seconds), "in steps and evaluations"))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _summary(runs: Sequence[RunData]) -> str:
    rows = []
    for i, run in enumerate(runs):
        held_out, reward = _first_last(run, "reward/eval_mean"), _first_last(run, "reward/mean")
        found = exactness(run)
        mismatch = "not measured" if found is None else found.describe()
        cells = [
            str(_config(run, "recipe") or ""),
            f"{int(run.records[-1].get('step', 0))}",
            "" if held_out is None else f"{held_out[0]:.3f} → {held_out[1]:.3f}",
            "" if reward is None else f"{reward[0]:.3f} → {reward[1]:.3f}",
            mismatch,
            _duration(_seconds(run)),
        ]
        dot = f'<i class="dot" style="background:{color_of(i)}"></i>'
        tds = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{dot}{escape(run.name)}</th>{tds}</tr>")
    heads = (
        "run",
        "recipe",
        "steps",
        "held-out reward",
        "training reward",
        "largest mismatch",
        "time",
    )
    head = "".join(f"<th>{h}</th>" for h in heads)
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _card(panel: Panel) -> str:
    entries = "".join(
        f"<li>{_swatch(color, kind)}{escape(name)}</li>" for name, color, kind in panel.legend
    )
    legend = f'<ul class="legend">{entries}</ul>' if len(panel.legend) > 1 else ""
    return (
        f'<section class="card"><h3>{escape(panel.title)}</h3><p class="about">'
        f"{escape(panel.about)}</p>{legend}{panel.body}</section>"
    )


def _swatch(color: str, kind: str) -> str:
    if kind == "bar":
        shape = f'<rect width="12" height="10" x="6" rx="2" fill="{color}"/>'
    else:
        dash = f' stroke-dasharray="{kind}"' if kind else ""
        shape = f'<line x1="0" x2="24" y1="5" y2="5" stroke="{color}" stroke-width="2.5"{dash}/>'
    return f'<svg viewBox="0 0 24 10">{shape}</svg>'


def _distinct_plans(runs: Sequence[RunData]) -> list[RunData]:
    seen: dict[str, RunData] = {}
    for run in runs:
        if run.plan:
            seen.setdefault(str(run.plan.get("digest", run.name)), run)
    return list(seen.values())


def _plan(run: RunData, named: bool) -> str:
    plan = run.plan
    recipe = plan["recipe"]
    unified = bool(plan.get("unified"))
    verdict = {
        True: "Unified: rollout and training forward are one function",
        False: "Not unified: rollout and training forward differ",
    }
    summary = str(recipe.get("summary", ""))
    about = f"{summary[:1].upper()}{summary[1:]}. {verdict[unified]}".strip(". ")
    digest = str(plan.get("digest", ""))[:12]
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>"
        for row in _linear_rows(plan)
    )
    heads = (
        "count",
        "role",
        "matrices",
        "inputs",
        "rollout: input × weight",
        "training: input × weight",
    )
    head = "".join(f"<th>{h}</th>" for h in heads)
    title = f"Precision plan: recipe {recipe['name']}" + (f" ({run.name})" if named else "")
    return (
        f'<h2>{escape(title)}</h2><section class="card"><p class="about">{escape(about)}. '
        f"Plan {escape(digest)}.</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f"</div><details{'' if named else ' open'}><summary>Flow of one block</summary>"
        f"{draw_flow(recipe)}</details></section>"
    )


def _linear_rows(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    counts: dict[tuple[str, str, str], int] = {}
    for linear in plan.get("linears", []):
        parts = ", ".join(f"{name} {rows}" for name, rows in linear["parts"])
        key = (linear["role"], parts, str(linear["in_features"]))
        counts[key] = counts.get(key, 0) + 1

    def product(side: str, role: str) -> str:
        gemm = plan["recipe"][side][role]
        return f"{precision_text(gemm['lhs'])} × {precision_text(gemm['rhs'])}"

    return [
        (f"{count} ×", role, parts, inputs, product("rollout", role), product("train", role))
        for (role, parts, inputs), count in counts.items()
    ]


def _samples(run: RunData, named: bool) -> str:
    steps = sorted({int(s["step"]) for s in run.samples if "step" in s})
    if not steps:
        return ""
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    title = "Completions" + (f": {run.name}" if named else "")
    parts = [f"<h2>{escape(title)}</h2>"]
    for step in chosen:
        mine = [s for s in run.samples if s.get("step") == step][:SAMPLES_SHOWN]
        opened = " open" if step == steps[-1] and not named else ""
        rows = "".join(_sample_row(s) for s in mine)
        parts.append(
            f'<section class="card" style="margin-bottom:10px"><details style="margin:0"{opened}>'
            f"<summary>step {step}: {len(mine)} completions</summary>"
            '<div class="scroll"><table class="samples"><thead><tr><th>prompt</th>'
            "<th>completion</th><th>reward</th><th>end</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div></details></section>"
        )
    return "".join(parts)


def _visible(text: Any) -> str:
    """Escaped text, cut at TEXT_LIMIT; control characters as their Unicode pictures."""
    shown = str(text)
    cut = len(shown) - TEXT_LIMIT
    shown = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in shown[:TEXT_LIMIT]
    )
    shown = shown.encode("utf-8", "replace").decode("utf-8")
    return escape(shown) + (f"… ({cut:,} more characters)" if cut > 0 else "")


def _sample_row(sample: dict[str, Any]) -> str:
    reward = sample.get("reward")
    if isinstance(reward, (int, float)):
        kind = "full" if reward >= 1 else ""
        shown = f'<span class="reward {kind}">{short(float(reward))}</span>'
    else:
        shown = '<span class="reward none">no verdict</span>'
    return (
        f"<tr><td><pre>{_visible(sample.get('prompt', ''))}</pre></td>"
        f"<td><pre>{_visible(sample.get('completion', ''))}</pre></td>"
        f"<td>{shown}</td><td>{_visible(sample.get('finish_reason', ''))}</td></tr>"
    )


def _details(run: RunData, named: bool) -> str:
    title = "Numbers" + (f": {run.name}" if named else "")
    rows = []
    keys = sorted({k for r in run.records for k in r if k != "step"})
    for key in keys:
        points = run.series(key)
        if points:
            values = [v for _, v in points]
            finite = [v for v in values if v == v] or values
            cells = (values[0], min(finite), max(finite), values[-1])
            tds = "".join(f'<td class="number">{short(v)}</td>' for v in cells)
            rows.append(f"<tr><td>{escape(key)}</td>{tds}</tr>")
    head = "<th>metric</th>" + "".join(
        f'<th class="number">{h}</th>' for h in ("first", "lowest", "highest", "last")
    )
    path = run.folder / "config.toml"
    config = path.read_text(encoding="utf-8") if path.is_file() else ""
    shown = (
        f"<details><summary>config.toml</summary><pre>{escape(config)}</pre></details>"
        if config
        else ""
    )
    return (
        f'<h2>{escape(title)}</h2><section class="card"><details style="margin:0"><summary>all '
        f'metrics</summary><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div></details>{shown}</section>"
    )
