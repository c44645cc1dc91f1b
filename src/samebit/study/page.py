"""A study's table in Markdown and HTML, and its page: the table, then every arm's mean curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from samebit.report.data import RunData, read_run
from samebit.report.page import render
from samebit.study.plan import Study
from samebit.study.summary import UNTIMED, summarise, to_json

_Arm = Mapping[str, Any]


def _share(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{100 * value:.2g} %"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.2g}"


def _with_interval(arm: _Arm, name: str, sign: str = "") -> str:
    value, half = arm[name], arm[f"{name}_half_width"]
    if value is None:
        return ""
    return f"{value:{sign}.3f}" + ("" if half is None else f" ± {half:.3f}")


def _collapse(arm: _Arm) -> str:
    if not arm["done"]:
        return ""
    return f"{arm['collapsed']} of {arm['done']}" if arm["collapsed"] else "no"


def _failures(arm: _Arm) -> str:
    failed = len(arm["failed"])
    return f"{arm['done']}" + (f" ({failed} failed)" if failed else "")


COLUMNS: tuple[tuple[str, Callable[[_Arm], str]], ...] = (
    ("arm", lambda a: a["name"]),
    ("recipe", lambda a: a["recipe"]),
    ("correction", lambda a: a["correction"]),
    ("seeds", _failures),
    ("final reward", lambda a: _with_interval(a, "final_reward")),
    ("minus baseline", lambda a: _with_interval(a, "difference", "+")),
    ("sampler's reward", lambda a: _with_interval(a, "final_reward_sampler")),
    ("mismatch mean", lambda a: _number(a["mismatch_mean"])),
    ("mismatch max", lambda a: _number(a["mismatch_max"])),
    ("clipped A>0", lambda a: _share(a["clip_share_positive"])),
    ("clipped A<0", lambda a: _share(a["clip_share_negative"])),
    ("rho > C", lambda a: _share(a["rho_over_cap_share"])),
    ("differs from TIS", lambda a: _share(a["bounds_differ_share"])),
    ("codes moved", lambda a: _share(a["codes_moved_share"])),
    ("collapsed", _collapse),
)


def statements(summary: Mapping[str, Any]) -> list[str]:
    """The sentences under the table: rules, arms that are the same, arms that failed."""
    out = [
        f"Final reward: held-out, of the final weights under the training forward; "
        f"{summary['interval_rule']}. Baseline: {summary['baseline']}.",
        "Other columns: means over steps and seeds (max: the largest of all). Mismatch is "
        "|log-prob of the sampler - log-prob of the trainer| in nats.",
        f"Collapsed: {summary['collapse_rule']}.",
    ]
    for group in summary["not_distinguishable"]:
        out.append(f"Not distinguishable (the same bits in every metric): {', '.join(group)}.")
    for arm in summary["arms"]:
        out += [f"Failed: {arm['name']}, {failure}." for failure in arm["failed"]]
    out += [f"{arm['name']}: {arm['note']}" for arm in summary["arms"] if arm["note"]]
    return out


def markdown(summary: Mapping[str, Any]) -> str:
    """The table and its sentences as Markdown."""
    lines = [f"# {summary['name']}", ""]
    lines.append("| " + " | ".join(name for name, _ in COLUMNS) + " |")
    lines.append("| " + " | ".join("---" for _ in COLUMNS) + " |")
    for arm in summary["arms"]:
        lines.append("| " + " | ".join(cell(arm) for _, cell in COLUMNS) + " |")
    lines += ["", *(f"- {text}" for text in statements(summary)), ""]
    return "\n".join(lines)


def _html_table(summary: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(arm))}</td>" for _, cell in COLUMNS) + "</tr>"
        for arm in summary["arms"]
    )
    notes = "".join(f"<li>{escape(text)}</li>" for text in statements(summary))
    return (
        f"<h1>{escape(str(summary['name']))}</h1>"
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>'
        f"</table></div><ul>{notes}</ul>"
    )


def mean_run(name: str, runs: Sequence[RunData]) -> RunData:
    """One arm as a run: each metric of each step, averaged over the seeds that have it."""
    found: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        for record in run.records:
            at = found.setdefault(int(record["step"]), {})
            for key, value in record.items():
                if isinstance(value, (int, float)) and not key.startswith(UNTIMED):
                    at.setdefault(key, []).append(float(value))
    records = [
        {key: sum(values) / len(values) for key, values in found[step].items()}
        for step in sorted(found)
    ]
    return replace(runs[0], name=name, records=records, samples=[])


def write_results(study: Study, target: str | Path) -> list[Path]:
    """study.json, study.md and, once a run has a record, study.html in folder `target`; the paths."""
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    summary = summarise(study)
    written = [target / "study.json", target / "study.md"]
    written[0].write_text(to_json(summary), encoding="utf-8")
    written[1].write_text(markdown(summary), encoding="utf-8")
    arms = []
    for arm in study.arms:
        folders = [j.folder for j in study.jobs if j.arm == arm.name]
        runs = [read_run(f) for f in folders if _has_records(f)]
        if runs:
            arms.append(mean_run(arm.name, runs))
    if arms:
        page = render(arms).replace("</header>", "</header>" + _html_table(summary), 1)
        written.append(target / "study.html")
        written[2].write_text(page, encoding="utf-8")
    return written


def _has_records(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0
