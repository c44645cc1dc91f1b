"""A real run under several recipes, side by side: runs it, keeps its numbers, draws them.

    python -m bench.proof run recipes/h200_addition.toml runs/addition bf16 fp8 fp8-kv fp8-rollout
    python -m bench.proof collect docs/results/addition.json runs/addition bf16 fp8 fp8-kv fp8-rollout
    python -m bench.proof draw docs/results/addition.json

    python -m bench.proof compare docs/results/addition.json runs/addition/fp8 runs/again/fp8

`run` starts one process a recipe, all at once; a run that was stopped goes on where it was. `collect` keeps
the keys below of each metrics.jsonl. `draw` writes .svg and .md beside the data. `compare` counts the steps
of two runs of one seed that agree in every number but those of a clock.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from samebit.log import read_json_lines
from samebit.report.charts import HEIGHT, WIDTH, Series, line_chart, linear_axis, log_axis

KEPT = (
    "step", "reward/mean", "reward/eval_mean", "rollout/tokens", "rollout/length_mean",
    "rollout/length_max", "mismatch/tokens", "mismatch/tokens_differing", "mismatch/logp_abs_max",
    "mismatch/logp_abs_mean", "rl/entropy", "train/grad_norm", "time/step_s", "time/rollout_s",
    "time/train_s",
)  # fmt: skip
COLORS = ("#7c8594", "#2f6fdf", "#7a4fd0", "#c2680a", "#0b7a53", "#a83232")
STYLE = """
text{font:12px system-ui,sans-serif;fill:#1c2430}.title{font-weight:600;font-size:14px}
.tick{font-size:11px;fill:#667085}.grid{stroke:#e2e6ec;stroke-width:1}
"""


def run(toml: str, folder: Path, recipes: list[str]) -> int:
    """All recipes at once; the largest exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for recipe in recipes:
        out = folder / recipe
        command = [sys.executable, "-m", "samebit", "train", toml, "--recipe", recipe]
        command += ["--out", str(out), *(["--resume"] if out.exists() else [])]
        with open(folder / f"{recipe}.log", "a", encoding="utf-8") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    return max(p.wait() for p in processes)


def collect(data: Path, folder: Path, recipes: list[str], about: dict[str, str]) -> None:
    """Keep what is drawn, one list of records a recipe; what `data` holds of others stays."""
    content: dict[str, Any] = {"about": {}, "runs": {}}
    if data.exists():
        content = json.loads(data.read_text(encoding="utf-8"))
    content["about"] |= about
    for recipe in recipes:
        path = folder / recipe / "metrics.jsonl"
        records = read_json_lines(path if path.exists() else folder / f"{recipe}.jsonl")
        content["runs"][recipe] = [_short({k: r[k] for k in KEPT if k in r}) for r in records]
    _write(data, content)


def compare(data: Path, first: Path, second: Path) -> None:
    """Keep how many of the steps that both runs have are equal."""
    kept = []
    for path in (first, second):
        path = path / "metrics.jsonl" if path.is_dir() else path
        kept.append({r["step"]: r for r in read_json_lines(path) if "mismatch/tokens" in r})
    steps = kept[0].keys() & kept[1].keys()
    # an evaluation is due at the last step of the shorter run only
    apart = ("time/", "perf/", "reward/eval")
    rows = [
        [{k: repr(v) for k, v in run[s].items() if not k.startswith(apart)} for s in steps]
        for run in kept
    ]
    same = sum(a == b for a, b in zip(*rows, strict=True))
    content = json.loads(data.read_text(encoding="utf-8"))
    content["about"][f"two runs of `{first.stem}`, one seed"] = (
        f"{same} of {len(steps)} steps equal in every number but those of a clock"
    )
    _write(data, content)


def _write(data: Path, content: dict[str, Any]) -> None:
    # a line a record: diffs of later runs stay readable
    text = re.sub(r"(?<=[}\]]), (?=[{\"])", ",\n", json.dumps(content))
    data.write_text(text + "\n", encoding="utf-8")


def _short(record: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}


def _points(records: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(r["step"], r[key]) for r in records if key in r]


def draw(data: Path) -> None:
    """The reward of every step, that on held-out questions, and the mismatch; and a table."""
    content = json.loads(data.read_text(encoding="utf-8"))
    runs: dict[str, list[dict[str, Any]]] = content["runs"]
    panels = (
        ("Reward of each step (moving average over a faint raw line)", "reward/mean", False),
        ("Reward on held-out questions", "reward/eval_mean", False),
        ("Mean |log-prob of trainer minus sampler|, before the update", "mismatch/logp_abs_mean", True),
    )  # fmt: skip
    body = [_legend(list(runs))]
    for i, (title, key, logarithmic) in enumerate(panels):
        lines = [
            Series(name, _points(records, key), color, dots=key == "reward/eval_mean")
            for (name, records), color in zip(runs.items(), COLORS, strict=False)
        ]
        values = [y for line in lines for _, y in line.points]
        axis = log_axis(values) if logarithmic else linear_axis(values, 0.0)
        chart = line_chart(lines, axis, smooth=key == "reward/mean")
        chart = re.sub(r' data-chart="[^"]*"', "", chart)
        y = 40 + i * (HEIGHT + 34)
        body.append(f'<text class="title" x="10" y="{y + 14}">{title}</text>')
        body.append(
            chart.replace("<svg ", f'<svg y="{y + 20}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        )
    height = 40 + len(panels) * (HEIGHT + 34)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>\n'
    )
    data.with_suffix(".svg").write_text(svg, encoding="utf-8")
    data.with_suffix(".md").write_text(_table(content, data.stem), encoding="utf-8")


def _legend(names: list[str]) -> str:
    out, x = [], 10
    for name, color in zip(names, COLORS, strict=False):
        out.append(f'<rect x="{x}" y="12" width="18" height="4" fill="{color}"/>')
        out.append(f'<text x="{x + 24}" y="19">{name}</text>')
        x += 44 + 8 * len(name)
    return "".join(out)


def _table(content: dict[str, Any], stem: str) -> str:
    rows = [
        "| recipe | steps | reward, first 10 steps | last 10 | held-out, first | last | tokens compared "
        "| tokens differing | max abs(dlogp) | longest answer | median seconds a step |",
        "|" + " --- |" * 11,
    ]
    for name, records in content["runs"].items():
        steps = [r for r in records if "mismatch/tokens" in r]
        held = [(r["step"], r["reward/eval_mean"]) for r in records if "reward/eval_mean" in r]
        first, last = (
            sum(r["reward/mean"] for r in part) / len(part) for part in (steps[:10], steps[-10:])
        )
        seconds = sorted(r["time/step_s"] for r in steps)[len(steps) // 2]
        total, differing = (
            sum(int(r[f"mismatch/{k}"]) for r in steps) for k in ("tokens", "tokens_differing")
        )
        largest = max(r["mismatch/logp_abs_max"] for r in steps)
        longest = max(int(r["rollout/length_max"]) for r in steps)
        rows.append(
            f"| `{name}` | {steps[-1]['step']} | {first:.3f} | {last:.3f} | {held[0][1]:.3f} | "
            f"{held[-1][1]:.3f} (step {held[-1][0]}) | {total:,} | {differing:,} | {largest:.3g} | "
            f"{longest} | {seconds:.2f} |"
        )
    about = "".join(f"- {key}: {value}\n" for key, value in content["about"].items())
    return f"# {stem.capitalize()}\n\n{about}\n![curves]({stem}.svg)\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("run")
    start.add_argument("toml")
    keep = verbs.add_parser("collect")
    keep.add_argument("data", type=Path)
    keep.add_argument("--about", nargs="*", default=[], metavar="KEY=TEXT")
    for verb in (start, keep):
        verb.add_argument("folder", type=Path)
        verb.add_argument("recipes", nargs="+")
    verbs.add_parser("draw").add_argument("data", type=Path)
    against = verbs.add_parser("compare")
    for name in ("data", "first", "second"):
        against.add_argument(name, type=Path)
    found = parser.parse_args()
    if found.verb == "run":
        sys.exit(run(found.toml, found.folder, found.recipes))
    if found.verb == "collect":
        about = dict(item.split("=", 1) for item in found.about)
        collect(found.data, found.folder, found.recipes, about)
    elif found.verb == "compare":
        compare(found.data, found.first, found.second)
    else:
        draw(found.data)


if __name__ == "__main__":
    main()
